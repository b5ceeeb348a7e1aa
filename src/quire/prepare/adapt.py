"""Room for adapters in the layers of a model, and the way of an adapter's numbers to the layers' banks.

    a file's tensors ─► Addition, by matrix ─► PackedAdapter: what this rank needs, one piece of host memory ─► banks, by place

An adapter takes the memory of its own ranks: nothing is padded to what others have or might have. What an adapter's file looks
like is not known here, and neither is who asks for which.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from quire.layers.adapter import (
    EmbeddingBank,
    EmbeddingNumbers,
    ExpertsBank,
    ExpertsNumbers,
    LinearBank,
    LinearNumbers,
    LowRank,
)
from quire.layers.embedding import Embedding, Head
from quire.layers.linear import Linear
from quire.layers.moe import Experts
from quire.layers.role import Role
from quire.types.errors import ConfigError

ALIGNED = 64  # numbers, to a multiple of which every tensor is placed
AT_ONCE = 256  # inputs of a matrix that are looked at together

Numbers = dict[str, Tensor]  # of one layer's, by names of its own


@dataclass(frozen=True)
class Addition:
    """What an adapter has for one matrix of the checkpoint, whole, on the host."""

    down: Tensor | None = None  # [rank, inputs]; of an embedding [rank, tokens]
    up: Tensor | None = None  # [outputs, rank], multiplied by the adapter's scale
    magnitude: Tensor | None = None  # [outputs] of DoRA: how long the rows of the sum shall be
    added: Tensor | None = None  # [outputs] behind the product, multiplied by the scale
    bias: Tensor | None = None  # [outputs] in place of the layer's own
    whole: Tensor | None = None  # [outputs, inputs] in place of the layer's own; of an embedding [tokens, size]
    # of experts: each is down [E, rank, inputs] and up [E, outputs, rank], multiplied by the scale
    gate_up: tuple[Tensor, Tensor] | None = None
    back: tuple[Tensor, Tensor] | None = None


class Site(Protocol):
    """A layer with a bank."""

    @property
    def path(self) -> str: ...

    @property
    def kind(self) -> str: ...

    @property
    def shapes(self) -> Mapping[str, tuple[int, int]]:
        """The matrices of the checkpoint that it is made of, outputs and inputs, by their paths."""

    def cut(self, found: Mapping[str, Addition]) -> Numbers:
        """What this rank needs, by names of the site's own."""

    def put(self, place: int, numbers: Numbers, known: Numbers) -> None:
        """On the device. known: what was found out about the adapter and need not be again."""

    def drop(self, place: int) -> None: ...


class LinearSite:
    kind = "linear"

    def __init__(self, path: str, layer: Linear) -> None:
        self.path, self._layer, self._parts = path, layer, layer.parts(path)
        self.shapes = {name: (part.outputs, layer.all_inputs) for name, part in self._parts.items()}
        self._bank = layer.bank = LinearBank()
        # of the ranks whose outputs are added, one adds what is not a product
        self._adds = layer.role is not Role.ROW or layer.kept_inputs.start == 0

    @property
    def biased(self) -> bool:
        return self._layer.biased

    def cut(self, found: Mapping[str, Addition]) -> Numbers:
        numbers: Numbers = {}
        across = self._layer.kept_inputs
        for name, addition in found.items():
            rows = [some for _, some in self._parts[name].kept]
            if addition.down is not None and addition.up is not None:
                numbers[f"{name}.down"] = addition.down[:, across.start : across.stop].t()
                numbers[f"{name}.up"] = _rows(addition.up, rows).t()
            if addition.magnitude is not None:
                numbers[f"{name}.magnitude"] = _rows(addition.magnitude, rows)
            if self._adds:
                for key, values in (("added", addition.added), ("bias", addition.bias)):
                    if values is not None:
                        numbers[f"{name}.{key}"] = _rows(values, rows)
        return numbers

    def put(self, place: int, numbers: Numbers, known: Numbers) -> None:
        layer, parts = self._layer, list[LowRank]()
        for name, part in self._parts.items():
            if f"{name}.down" in numbers:
                parts.append(LowRank(part.kept[0][0], numbers[f"{name}.down"], numbers[f"{name}.up"]))
        gain = self._gain(parts, numbers, known)
        self._bank.places[place] = LinearNumbers(tuple(parts), gain, self._bias(numbers, layer.bias))

    def drop(self, place: int) -> None:
        self._bank.places.pop(place, None)

    def _bias(self, numbers: Numbers, own: Tensor | None) -> Tensor | None:
        """All that is to be added: what the adapter adds, and the difference of its bias to the layer's."""
        total: Tensor | None = None
        for name, part in self._parts.items():
            start, count = part.kept[0][0], sum(len(rows) for _, rows in part.kept)
            added, bias = numbers.get(f"{name}.added"), numbers.get(f"{name}.bias")
            for values in (added, None if bias is None or own is None else bias - own[start : start + count]):
                if values is not None:
                    total = values.new_zeros(self._layer.outputs) if total is None else total
                    total[start : start + count] += values
        return total

    def _gain(self, parts: Sequence[LowRank], numbers: Numbers, known: Numbers) -> Tensor | None:
        wanted = {name: numbers[f"{name}.magnitude"] for name in self._parts if f"{name}.magnitude" in numbers}
        if not wanted:
            return None
        if self.path not in known:
            first = next(iter(wanted.values()))
            lengths = self._row_lengths(parts, first)
            gain = torch.ones_like(lengths)
            for name, magnitude in wanted.items():
                start = self._parts[name].kept[0][0]
                some = slice(start, start + len(magnitude))
                gain[some] = magnitude.float() / lengths[some]
            known[self.path] = gain.to(first.dtype).cpu()
        return known[self.path].to(next(iter(wanted.values())).device)

    def _row_lengths(self, parts: Sequence[LowRank], like: Tensor) -> Tensor:
        layer = self._layer
        squares = squares_of_rows(partial(layer.method.apply, layer), layer.inputs, parts, like)
        return (squares if layer.group is None else layer.group.add(squares)).sqrt()


class HeadSite:
    kind = "head"

    def __init__(self, path: str, layer: Head) -> None:
        self.path, self._layer = path, layer
        self.shapes = {path: (layer.total, layer.hidden_size)}
        self._bank = layer.bank = LinearBank()

    @property
    def biased(self) -> bool:
        return self._layer.biased

    def cut(self, found: Mapping[str, Addition]) -> Numbers:
        [addition] = found.values()
        rows, numbers = [self._layer.kept], Numbers()
        if addition.down is not None and addition.up is not None:
            numbers |= {"down": addition.down.t(), "up": _rows(addition.up, rows).t()}
        if addition.whole is not None:
            numbers["whole"] = _rows(addition.whole, rows).t()
        for key, values in (("magnitude", addition.magnitude), ("added", addition.added), ("bias", addition.bias)):
            if values is not None:
                numbers[key] = _rows(values, rows)
        return numbers

    def put(self, place: int, numbers: Numbers, known: Numbers) -> None:
        layer = self._layer
        parts = (LowRank(0, numbers["down"], numbers["up"]),) if "down" in numbers else ()
        gain = None
        if "magnitude" in numbers:
            if self.path not in known:
                multiply = partial(layer.method.apply, layer)
                lengths = squares_of_rows(multiply, layer.hidden_size, parts, numbers["magnitude"]).sqrt()
                known[self.path] = (numbers["magnitude"].float() / lengths).to(numbers["magnitude"].dtype).cpu()
            gain = known[self.path].to(numbers["magnitude"].device)
        added = [numbers["added"]] if "added" in numbers else []
        if "bias" in numbers and layer.bias is not None:
            added.append(numbers["bias"] - layer.bias)
        bias = sum(added[1:], added[0]) if added else None
        self._bank.places[place] = LinearNumbers(parts, gain, bias, numbers.get("whole"))

    def drop(self, place: int) -> None:
        self._bank.places.pop(place, None)


class EmbeddingSite:
    kind = "embedding"

    def __init__(self, path: str, layer: Embedding) -> None:
        self.path, self._layer = path, layer
        self.shapes = {path: (layer.size, layer.total)}  # as of a matrix that is multiplied by tokens
        self._bank = layer.bank = EmbeddingBank()

    def cut(self, found: Mapping[str, Addition]) -> Numbers:
        [addition] = found.values()
        rows, numbers = [self._layer.kept], Numbers()
        if addition.whole is not None:
            numbers["whole"] = _rows(addition.whole, rows)
        if addition.down is not None and addition.up is not None:
            numbers |= {"down": _rows(addition.down.t(), rows), "up": addition.up.t()}
        return numbers

    def put(self, place: int, numbers: Numbers, known: Numbers) -> None:  # noqa: ARG002
        self._bank.places[place] = EmbeddingNumbers(numbers.get("down"), numbers.get("up"), numbers.get("whole"))

    def drop(self, place: int) -> None:
        self._bank.places.pop(place, None)


class ExpertsSite:
    kind = "experts"

    def __init__(self, path: str, layer: Experts) -> None:
        self.path, self._layer = path, layer
        self.count, self.hidden, self.inner = layer.total, layer.hidden_size, layer.total_inner
        self.together = layer.paired  # are its experts only to be had all at once?
        self.shapes = {path: (self.hidden, self.hidden)}
        self._bank = layer.bank = ExpertsBank()

    @property
    def holds_floats(self) -> bool:
        """When all is loaded: can additions go between its matrices?"""
        return {"up", "down"} <= {*self._layer.stored}

    def cut(self, found: Mapping[str, Addition]) -> Numbers:
        [addition] = found.values()
        experts, inner = self._layer.kept, self._layer.kept_inner
        some, numbers = slice(experts.start, experts.stop), Numbers()
        if addition.gate_up is not None:
            down, up = addition.gate_up
            up = up[some]
            gates, ups = (up[:, 0::2], up[:, 1::2]) if self._layer.paired else (up[:, : self.inner], up[:, self.inner :])
            both = torch.cat([gates[:, inner.start : inner.stop], ups[:, inner.start : inner.stop]], dim=1)
            numbers |= {"up.down": down[some].mT, "up.up": both.mT}
        if addition.back is not None:
            down, up = addition.back
            numbers |= {"down.down": down[some, :, inner.start : inner.stop].mT, "down.up": up[some].mT}
        return numbers

    def put(self, place: int, numbers: Numbers, known: Numbers) -> None:  # noqa: ARG002
        up = (numbers["up.down"], numbers["up.up"]) if "up.down" in numbers else None
        down = (numbers["down.down"], numbers["down.up"]) if "down.down" in numbers else None
        self._bank.places[place] = ExpertsNumbers(up, down)

    def drop(self, place: int) -> None:
        self._bank.places.pop(place, None)


@dataclass(frozen=True)
class PackedAdapter:
    """One adapter's numbers in one piece of host memory, as the device will have them."""

    flat: Tensor
    where: Mapping[str, Mapping[str, tuple[int, tuple[int, ...]]]]  # site -> its own name -> first number, shape
    known: Numbers = field(default_factory=dict)  # by site: what was found out on the device

    def views(self, flat: Tensor) -> Iterator[tuple[str, Numbers]]:
        for site, numbers in self.where.items():
            yield site, {name: _view(flat, first, shape) for name, (first, shape) in numbers.items()}


class Adapters:
    """The sites of a model, and the places of adapters in them, from 1 on."""

    def __init__(self, sites: Sequence[Site], device: torch.device, dtype: torch.dtype) -> None:
        self.sites: dict[str, Site] = {name: site for site in sites for name in site.shapes}
        self._by_path = {site.path: site for site in sites}
        self._device, self._dtype = device, dtype

    def bytes_of(self, rank: int) -> int:
        """That an adapter of this rank takes which adds to all linear layers."""
        shapes = [shape for site in self._by_path.values() if site.kind == "linear" for shape in site.shapes.values()]
        return sum(map(sum, shapes)) * rank * self._dtype.itemsize

    def pack(self, additions: Mapping[str, Addition]) -> PackedAdapter:
        """By the matrix's path in the checkpoint, after renames. Shapes are right by now."""
        by_site: dict[str, dict[str, Addition]] = {}
        for name, addition in additions.items():
            by_site.setdefault(self.sites[name].path, {})[name] = addition
        tensors: list[Tensor] = []
        where: dict[str, dict[str, tuple[int, tuple[int, ...]]]] = {}
        at = 0
        for path, found in by_site.items():
            where[path] = {}
            for name, values in self._by_path[path].cut(found).items():
                where[path][name] = (at, tuple(values.shape))
                tensors.append(values)
                at += -(-values.numel() // ALIGNED) * ALIGNED
        flat = torch.zeros(at, dtype=self._dtype, pin_memory=self._device.type == "cuda")
        places = [place for numbers in where.values() for place in numbers.values()]
        for values, (first, shape) in zip(tensors, places, strict=True):
            _view(flat, first, shape).copy_(values)
        return PackedAdapter(flat, where)

    @torch.inference_mode()
    def put(self, place: int, packed: PackedAdapter) -> None:
        """In the place of the adapter that has it. Between steps."""
        self.drop(place)
        flat = packed.flat.to(self._device, non_blocking=True) if self._device.type != "cpu" else packed.flat
        try:
            for path, numbers in packed.views(flat):
                self._by_path[path].put(place, numbers, packed.known)
        except BaseException:
            self.drop(place)
            raise

    def drop(self, place: int) -> None:
        for site in self._by_path.values():
            site.drop(place)


def adapt(model: nn.Module, *, device: torch.device, dtype: torch.dtype) -> Adapters:
    """Banks for every layer with matrices. After `shard`; before anything is loaded or after it."""
    sites: list[Site] = []
    for path, layer in model.named_modules():
        match layer:
            case Linear():
                sites.append(LinearSite(path, layer))
            case Head():
                sites.append(HeadSite(path, layer))
            case Embedding(role=Role.VOCABULARY):
                sites.append(EmbeddingSite(path, layer))
            case Experts():
                sites.append(ExpertsSite(path, layer))
    if not any(site.kind == "linear" for site in sites):
        raise ConfigError(
            "LoRA adapters (enable_lora) need a model of a family of our own; this one is run through transformers"
        )
    return Adapters(sites, device, dtype)


def squares_of_rows(multiply: Callable[[Tensor], Tensor], inputs: int, parts: Sequence[LowRank], like: Tensor) -> Tensor:
    """[outputs] float32: the squares of each row's numbers, added up, of a layer's matrix with these additions in it. The
    matrix is what the layer makes of single inputs, so it may be stored in any way."""
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


def _rows(values: Tensor, rows: Sequence[range]) -> Tensor:
    some = [values[each.start : each.stop] for each in rows]
    return some[0] if len(some) == 1 else torch.cat(some)


def _view(flat: Tensor, first: int, shape: tuple[int, ...]) -> Tensor:
    count = 1
    for size in shape:
        count *= size
    return flat[first : first + count].view(shape)
