"""Mixture of experts: experts, routing and shared experts."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from quire.attn.batch import PLAIN, Tokens
from quire.dist.collectives import Exchange, Group, add_parts
from quire.layers.linear import Linear, Plain
from quire.layers.lora import ExpertsBank
from quire.layers.norm import RMSNorm
from quire.layers.parameter import CheckpointTensor, Destination, Method, MethodLayer, Role, WeightSlices, parameter
from quire.ops.activation import check_activation
from quire.ops.arguments import ClampedSwiglu, ExpertBiases, Gated, Inner, Ungated
from quire.ops.linear import linear_float
from quire.ops.moe import experts_forward, route, route_by_scores, route_sparsemixer
from quire.types.errors import ModelError

FREE_SLOT = -1  # a free expert slot
COPY_CHOICE_VALUES = 8  # activation values per token that choose among copies of an expert


class Balance:
    """Copies of one layer's experts on several ranks: which copy a token uses, and how many tokens each expert gets.

    All ranks see the same tokens, and so make the same choice and count the same.
    """

    def __init__(self, experts: int, ranks: Sequence[Sequence[int]], device: torch.device) -> None:
        """ranks: see `place`."""
        self.loads = torch.zeros(experts, dtype=torch.int64, device=device)  # tokens since the last reset
        self.place(ranks)

    def place(self, ranks: Sequence[Sequence[int]]) -> None:
        """ranks: the experts of every rank, slot by slot; FREE_SLOT: a free slot. Slots are numbered through all ranks."""
        self.ranks = [list(experts) for experts in ranks]
        found: list[list[int]] = [[] for _ in self.loads]
        for place, expert in enumerate(expert for experts in ranks for expert in experts):
            if expert != FREE_SLOT:
                found[expert].append(place)
        most = max(map(len, found))
        self._copies = torch.tensor([len(places) for places in found], device=self.loads.device)
        self._places = torch.tensor([places + places[:1] * (most - len(places)) for places in found], device=self.loads.device)

    def choose(self, x: Tensor, experts: Tensor) -> Tensor:
        """Return the slots [T, top_k] that run `experts` [T, top_k] for x [T, H]. A slot depends on the token alone."""
        self.loads += torch.bincount(experts.flatten(), minlength=len(self.loads))
        bits = x[:, :COPY_CHOICE_VALUES].contiguous().view({2: torch.int16, 4: torch.int32}[x.element_size()])
        some = bits.to(torch.int64).sum(-1, keepdim=True)
        return self._places[experts, some % self._copies[experts]]


class ExpertsMethod(Protocol):
    @property
    def dtypes(self) -> Mapping[str, torch.dtype]: ...

    def shapes(self, count: int, hidden_size: int, inner_size: int) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of the parameters by the method's own names."""
        ...

    def weight_slices(self, layer: "Experts", path: str) -> WeightSlices: ...

    def finish(self, layer: "Experts") -> None: ...

    def apply(self, layer: "Experts", x: Tensor, weights: Tensor, experts: Tensor) -> Tensor: ...


class PlainExperts(Method):
    """Two stacks of matrices in the model's dtype."""

    def shapes(self, count: int, hidden_size: int, inner_size: int) -> Mapping[str, tuple[int, ...]]:
        return {"up": (count, 2 * inner_size, hidden_size), "down": (count, hidden_size, inner_size)}  # gate rows first

    def weight_slices(self, layer: "Experts", path: str) -> WeightSlices:
        found, rows, inner, width = layer.local, layer.local_inner, layer.total_inner, layer.hidden_size
        up, down = layer.up.data, layer.down.data
        gates, ups = up.chunk(2, dim=1)
        across, some = (0, width), (rows.start, rows.stop)
        taken: WeightSlices = {}
        if layer.fused:
            few, below = (found.start, found.stop), (inner + rows.start, inner + rows.stop)
            both = [Destination(gates, (few, some, across)), Destination(ups, (few, below, across))]
            if layer.paired:
                both = [Destination(up, (few, pairs_of(rows), across))]
            elif len(rows) == inner:
                both = [Destination(up, (few, (0, 2 * inner), across))]
            gate_up = CheckpointTensor((layer.total, 2 * inner, width), tuple(both)).simple
            back = CheckpointTensor((layer.total, width, inner), (Destination(down, (few, across, some)),)).simple
            for name, entry in (("gate_up_proj", gate_up), ("down_proj", back)):
                taken[f"{path}.{name}"] = entry.transposed if layer.transposed else entry
            return taken
        for name, stack, shape, ranges in (
            ("gate_proj", gates, (inner, width), (some, across)),
            ("up_proj", ups, (inner, width), (some, across)),
            ("down_proj", down, (width, inner), (across, some)),
        ):
            for expert in range(layer.total):
                place = f"{path}.{expert}.{name}.weight"
                taken[place] = None
                if expert in found:
                    taken[place] = CheckpointTensor(shape, (Destination(stack[expert - found.start], ranges),)).simple
        return taken

    def finish(self, layer: "Experts") -> None:
        if layer.paired:
            part_pairs(layer.up.data)

    def apply(self, layer: "Experts", x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        return experts_forward(x, weights, experts, layer.up, layer.down, layer.activation, layer.biases)


class UngatedExperts(PlainExperts):
    """Two stacks of matrices with an activation between them.

    The checkpoint has `path.<e>.up_proj.weight` and `path.<e>.down_proj.weight`, or all experts in `path.up_proj`
    [E, inner, hidden] and `path.down_proj` [E, hidden, inner].
    """

    def shapes(self, count: int, hidden_size: int, inner_size: int) -> Mapping[str, tuple[int, ...]]:
        return {"up": (count, inner_size, hidden_size), "down": (count, hidden_size, inner_size)}

    def weight_slices(self, layer: "Experts", path: str) -> WeightSlices:
        found, inner, width = layer.local, layer.total_inner, layer.hidden_size
        few, some, across = (found.start, found.stop), (layer.local_inner.start, layer.local_inner.stop), (0, width)
        taken: WeightSlices = {}
        for name, stack, shape, ranges in (
            ("up_proj", layer.up.data, (inner, width), (some, across)),
            ("down_proj", layer.down.data, (width, inner), (across, some)),
        ):
            if layer.fused:
                taken[f"{path}.{name}"] = CheckpointTensor((layer.total, *shape), (Destination(stack, (few, *ranges)),)).simple
                continue
            for expert in range(layer.total):
                own = Destination(stack[expert - found.start], ranges) if expert in found else None
                taken[f"{path}.{expert}.{name}.weight"] = None if own is None else CheckpointTensor(shape, (own,)).simple
        return taken


class Experts(MethodLayer):
    """The experts of a layer.

    The checkpoint has `path.<e>.gate_proj.weight`, `path.<e>.up_proj.weight` and `path.<e>.down_proj.weight`, or all experts in
    `path.gate_up_proj` [E, 2 * inner, hidden] and `path.down_proj` [E, hidden, inner], or both of these transposed.

    paired: gpt-oss: stacked and transposed, gate and up rows interleaved, with biases `path.gate_up_proj_bias` [E, 2 * inner]
        and `path.down_proj_bias` [E, hidden]; some files store these per expert, too (`path.<e>.gate_proj.bias`).
    """

    up: nn.Parameter
    down: nn.Parameter

    role = Role.EXPERT
    group: Group | None = None  # ranks whose outputs are all-reduced
    exchange: Exchange | None = None  # set if several engines share the experts
    number = 0  # index of this layer in the exchange
    bank: ExpertsBank | None = None  # this layer's share of every loaded LoRA adapter
    balance: Balance | None = None  # set if experts have copies: then `local` and `total` count expert slots

    def __init__(self, count: int, hidden_size: int, inner_size: int, activation: Inner, *, paired: bool = False) -> None:
        super().__init__()
        if not isinstance(activation, ClampedSwiglu):
            check_activation(activation if isinstance(activation, str) else activation.name)
        self.activation, self.gated = activation, not isinstance(activation, Ungated)
        self.total, self.hidden_size, self.total_inner = count, hidden_size, inner_size
        self.in_pairs = paired  # with biases and, in the family's own files, interleaved
        self.paired = self.fused = self.transposed = paired  # how the checkpoint stores them
        self.method: ExpertsMethod = PlainExperts() if self.gated else UngatedExperts()
        self.shard(range(count), range(inner_size))

    def shard(self, experts: range, inner: range) -> None:
        """Hold only these experts, and these of their inner dimension. Before loading."""
        self.local, self.local_inner = experts, inner
        self.up_bias = parameter(len(experts), 2 * len(inner)) if self.in_pairs else None
        # of the ranks that share each expert, the first adds the bias
        self.down_bias = parameter(len(experts), self.hidden_size) if self.in_pairs and inner.start == 0 else None
        self.use(self.method)

    def use(self, method: ExpertsMethod) -> None:
        self.method = method
        self.declare(method.shapes(len(self.local), self.hidden_size, len(self.local_inner)), method.dtypes)

    @property
    def gating(self) -> Gated:
        """Return the activation of gated experts."""
        assert not isinstance(self.activation, Ungated)
        return self.activation

    @property
    def biases(self) -> ExpertBiases | None:
        return None if self.up_bias is None else ExpertBiases(self.up_bias, self.down_bias)

    def arrange(self, path: str, shapes: Mapping[str, tuple[int, ...]]) -> None:
        if self.paired:
            self.paired = self.fused = self.transposed = f"{path}.0.gate_proj.weight" not in shapes
            return
        self.fused = f"{path}.gate_up_proj" in shapes or f"{path}.up_proj" in shapes
        count, inner, hidden = self.total, self.total_inner, self.hidden_size
        found = [shapes.get(f"{path}.{name}") for name in ("gate_up_proj", "down_proj")]  # one of them may be square
        self.transposed = self.gated and found == [(count, hidden, 2 * inner), (count, inner, hidden)]

    def weight_slices(self, path: str) -> WeightSlices:
        taken = self.method.weight_slices(self, path)
        if self.up_bias is not None:
            taken |= (
                self._paired_biases(path, self.up_bias.data) if self.paired else self._single_biases(path, self.up_bias.data)
            )
        return taken

    def _paired_biases(self, path: str, up_bias: Tensor) -> WeightSlices:
        some, across = (self.local.start, self.local.stop), (0, self.hidden_size)
        pairs = Destination(up_bias, (some, pairs_of(self.local_inner)))
        down = None  # another rank adds it
        if self.down_bias is not None:
            down = CheckpointTensor((self.total, self.hidden_size), (Destination(self.down_bias.data, (some, across)),)).simple
        return {
            f"{path}.gate_up_proj_bias": CheckpointTensor((self.total, 2 * self.total_inner), (pairs,)).simple,
            f"{path}.down_proj_bias": down,
        }

    def _single_biases(self, path: str, up_bias: Tensor) -> WeightSlices:
        gates, ups = up_bias.chunk(2, dim=1)
        some, across, down = (self.local_inner.start, self.local_inner.stop), (0, self.hidden_size), self.down_bias
        taken: WeightSlices = {}
        for name, stack, size, edges in (
            ("gate_proj", gates, self.total_inner, some),
            ("up_proj", ups, self.total_inner, some),
            ("down_proj", None if down is None else down.data, self.hidden_size, across),
        ):
            for expert in range(self.total):
                own = (
                    None
                    if stack is None or expert not in self.local
                    else Destination(stack[expert - self.local.start], (edges,))
                )
                taken[f"{path}.{expert}.{name}.bias"] = None if own is None else CheckpointTensor((size,), (own,)).simple
        return taken

    def finish(self, device: torch.device) -> None:  # noqa: ARG002
        if self.up_bias is not None and self.paired:
            part_pairs(self.up_bias.data)
        self.method.finish(self)

    def forward(self, x: Tensor, weights: Tensor, experts: Tensor, tokens: Tokens) -> Tensor:
        """x [T, H], weights and experts [T, top_k] -> [T, H]."""
        if self.exchange is not None:
            return self._run_everywhere(self.exchange, x, weights, experts)
        if self.group is None:
            return self._run(x, weights, experts, tokens)
        if self.balance is not None:
            experts = self.balance.choose(x, experts)
        if len(self.local) < self.total:  # another rank's experts add nothing
            experts = experts - self.local.start
            theirs = (experts < 0) | (experts >= len(self.local))
            weights, experts = weights.masked_fill(theirs, 0.0), experts.masked_fill(theirs, 0)
        return add_parts(self._run(x, weights, experts, tokens), self.group)

    def _run_everywhere(self, exchange: Exchange, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """Run on all engines' experts; an engine's first rank sends its tokens and all-reduces the result to the others."""
        out = exchange.run(self.number, x, weights, experts) if exchange.leads else torch.zeros_like(x)
        return out if self.group is None else add_parts(out, self.group)

    def run_own(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """Return what this rank's experts add to x [T, H] of any engine."""
        if self.balance is not None:
            experts = self.balance.choose(x, experts)
        experts = experts - self.local.start
        theirs = (experts < 0) | (experts >= len(self.local))
        some = (~theirs).any(-1).nonzero().squeeze(1)
        weights, experts = weights.masked_fill(theirs, 0.0), experts.masked_fill(theirs, 0)
        return torch.zeros_like(x).index_copy_(0, some, self._run(x[some], weights[some], experts[some], PLAIN))

    def _run(self, x: Tensor, weights: Tensor, experts: Tensor, tokens: Tokens) -> Tensor:
        out = self.method.apply(self, x, weights, experts)
        if tokens.lora is not None and self.bank is not None:
            out = self.bank.replace(out, x, weights, experts, tokens.lora, self)
        return out


def pairs_of(rows: range) -> tuple[int, int]:
    """Return the range of interleaved gate and up rows."""
    return 2 * rows.start, 2 * rows.stop


def part_pairs(stack: Tensor) -> None:
    """Turn interleaved gate and up rows of stack [E, 2n, ...] into gate rows, then up rows, in place. One expert at a time:
    each needs a copy.
    """
    for one in stack:
        one.copy_(torch.cat((one[0::2], one[1::2])))


class MoE(nn.Module):
    """Mixture of experts with a softmax router. `renormalize`: the weights of the chosen experts sum to one. `biased`: the
    router has a bias. `paired`: see `Experts`.
    """

    def __init__(
        self,
        hidden_size: int,
        inner_size: int,
        activation: Inner,
        *,
        experts: int,
        top_k: int,
        renormalize: bool,
        biased: bool = False,
        paired: bool = False,
    ) -> None:
        super().__init__()
        if not 1 <= top_k <= experts:
            raise ModelError(f"num_experts_per_tok must be between 1 and the {experts} experts of a layer; got {top_k}")
        self.top_k, self.renormalize = top_k, renormalize
        self.gate = Linear(hidden_size, experts, bias=biased)
        self.experts = Experts(experts, hidden_size, inner_size, activation, paired=paired)

    def forward(self, x: Tensor, tokens: Tokens) -> Tensor:
        weights, chosen = route(self.gate(x, tokens), self.top_k, self.renormalize)
        out: Tensor = self.experts(x, weights, chosen, tokens)
        return out


class RoutedMoE(MoE):
    """Mixture of experts with other routers, shared experts and a norm.

    scoring: function from router logits to scores
    correction: shape of the bias that is added to scores for the choice only
    groups: (expert groups, groups chosen, best experts that score a group)
    scale: factor of the chosen experts' weights
    tolerance: of Phi's sparse mixer
    shared: expert for every token; `shared_gated`: with a sigmoid gate
    norm: of the output
    """

    fixed = frozenset({"e_score_correction_bias"})

    def __init__(
        self,
        hidden_size: int,
        inner_size: int,
        activation: Inner,
        *,
        experts: int,
        top_k: int,
        renormalize: bool,
        scoring: Literal["softmax", "sigmoid", "sparsemixer"] = "softmax",
        correction: Sequence[int] | None = None,
        groups: tuple[int, int, int] = (1, 1, 2),
        scale: float = 1.0,
        tolerance: float = 0.01,
        shared: nn.Module | None = None,
        shared_gated: bool = False,
        norm: RMSNorm | None = None,
    ) -> None:
        super().__init__(hidden_size, inner_size, activation, experts=experts, top_k=top_k, renormalize=renormalize)
        for name, value in (("routed_scaling_factor", scale), ("router_jitter_noise", tolerance)):
            if not isinstance(value, int | float):  # a configuration may have null
                raise ModelError(f"{name} must be a number; got {value!r}")
        self.scoring, self.groups, self.scale, self.tolerance = scoring, groups, scale, tolerance
        self.e_score_correction_bias = None if correction is None else parameter(*correction, dtype=torch.float32)
        self.shared_expert = shared
        self.shared_expert_gate = Linear(hidden_size, 1) if shared_gated else None
        self.post_mlp_layernorm = norm

    def forward(self, x: Tensor, tokens: Tokens) -> Tensor:
        out = self.run_experts(x, *self.choose(x, tokens), tokens)
        if self.shared_expert is None:
            return self.normed(out)
        shared: Tensor = self.shared_expert(x, tokens)
        if self.shared_expert_gate is not None:
            shared = torch.sigmoid(self.shared_expert_gate(x, tokens)) * shared
        return self.normed(out + shared)

    def run_experts(self, x: Tensor, weights: Tensor, chosen: Tensor, tokens: Tokens) -> Tensor:
        out: Tensor = self.experts(x, weights, chosen, tokens)
        return out

    def normed(self, out: Tensor) -> Tensor:
        return out if self.post_mlp_layernorm is None else self.post_mlp_layernorm(out)

    def choose(self, x: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """Return weights [T, top_k] float32 and experts [T, top_k] for x [T, H]."""
        correction = self.e_score_correction_bias
        if self.scoring == "softmax" and correction is None and self.groups[0] == 1 and self.scale == 1.0:
            return route(self.gate(x, tokens), self.top_k, self.renormalize)
        plain = isinstance(self.gate.method, Plain) and (tokens.lora is None or self.gate.bank is None)
        logits = linear_float(x, self.gate.weight, self.gate.bias) if plain else self.gate(x, tokens).float()
        if self.scoring == "sparsemixer":
            return route_sparsemixer(logits, self.top_k, self.tolerance)
        return route_by_scores(
            logits,
            self.top_k,
            scoring=self.scoring,
            correction=None if correction is None else correction.flatten(),
            groups=self.groups[0],
            top_groups=self.groups[1],
            group_best=self.groups[2],
            renormalize=self.renormalize,
            scale=self.scale,
        )


class NarrowMoE(RoutedMoE):
    """Experts over a projection of the hidden state to `width`, projected back to the hidden size."""

    def __init__(self, hidden_size: int, inner_size: int, activation: Inner, *, width: int, bias: bool, **more: Any) -> None:
        super().__init__(hidden_size, inner_size, activation, **more)
        self.experts = Experts(more["experts"], width, inner_size, activation)
        self.fc1_latent_proj = Linear(hidden_size, width, bias=bias)
        self.fc2_latent_proj = Linear(width, hidden_size, bias=bias)

    def run_experts(self, x: Tensor, weights: Tensor, chosen: Tensor, tokens: Tokens) -> Tensor:
        narrow = self.fc1_latent_proj(x, tokens)
        out: Tensor = self.fc2_latent_proj(self.experts(narrow, weights, chosen, tokens), tokens)
        return out
