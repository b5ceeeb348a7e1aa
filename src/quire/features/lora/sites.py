"""The layers of a model that adapters can add to: what a rank needs of an addition, and its way to the layer's bank."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from quire.features.lora.values import Scaled
from quire.layers.embedding import Embedding, Head
from quire.layers.linear import Linear
from quire.layers.lora import (
    EmbeddingBank,
    EmbeddingLoRA,
    ExpertsBank,
    ExpertsLoRA,
    HeadBank,
    LinearBank,
    LinearLoRA,
    LowRank,
    OtherRows,
)
from quire.layers.moe import Experts
from quire.layers.parameter import Role
from quire.ops.adapters import make_table
from quire.types.errors import AdapterError

AT_ONCE = 256  # inputs of a matrix that are processed together

Weights = dict[str, Tensor]  # weights of an adapter for one layer, by names of the site's own
Given = dict[str, Tensor | Scaled]  # the same, with the dtypes of the file
Entries = list[tuple[int, ...]]


@dataclass(frozen=True)
class Addition:
    """What an adapter has for one matrix of the checkpoint, whole, on the host."""

    down: Tensor | None = None  # [rank, inputs]; of an embedding [rank, tokens]
    up: Tensor | None = None  # [outputs, rank]
    magnitude: Tensor | None = None  # [outputs] DoRA magnitude: the norm that each row of weight + scale * up @ down gets
    added: Tensor | None = None  # [outputs] added after the product, multiplied by the scale
    bias: Tensor | None = None  # [outputs] in place of the layer's own
    whole: Tensor | None = None  # [outputs, inputs] in place of the layer's own; of an embedding [tokens, size]
    more: Tensor | None = None  # [n, inputs], or of an embedding [n, size]: rows of added vocabulary tokens
    tokens: Tensor | None = None  # [n] int64, rising: token ids whose rows are replaced
    rows: Tensor | None = None  # [n, inputs], or of an embedding [n, size]: the replaced rows of `tokens`
    # of experts: each is down [E, rank, inputs] and up [E, outputs, rank], multiplied by the scale
    gate_up: tuple[Tensor, Tensor] | None = None
    back: tuple[Tensor, Tensor] | None = None
    scale: float = 1.0  # that down and up are multiplied by

    @property
    def is_nothing(self) -> bool:
        return all(value is None for name, value in vars(self).items() if name != "scale")


class Site(Protocol):
    """A layer with a bank."""

    @property
    def path(self) -> str: ...

    @property
    def kind(self) -> str: ...

    @property
    def shapes(self) -> Mapping[str, tuple[int, int]]:
        """Return (outputs, inputs) of the checkpoint matrices that the layer consists of, by their paths."""

    def cut(self, found: Mapping[str, Addition]) -> Given:
        """Return the weights that this rank needs, by names of the site's own."""

    def put(self, slot: int, weights: Weights, known: Weights) -> None:
        """Put weights, which are on the device, into the layer's bank.

        known: DoRA gains of this adapter, by site; missing ones are computed and added
        """

    @property
    def parts(self) -> Sequence[tuple[int, int]]:
        """Return (first output, outputs) of each part that kernels add to; empty: kernels do not support the site."""

    def tabulate(self, slot: int) -> Entries:
        """Return the entry of each part in the address table (`ops.arguments.AdapterTable`)."""

    def drop(self, slot: int) -> None: ...


class Untabled:
    """A site that kernels do not support."""

    parts: Sequence[tuple[int, int]] = ()

    def tabulate(self, slot: int) -> Entries:  # noqa: ARG002
        return []


class LinearSite:
    kind = "linear"

    def __init__(self, path: str, layer: Linear) -> None:
        self.path, self._layer, self._parts = path, layer, layer.parts(path)
        self.shapes = {name: (part.outputs, layer.all_inputs) for name, part in self._parts.items()}
        self.parts = [(part.local[0][0], part.rows) for part in self._parts.values()]
        self._bank = layer.bank = LinearBank()
        # of the ranks whose outputs are added, one adds what is not a product
        self._adds = layer.role is not Role.ROW or layer.local_inputs.start == 0

    @property
    def inputs(self) -> int:
        """Return the inputs of this rank."""
        return self._layer.inputs

    @property
    def biased(self) -> bool:
        return self._layer.biased

    def cut(self, found: Mapping[str, Addition]) -> Given:
        weights: Given = {}
        across, downs = self._layer.local_inputs, list[Tensor]()
        for name, addition in found.items():
            rows = [some for _, some in self._parts[name].local]
            if addition.down is not None and addition.up is not None:
                downs.append(addition.down[:, across.start : across.stop])
                if self._bank.table is not None:
                    weights[f"{name}.down"] = downs[-1]
                weights[f"{name}.up"] = Scaled(_rows(addition.up, rows).t(), addition.scale)
            if addition.magnitude is not None:
                weights[f"{name}.magnitude"] = _rows(addition.magnitude, rows)
            if self._adds:
                for key, values in (("added", addition.added), ("bias", addition.bias)):
                    if values is not None:
                        weights[f"{name}.{key}"] = _rows(values, rows)
        if downs and self._bank.table is None:
            weights["down"] = torch.cat(downs).t()  # the layout in which GEMMs on a CPU are fast
        return weights

    def put(self, slot: int, weights: Weights, known: Weights) -> None:
        parts, stacked, at = list[LowRank](), weights.get("down"), 0
        names = [name.removesuffix(".up") for name in weights if name.endswith(".up")]
        for name in names:
            up = weights[f"{name}.up"]
            down = weights[f"{name}.down"].t() if stacked is None else stacked[:, at : at + len(up)]
            parts.append(LowRank(self._parts[name].local[0][0], down, up))
            at += len(up)
        gain = self._gain(parts, weights, known)
        bias = self._bias(weights, self._layer.bias)
        self._bank.put(slot, LinearLoRA(tuple(parts), gain, bias, stacked=stacked))

    def drop(self, slot: int) -> None:
        self._bank.drop(slot)

    def use_table(self, entries: Tensor, stride: int, ranks: int) -> None:
        self._bank.table = make_table(entries, stride, ranks, self.parts)

    def offsets(self, where: Mapping[str, tuple[int, tuple[int, ...]]]) -> Iterator[tuple[int, int, int] | None]:
        """Yield the first elements of down and up of each part, and their rank; None: the adapter does not change the part.

        where: first element and shape of each tensor of the adapter
        """
        for name in self._parts:
            down, up = where.get(f"{name}.down"), where.get(f"{name}.up")
            yield None if down is None or up is None else (down[0], up[0], up[1][0])

    def tabulate(self, slot: int) -> Entries:
        weights = self._bank.slots[slot]
        low = {part.start: part for part in weights.parts}
        found = Entries()
        for start, _ in self.parts:
            part = low.get(start)
            matrices = (0, 0, 0) if part is None else (part.down.data_ptr(), part.up.data_ptr(), len(part.up))
            found.append((*matrices, _address(weights.gain, start), _address(weights.bias, start)))
        return found

    def _bias(self, weights: Weights, own: Tensor | None) -> Tensor | None:
        """Return the values added after the product: the adapter's `added`, and the difference of its bias to the layer's."""
        total: Tensor | None = None
        for name, part in self._parts.items():
            start, count = part.local[0][0], part.rows
            added, bias = weights.get(f"{name}.added"), weights.get(f"{name}.bias")
            for values in (added, None if bias is None or own is None else bias - own[start : start + count]):
                if values is not None:
                    total = values.new_zeros(self._layer.outputs) if total is None else total
                    total[start : start + count] += values
        return total

    def _gain(self, parts: Sequence[LowRank], weights: Weights, known: Weights) -> Tensor | None:
        magnitudes = {name: weights[f"{name}.magnitude"] for name in self._parts if f"{name}.magnitude" in weights}
        if not magnitudes:
            return None
        if self.path not in known:
            first = next(iter(magnitudes.values()))
            lengths = self._row_lengths(parts, first)
            gain = torch.ones_like(lengths)
            for name, magnitude in magnitudes.items():
                start = self._parts[name].local[0][0]
                some = slice(start, start + len(magnitude))
                gain[some] = magnitude.float() / lengths[some]
            known[self.path] = gain.to(first.dtype).cpu()
        return known[self.path].to(next(iter(magnitudes.values())).device)

    def _row_lengths(self, parts: Sequence[LowRank], like: Tensor) -> Tensor:
        layer = self._layer
        squares = squares_of_rows(partial(layer.method.apply, layer), layer.inputs, parts, like)
        if layer.group is None or layer.joined is not None:  # this rank has all inputs of its outputs
            return squares.sqrt()
        return layer.group.add(squares).sqrt()


class LatentSite(LinearSite):
    """The projection from latents to keys and values, inside attention.

    Without kernels, an adapter's bank entry is the whole matrix with the addition in it.
    """

    kind = "latent"

    def put(self, slot: int, weights: Weights, known: Weights) -> None:
        super().put(slot, weights, known)
        if self._bank.table is not None:
            return
        weight, made = self._layer.weight, self._bank.slots[slot]
        whole = weight.float().clone()
        for part in made.parts:
            whole[part.outputs] += (part.down.float() @ part.up.float()).t()
        whole = whole if made.gain is None else whole * made.gain.float().unsqueeze(1)
        self._bank.put(slot, LinearLoRA(whole=whole.to(weight.dtype)))


class ClassSite(LinearSite):
    """A layer of a classification head, whose matrix an adapter may replace. Kernels do not support it."""

    kind = "classes"

    def __init__(self, path: str, layer: Linear) -> None:
        super().__init__(path, layer)
        self.parts = []

    def cut(self, found: Mapping[str, Addition]) -> Given:
        weights, [(name, addition)] = super().cut(found), found.items()
        return weights if addition.whole is None else {**weights, f"{name}.whole": addition.whole.t()}

    def put(self, slot: int, weights: Weights, known: Weights) -> None:
        super().put(slot, weights, known)
        whole = weights.get(f"{next(iter(self.shapes))}.whole")
        self._bank.put(slot, replace(self._bank.slots[slot], whole=whole))


class HeadSite(Untabled):
    kind = "head"

    def __init__(self, path: str, layer: Head, more: int = 0) -> None:
        self.path, self._layer = path, layer
        self.shapes = {path: (layer.total, layer.hidden_size)}
        self._bank = layer.bank = HeadBank()
        self._bank.more = more

    @property
    def biased(self) -> bool:
        return self._layer.biased

    @property
    def tied(self) -> bool:
        return self._layer.tied is not None

    def tied_to(self, sites: Iterable[Site]) -> str | None:
        """Return the path of the embedding that the head is tied to. They may be in different pipeline stages."""
        shape = (self._layer.hidden_size, self._layer.total)
        own = [site.path for site in sites if site.kind == "embedding" and [*site.shapes.values()] == [shape]]
        return own[0] if own and self.tied else None

    def cut(self, found: Mapping[str, Addition]) -> Given:
        [addition] = found.values()
        rows, weights = [self._layer.local], _token_rows(addition, self._layer.local)
        if addition.down is not None and addition.up is not None:
            weights |= {"down": addition.down.t(), "up": Scaled(_rows(addition.up, rows).t(), addition.scale)}
        if addition.whole is not None:
            weights["whole"] = _rows(addition.whole, rows).t()
        if addition.more is not None:
            weights["more"] = addition.more.t()
        for key, values in (("magnitude", addition.magnitude), ("added", addition.added), ("bias", addition.bias)):
            if values is not None:
                weights[key] = _rows(values, rows)
        return weights

    def put(self, slot: int, weights: Weights, known: Weights) -> None:
        layer = self._layer
        parts = (LowRank(0, weights["down"], weights["up"]),) if "down" in weights else ()
        gain = None
        if "magnitude" in weights:
            if self.path not in known:
                multiply = partial(layer.method.apply, layer)
                lengths = squares_of_rows(multiply, layer.hidden_size, parts, weights["magnitude"]).sqrt()
                known[self.path] = (weights["magnitude"].float() / lengths).to(weights["magnitude"].dtype).cpu()
            gain = known[self.path].to(weights["magnitude"].device)
        added = [weights["added"]] if "added" in weights else []
        if "bias" in weights and layer.bias is not None:
            added.append(weights["bias"] - layer.bias)
        bias = sum(added[1:], added[0]) if added else None
        self._bank.slots[slot] = LinearLoRA(
            parts, gain, bias, weights.get("whole"), weights.get("down"), weights.get("more"), _put_rows(weights)
        )

    def drop(self, slot: int) -> None:
        self._bank.slots.pop(slot, None)


class EmbeddingSite(Untabled):
    kind = "embedding"

    def __init__(self, path: str, layer: Embedding, more: int = 0) -> None:
        self.path, self._layer = path, layer
        self.shapes = {path: (layer.size, layer.total)}  # as of a matrix that is multiplied by tokens
        self._bank = layer.bank = EmbeddingBank()
        self._bank.more = more

    def cut(self, found: Mapping[str, Addition]) -> Given:
        [addition] = found.values()
        rows, weights = [self._layer.local], _token_rows(addition, self._layer.local)
        if addition.whole is not None:
            weights["whole"] = _rows(addition.whole, rows)
        if addition.more is not None:
            weights["more"] = addition.more
        if addition.down is not None and addition.up is not None:
            weights |= {"down": _rows(addition.down.t(), rows), "up": Scaled(addition.up.t(), addition.scale)}
        return weights

    def put(self, slot: int, weights: Weights, known: Weights) -> None:  # noqa: ARG002
        self._bank.slots[slot] = EmbeddingLoRA(
            weights.get("down"), weights.get("up"), weights.get("whole"), weights.get("more"), _put_rows(weights)
        )

    def drop(self, slot: int) -> None:
        self._bank.slots.pop(slot, None)


class ExpertsSite(Untabled):
    kind = "experts"

    def __init__(self, path: str, layer: Experts) -> None:
        self.path, self._layer = path, layer
        self.count, self.hidden, self.inner = layer.total, layer.hidden_size, layer.total_inner
        self.together = layer.in_pairs  # a file must have the weights of all experts together
        self.shapes = {path: (self.hidden, self.hidden)}
        self._bank = layer.bank = ExpertsBank()

    @property
    def holds_floats(self) -> bool:
        """Return whether LoRA can be added between the matrices of an expert. Only after weights are loaded."""
        return {"up", "down"} <= {*self._layer.stored}

    def cut(self, found: Mapping[str, Addition]) -> Given:
        [addition] = found.values()
        if not self._layer.gated:
            raise AdapterError(f"it adds to {self.path}, experts without gates, which adapters cannot do yet", "lora_path")
        experts, inner = self._layer.local, self._layer.local_inner
        some, weights = slice(experts.start, experts.stop), Given()
        if addition.gate_up is not None:
            down, up = addition.gate_up
            up = up[some]
            gates, ups = (up[:, 0::2], up[:, 1::2]) if self._layer.in_pairs else (up[:, : self.inner], up[:, self.inner :])
            both = torch.cat([gates[:, inner.start : inner.stop], ups[:, inner.start : inner.stop]], dim=1)
            weights |= {"up.down": down[some].mT, "up.up": both.mT}
        if addition.back is not None:
            down, up = addition.back
            weights |= {"down.down": down[some, :, inner.start : inner.stop].mT, "down.up": up[some].mT}
        return weights

    def put(self, slot: int, weights: Weights, known: Weights) -> None:  # noqa: ARG002
        up = (weights["up.down"], weights["up.up"]) if "up.down" in weights else None
        down = (weights["down.down"], weights["down.up"]) if "down.down" in weights else None
        self._bank.slots[slot] = ExpertsLoRA(up, down)

    def drop(self, slot: int) -> None:
        self._bank.slots.pop(slot, None)


def squares_of_rows(multiply: Callable[[Tensor], Tensor], inputs: int, parts: Sequence[LowRank], like: Tensor) -> Tensor:
    """Return the sum of squares of each row of a layer's matrix with LoRA added: [outputs] float32.

    The matrix is computed by multiplying unit vectors, so it may be stored in any way.
    """
    device, dtype = like.device, like.dtype
    nothing = multiply(torch.zeros(1, inputs, device=device, dtype=dtype)).float().clone()
    squares = torch.zeros_like(nothing[0])
    for first in range(0, inputs, AT_ONCE):
        some = torch.zeros(min(AT_ONCE, inputs - first), inputs, device=device, dtype=dtype)
        some[:, first:].fill_diagonal_(1.0)
        columns = multiply(some).float() - nothing
        for part in parts:
            columns[:, part.outputs] += part.down[first : first + len(some)].float() @ part.up.float()
        squares += columns.square().sum(0)
    return squares


def _token_rows(addition: Addition, kept: range) -> Given:
    """Return the replaced rows of a rank's tokens, and their positions; empty: there are none."""
    if addition.tokens is None or addition.rows is None:
        return {}
    own = (addition.tokens >= kept.start) & (addition.tokens < kept.stop)
    return {"tokens": addition.tokens[own] - kept.start, "rows": addition.rows[own]} if own.any() else {}


def _put_rows(weights: Weights) -> OtherRows | None:
    return OtherRows(weights["tokens"], weights["rows"]) if "tokens" in weights else None


def _address(values: Tensor | None, start: int) -> int:
    return 0 if values is None else values.data_ptr() + start * values.element_size()


def _rows(values: Tensor, rows: Sequence[range]) -> Tensor:
    some = [values[each.start : each.stop] for each in rows]
    return some[0] if len(some) == 1 else torch.cat(some)
