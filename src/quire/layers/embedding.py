"""Token embedding and LM head. As in a linear layer, a method stores the weight, looks rows up and multiplies."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.attn.batch import LoRATokens, Tokens
from quire.dist.collectives import Group
from quire.layers.lora import EmbeddingBank, HeadBank
from quire.layers.parameter import Method, MethodLayer, Role, WeightSlices, parameter, rows_of
from quire.ops.linear import linear_float


class EmbeddingMethod(Protocol):
    def shapes(self, count: int, size: int) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of the parameters by their names in the checkpoint, relative to the layer's path."""
        ...

    def look_up(self, layer: "Embedding", ids: Tensor) -> Tensor:
        """Return the embeddings [T, size] of ids [T]."""
        ...


class PlainEmbedding:
    def shapes(self, count: int, size: int) -> Mapping[str, tuple[int, ...]]:
        return {"weight": (count, size)}

    def look_up(self, layer: "Embedding", ids: Tensor) -> Tensor:
        assert layer.weight is not None
        return F.embedding(ids, layer.weight)


class Embedding(MethodLayer):
    """Token embedding. `scale` multiplies the embeddings; it is rounded to the weight's dtype first, as in training."""

    role = Role.VOCABULARY
    weight: nn.Parameter | None
    group: Group | None = None  # ranks that hold the other rows
    bank: EmbeddingBank | None = None  # this layer's share of every loaded LoRA adapter

    def __init__(self, count: int, size: int, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale
        self.total, self.size = count, size
        self.method: EmbeddingMethod = PlainEmbedding()
        self.shard(range(count))

    def shard(self, rows: range) -> None:
        """Hold only these rows. Before loading."""
        self.local = rows
        self.use(self.method)

    def use(self, method: EmbeddingMethod) -> None:
        self.method = method
        self.declare(method.shapes(len(self.local), self.size))

    def weight_slices(self, path: str) -> WeightSlices:
        return row_slices(self, path, self.method.shapes(self.total, self.size))

    def finish(self, device: torch.device) -> None:  # noqa: ARG002
        kind = torch.float32 if self.weight is None else self.weight.dtype
        self.scale = torch.tensor(self.scale, dtype=kind).item()

    if TYPE_CHECKING:

        def __call__(self, ids: Tensor, tokens: Tokens) -> Tensor: ...

    def forward(self, ids: Tensor, tokens: Tokens) -> Tensor:
        """ids [T] -> [T, size]."""
        lora = tokens.lora
        x = self.method.look_up(self, ids) if self.group is None and lora is None else self._look_up_all(ids, lora)
        return x if self.scale == 1.0 else x * self.scale

    def _look_up_all(self, ids: Tensor, lora: LoRATokens | None) -> Tensor:
        """Look ids up with LoRA and all ranks' rows."""
        bank = None if lora is None else self.bank
        known = ids.clamp(max=self.total - 1) if bank is not None and bank.more else ids
        if self.group is not None:
            x = self.group.add(self._look_up_own(known, lora))
        else:
            x = self.method.look_up(self, known)
            if bank is not None:
                x = bank.add(x, known, lora)
        return bank.add_more(x, ids, lora, self.total) if bank is not None and bank.more else x

    def _look_up_own(self, ids: Tensor, lora: LoRATokens | None) -> Tensor:
        """Return the embeddings of this rank's ids; zeros for the others."""
        own = ids - self.local.start
        theirs = (own < 0) | (own >= len(self.local))
        own = own.masked_fill(theirs, 0)
        x = self.method.look_up(self, own).masked_fill(theirs.unsqueeze(1), 0.0)
        return x if lora is None or self.bank is None else self.bank.add(x, own, lora, theirs)


class PositionEmbedding(Embedding):
    """Position embedding: small, so every rank holds all of it."""

    role = Role.REPLICATED


class HeadMethod(Protocol):
    @property
    def dtypes(self) -> Mapping[str, torch.dtype]: ...

    def shapes(self, vocab_size: int, hidden_size: int) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of the parameters by the method's own names; a tied head has none."""
        ...

    def weight_slices(self, layer: "Head", path: str) -> WeightSlices: ...

    def finish(self, layer: "Head") -> None: ...

    def apply(self, layer: "Head", hidden: Tensor) -> Tensor:
        """Return the logits [P, V] float32 of hidden [P, H], neither scaled nor capped."""
        ...


class PlainHead(Method):
    def shapes(self, vocab_size: int, hidden_size: int) -> Mapping[str, tuple[int, ...]]:
        return {"weight": (vocab_size, hidden_size)}

    def weight_slices(self, layer: "Head", path: str) -> WeightSlices:
        return row_slices(layer, path, self.shapes(layer.total, layer.hidden_size)) if layer.tied is None else {}

    def apply(self, layer: "Head", hidden: Tensor) -> Tensor:
        return linear_float(hidden, layer.matrix(), layer.bias)


class Head(MethodLayer):
    """LM head: hidden states to float32 logits, with its own matrix or the embedding's (`tied`)."""

    role = Role.VOCABULARY
    weight: nn.Parameter | None
    group: Group | None = None  # ranks that hold the other tokens
    bank: HeadBank | None = None  # this layer's share of every loaded LoRA adapter

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        tied: Embedding | None = None,
        bias: bool = False,
        scale: float = 1.0,
        soft_cap: float | None = None,
    ) -> None:
        super().__init__()
        self.tied = tied
        self.scale, self.soft_cap = scale, soft_cap
        self.total, self.hidden_size, self.biased = vocab_size, hidden_size, bias
        self.method: HeadMethod = PlainHead()
        self.shard(range(vocab_size))

    def shard(self, tokens: range) -> None:
        """Compute only the logits of these tokens. Before loading."""
        self.local = tokens
        self.bias = parameter(len(tokens)) if self.biased else None
        self.use(self.method)

    def use(self, method: HeadMethod) -> None:
        self.method = method
        self.declare({} if self.tied is not None else method.shapes(len(self.local), self.hidden_size), method.dtypes)

    def weight_slices(self, path: str) -> WeightSlices:
        """Return the slices of the checkpoint; a checkpoint may also store a tied matrix."""
        taken = self.method.weight_slices(self, path)
        if self.bias is not None:
            taken[f"{path}.bias"] = rows_of((self.total,), [(self.bias.data, self.local)])
        return taken if self.tied is None else {f"{path}.weight": None, **taken}

    def finish(self, device: torch.device) -> None:  # noqa: ARG002
        self.method.finish(self)

    if TYPE_CHECKING:

        def __call__(self, hidden: Tensor, tokens: Tokens) -> Tensor: ...

    def forward(self, hidden: Tensor, tokens: Tokens) -> Tensor:
        """hidden [P, H] -> [P, V] float32; columns for tokens that LoRA adapters add come after the V."""
        logits, lora = self.method.apply(self, hidden), tokens.lora
        if lora is not None and self.bank is not None:
            logits = self.bank.add(logits, hidden, lora, self.bias)
        logits = self._shape(logits)
        if self.group is not None:
            logits = self.group.join(logits, self.total)
        if self.bank is not None and self.bank.more:
            logits = self.bank.widen(logits, hidden, lora, self._shape)
        return logits

    def _shape(self, logits: Tensor) -> Tensor:
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.soft_cap is not None:
            logits = torch.tanh(logits / self.soft_cap) * self.soft_cap
        return logits

    def matrix(self) -> Tensor:
        weight = self.weight if self.tied is None else self.tied.weight
        assert weight is not None
        return weight


def row_slices(layer: Embedding | Head, path: str, shapes: Mapping[str, tuple[int, ...]]) -> WeightSlices:
    """Return the layer's rows of checkpoint tensors of these shapes."""
    return {f"{path}.{name}": rows_of(shapes[name], [(layer.get_parameter(name).data, layer.local)]) for name in layer.stored}
