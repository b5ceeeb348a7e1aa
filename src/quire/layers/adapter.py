"""What adapters add to a layer. Each row of a batch has one or none; a layer's bank has what is its own of each, by place.

Here is the reference in torch: rows of one adapter are gathered, multiplied by its two narrow matrices, and added to what the
layer made of them. Rows without an adapter are not touched, and an adapter without additions to a layer costs nothing there.
On a GPU kernels do it for linear layers, all adapters at once (`ops/adapters.py`).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from quire.attn.batch import LoRATokens
from quire.ops.activation import gated, reference_gated
from quire.ops.adapters import add_tiled
from quire.ops.arguments import AdapterTable, ExpertBiases, Inner

TOGETHER = 16  # rows on a CPU that are one product: a row's sums are then the same whoever is beside it
FEW = 4  # the same, of narrow matrices, where an adapter's one row must not wait for fifteen that are not there

Numbers = TypeVar("Numbers")


class Bank(Generic[Numbers]):
    """The numbers of every adapter that is on the device and has some for the layer."""

    def __init__(self) -> None:
        self.places: dict[int, Numbers] = {}

    def of(self, rows: LoRATokens | None) -> Iterator[tuple[Numbers, Tensor | None]]:
        """Those that some rows ask for, and the tokens that do; None = all do."""
        if rows is not None:
            for place, tokens in rows.groups:
                if place in self.places:
                    yield self.places[place], tokens


@dataclass(frozen=True)
class LowRank:
    """An addition to some of a layer's outputs."""

    start: int  # of those outputs
    down: Tensor  # [inputs, rank]
    up: Tensor  # [rank, outputs], multiplied by the adapter's scale

    @property
    def outputs(self) -> slice:
        return slice(self.start, self.start + self.up.shape[1])

    def __call__(self, x: Tensor) -> Tensor:
        """[n, inputs] -> [n, outputs]."""
        return times(times(x, self.down), self.up)


@dataclass(frozen=True)
class OtherRows:
    """Of embedding or head, in place of the layer's own."""

    tokens: Tensor  # [n] int64, rising
    rows: Tensor  # [n, size]

    def look_up(self, ids: Tensor, otherwise: Tensor) -> Tensor:
        """ids [T], otherwise [T, size]: the layer's own -> [T, size]."""
        at = torch.searchsorted(self.tokens, ids).clamp_(max=len(self.tokens) - 1)
        found = F.embedding(at, self.rows).to(otherwise.dtype)
        return torch.where((self.tokens[at] == ids).unsqueeze(1), found, otherwise)

    def multiply(self, x: Tensor, out: Tensor, own: Tensor | None) -> None:
        """x [n, size], out [n, tokens], of which it overwrites some columns; own [tokens]: the layer's bias."""
        found = times(x, self.rows.t()).to(out.dtype)
        out.index_copy_(1, self.tokens, found if own is None else found + own[self.tokens])


@dataclass(frozen=True)
class LinearNumbers:
    """One adapter's numbers for a linear layer, or a head: gain * (the layer without its bias + parts) + bias."""

    parts: tuple[LowRank, ...] = ()
    gain: Tensor | None = None  # [outputs] of DoRA: new length of each of the matrix's rows, by its old one
    bias: Tensor | None = None  # [outputs] to be added behind it
    whole: Tensor | None = None  # [inputs, outputs] a matrix that stands in the layer's place
    stacked: Tensor | None = None  # [inputs, all ranks] the parts' `down` beside each other, in their order
    more: Tensor | None = None  # [inputs, n] of a head: for tokens that the model does not have
    other: OtherRows | None = None  # of a head

    @property
    def simple(self) -> bool:
        """Are there parts alone, to be multiplied by together?"""
        others = (self.gain, self.bias, self.whole, self.other)
        return self.stacked is not None and all(each is None for each in others)

    @cached_property
    def narrow(self) -> Tensor:
        """`stacked` in float32: many CPUs multiply by no other floats at any speed."""
        assert self.stacked is not None
        return self.stacked.float()

    @cached_property
    def spread(self) -> tuple[slice, Tensor]:
        """The parts' `up` as one matrix [all ranks, columns] of float32, and which columns: few large products take less time
        on a CPU than many small ones, although most of it is zeros."""
        first, last = min(part.start for part in self.parts), max(part.outputs.stop for part in self.parts)
        matrix, at = self.narrow.new_zeros(self.narrow.shape[1], last - first), 0
        for part in self.parts:
            rank = len(part.up)
            matrix[at : at + rank, part.start - first : part.outputs.stop - first] = part.up
            at += rank
        return slice(first, last), matrix

    @cached_property
    def scratch(self) -> Tensor:
        """[FEW, inputs]: what is left in its other rows is nobody's."""
        return self.narrow.new_zeros(FEW, self.narrow.shape[0])

    def add_to(self, out: Tensor, x: Tensor, tokens: Tensor | None) -> None:
        """As `change` of a simple one, for these tokens of out [T, outputs] and x [T, inputs]; None = all. On a CPU."""
        columns, up = self.spread
        if columns.stop - columns.start < out.shape[1]:
            out = out[:, columns]
        some = x if tokens is None else x.index_select(0, tokens)
        count = len(some)
        for first in range(0, count, FEW):
            rows = min(FEW, count - first)
            part = some if rows == count else some[first : first + rows]
            if rows < FEW or part.dtype != up.dtype:
                self.scratch[:rows].copy_(part)
                part = self.scratch
            added = torch.mm(torch.mm(part, self.narrow), up)[:rows].to(out.dtype)
            if tokens is not None:
                out.index_add_(0, tokens if rows == count else tokens[first : first + rows], added)
            elif rows == count:
                out.add_(added)
            else:
                out[first : first + rows].add_(added)

    def change(self, out: Tensor, x: Tensor, own: Tensor | None) -> Tensor:
        """out [n, outputs] of x [n, inputs]; own [outputs]: the layer's bias. May overwrite `out`."""
        if self.whole is not None:
            out = times(x, self.whole).to(out.dtype)
            out = out if own is None else out.add_(own)
        if self.other is not None:
            self.other.multiply(x, out, own)
        for part in self.parts:
            out[:, part.outputs] += part(x)
        if self.gain is not None:
            out = out.mul_(self.gain) if own is None else out.sub_(own).mul_(self.gain).add_(own)
        return out if self.bias is None else out.add_(self.bias)


class LinearBank(Bank[LinearNumbers]):
    table: AdapterTable | None = None  # of the same numbers, for kernels
    heard: Callable[[int, LinearNumbers | None], None] | None = None  # of every change, by someone who has a table, too

    def put(self, place: int, numbers: LinearNumbers) -> None:
        self.places[place] = numbers
        if self.heard is not None:
            self.heard(place, numbers)

    def drop(self, place: int) -> None:
        if self.places.pop(place, None) is not None and self.heard is not None:
            self.heard(place, None)

    def add(self, out: Tensor, x: Tensor, rows: LoRATokens | None, own: Tensor | None) -> Tensor:
        """out [T, outputs], which it may overwrite, of x [T, inputs], with what each row's adapter makes of it. It can be
        overridden."""
        if has_torch_function_unary(x):
            return handle_torch_function(LinearBank.add, (x,), self, out, x, rows, own)
        if self.table is not None and rows is not None and rows.tiles is not None:
            return add_tiled(out, x, rows.tiles, self.table, own)
        flat, given = x.reshape(-1, x.shape[-1]), out.reshape(-1, out.shape[-1])
        for numbers, tokens in self.of(rows):
            if numbers.simple and flat.device.type == "cpu":
                numbers.add_to(given, flat, tokens)
            elif tokens is None:
                given = numbers.change(given, flat, own)
            else:
                given[tokens] = numbers.change(given[tokens], flat[tokens], own)
        return given.view(out.shape)

    def gated(self, out: Tensor, x: Tensor, rows: LoRATokens, own: Tensor | None, activation: str) -> Tensor:
        """As `add`, and the first half of the outputs is then a gate of the second -> [T, outputs / 2]."""
        if self.table is not None and rows.tiles is not None:
            return add_tiled(out, x, rows.tiles, self.table, own, activation)
        return gated(self.add(out, x, rows, own), activation)


class HeadBank(LinearBank):
    more = 0  # tokens that adapters may add to the model's own: logits have so many columns more

    def widen(self, logits: Tensor, hidden: Tensor, rows: LoRATokens | None, shape: Callable[[Tensor], Tensor]) -> Tensor:
        """logits [P, V] of hidden [P, H] -> [P, V + more]: what a row's adapter does not have cannot be drawn. `shape`: what
        the head does to logits."""
        own = logits.shape[1]
        wide = F.pad(logits, (0, self.more), value=-torch.inf)
        for numbers, tokens in self.of(rows):
            if numbers.more is not None:
                some, columns = slice(None) if tokens is None else tokens, slice(own, own + numbers.more.shape[1])
                wide[some, columns] = shape(times(hidden[some], numbers.more).float())
        return wide


@dataclass(frozen=True)
class EmbeddingNumbers:
    """`whole` in place of the layer's rows, `down` and `up` beside them, or both."""

    down: Tensor | None = None  # [tokens, rank]
    up: Tensor | None = None  # [rank, size], multiplied by the adapter's scale
    whole: Tensor | None = None  # [tokens, size]
    more: Tensor | None = None  # [n, size] of tokens that the model does not have
    other: OtherRows | None = None


class EmbeddingBank(Bank[EmbeddingNumbers]):
    more = 0  # tokens that adapters may add to the model's own

    def add(self, x: Tensor, ids: Tensor, rows: LoRATokens | None, theirs: Tensor | None = None) -> Tensor:
        """x [T, size], which it may overwrite, of ids [T]. theirs [T]: tokens whose rows another rank has."""
        for numbers, tokens in self.of(rows):
            some = slice(None) if tokens is None else tokens
            found = x[some] if numbers.whole is None else F.embedding(ids[some], numbers.whole).to(x.dtype)
            if numbers.other is not None:
                found = numbers.other.look_up(ids[some], found)
            if numbers.down is not None and numbers.up is not None:
                found = found + times(F.embedding(ids[some], numbers.down), numbers.up)
            x[some] = found if theirs is None else found.masked_fill(theirs[some].unsqueeze(1), 0.0)
        return x

    def add_more(self, x: Tensor, ids: Tensor, rows: LoRATokens | None, own: int) -> Tensor:
        """x [T, size], which it overwrites where ids [T] are not among the model's `own` tokens."""
        for numbers, tokens in self.of(rows):
            if numbers.more is not None:
                some = slice(None) if tokens is None else tokens
                beyond = ids[some] - own
                found = F.embedding(beyond.clamp(0, len(numbers.more) - 1), numbers.more).to(x.dtype)
                x[some] = torch.where((beyond >= 0).unsqueeze(1), found, x[some])
        return x


@dataclass(frozen=True)
class ExpertsNumbers:
    """Additions to every expert's two matrices; None = there is none to that one."""

    up: tuple[Tensor, Tensor] | None = None  # down [E, hidden, rank], up [E, rank, 2 * inner]
    down: tuple[Tensor, Tensor] | None = None  # down [E, inner, rank], up [E, rank, hidden]


class FloatExperts(Protocol):
    @property
    def up(self) -> Tensor:
        """[E, 2 * inner, hidden], gate above up; [E, inner, hidden] without gates."""

    @property
    def down(self) -> Tensor:
        """[E, hidden, inner]."""

    @property
    def activation(self) -> Inner: ...

    @property
    def biases(self) -> ExpertBiases | None: ...


class ExpertsBank(Bank[ExpertsNumbers]):
    def replace(
        self, out: Tensor, x: Tensor, weights: Tensor, experts: Tensor, rows: LoRATokens | None, layer: FloatExperts
    ) -> Tensor:
        """out [T, H] of x [T, H], where tokens whose adapter has additions to experts are run anew with them."""
        for numbers, tokens in self.of(rows):
            some = slice(None) if tokens is None else tokens
            out[some] = _run_experts(x[some], weights[some], experts[some], layer, numbers)
        return out


def _run_experts(x: Tensor, weights: Tensor, experts: Tensor, layer: FloatExperts, numbers: ExpertsNumbers) -> Tensor:
    out, biases = torch.zeros_like(x, dtype=torch.float32), layer.biases
    for expert in sorted({*experts.flatten().tolist()}):
        mine, which = (experts == expert).nonzero(as_tuple=True)
        some = x[mine]
        inner = F.linear(some, layer.up[expert])
        if biases is not None:
            inner = inner + biases.up[expert]
        if numbers.up is not None:
            inner = inner + times(times(some, numbers.up[0][expert]), numbers.up[1][expert])
        inner = reference_gated(inner, layer.activation)
        back = F.linear(inner, layer.down[expert])
        if biases is not None and biases.down is not None:
            back = back + biases.down[expert]
        if numbers.down is not None:
            back = back + times(times(inner, numbers.down[0][expert]), numbers.down[1][expert])
        out.index_add_(0, mine, back.float() * weights[mine, which].unsqueeze(1))
    return out.to(x.dtype)


def times(x: Tensor, matrix: Tensor) -> Tensor:
    """x [n, inner], matrix [inner, outputs] -> [n, outputs]. On a CPU libraries choose their way by the number of rows, and
    another way adds in another order; so there it is always the same number."""
    x = x.to(matrix.dtype)
    if x.device.type != "cpu":
        return x @ matrix
    rows = len(x)
    if rows % TOGETHER:
        x = F.pad(x, (0, 0, 0, -rows % TOGETHER))
    products = [torch.mm(some, matrix) for some in torch.split(x, TOGETHER)]
    return (products[0] if len(products) == 1 else torch.cat(products))[:rows]
