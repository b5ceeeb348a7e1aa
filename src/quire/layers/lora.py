"""LoRA in layers: y += (x @ A) @ B for the tokens of each adapter. A layer's bank holds its matrices of every adapter, by slot.

This is the PyTorch reference: the tokens of one adapter are gathered, multiplied by its two low-rank matrices, and added to the
layer's output. Tokens without an adapter are not touched; an adapter without matrices for a layer costs nothing there. On a GPU
kernels do it for all adapters at once (`ops/adapters.py`).
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

GEMM_ROWS = 16  # rows of every GEMM on a CPU: a fixed count makes a token's sums independent of the other tokens
LOW_RANK_ROWS = 4  # the same for low-rank GEMMs, where padding one token to 16 rows would cost too much

Weights = TypeVar("Weights")


class Bank(Generic[Weights]):
    """The weights of every adapter on the device that changes the layer, by adapter slot."""

    def __init__(self) -> None:
        self.slots: dict[int, Weights] = {}

    def of(self, rows: LoRATokens | None) -> Iterator[tuple[Weights, Tensor | None]]:
        """Yield the weights that tokens of the batch use, each with its tokens [n] (None: all tokens)."""
        if rows is not None:
            for slot, tokens in rows.groups:
                if slot in self.slots:
                    yield self.slots[slot], tokens


@dataclass(frozen=True)
class LowRank:
    """The low-rank matrices for some of a layer's outputs."""

    start: int  # the first of these outputs
    down: Tensor  # A: [inputs, rank]
    up: Tensor  # B: [rank, outputs], multiplied by the adapter's scale

    @property
    def outputs(self) -> slice:
        return slice(self.start, self.start + self.up.shape[1])

    def __call__(self, x: Tensor) -> Tensor:
        """[n, inputs] -> [n, outputs]."""
        return times(times(x, self.down), self.up)


@dataclass(frozen=True)
class OtherRows:
    """Rows that replace those of the embedding or head."""

    tokens: Tensor  # [n] int64, ascending
    rows: Tensor  # [n, size]

    def look_up(self, ids: Tensor, otherwise: Tensor) -> Tensor:
        """Return the embeddings [T, size] of ids [T]; otherwise [T, size]: those of the layer's own weight."""
        at = torch.searchsorted(self.tokens, ids).clamp_(max=len(self.tokens) - 1)
        found = F.embedding(at, self.rows).to(otherwise.dtype)
        return torch.where((self.tokens[at] == ids).unsqueeze(1), found, otherwise)

    def multiply(self, x: Tensor, out: Tensor, own: Tensor | None) -> None:
        """Overwrite the logits out [n, vocabulary] of the replaced tokens, from x [n, size]; own: the layer's bias."""
        found = times(x, self.rows.t()).to(out.dtype)
        out.index_copy_(1, self.tokens, found if own is None else found + own[self.tokens])


@dataclass(frozen=True)
class LinearLoRA:
    """One adapter's weights for a linear layer or a head: gain * (output without bias + parts) + bias."""

    parts: tuple[LowRank, ...] = ()
    gain: Tensor | None = None  # [outputs] DoRA: new norm of each row of the merged matrix, divided by the old one
    bias: Tensor | None = None  # [outputs] added last
    whole: Tensor | None = None  # [inputs, outputs] replaces the layer's matrix
    stacked: Tensor | None = None  # [inputs, sum of ranks] the parts' `down`, concatenated
    more: Tensor | None = None  # [inputs, n] head only: added vocabulary
    other: OtherRows | None = None  # head only

    @property
    def simple(self) -> bool:
        """Return whether there is nothing but low-rank parts, stacked for one GEMM."""
        others = (self.gain, self.bias, self.whole, self.other)
        return self.stacked is not None and all(each is None for each in others)

    @cached_property
    def narrow(self) -> Tensor:
        """Return `stacked` in float32, the only fast GEMM dtype of many CPUs."""
        assert self.stacked is not None
        return self.stacked.float()

    @cached_property
    def spread(self) -> tuple[slice, Tensor]:
        """Return the parts' `up` as one block-diagonal float32 matrix [sum of ranks, columns], and which columns.

        One GEMM with many zeros takes less time on a CPU than several small ones.
        """
        first, last = min(part.start for part in self.parts), max(part.outputs.stop for part in self.parts)
        matrix, at = self.narrow.new_zeros(self.narrow.shape[1], last - first), 0
        for part in self.parts:
            rank = len(part.up)
            matrix[at : at + rank, part.start - first : part.outputs.stop - first] = part.up
            at += rank
        return slice(first, last), matrix

    @cached_property
    def scratch(self) -> Tensor:
        """Return a buffer [LOW_RANK_ROWS, inputs]; unused rows hold stale values, whose results are dropped."""
        return self.narrow.new_zeros(LOW_RANK_ROWS, self.narrow.shape[0])

    def add_to(self, out: Tensor, x: Tensor, tokens: Tensor | None) -> None:
        """Apply simple weights to these tokens (None: all) of out [T, outputs] and x [T, inputs]. CPU only."""
        columns, up = self.spread
        if columns.stop - columns.start < out.shape[1]:
            out = out[:, columns]
        some = x if tokens is None else x.index_select(0, tokens)
        count = len(some)
        for first in range(0, count, LOW_RANK_ROWS):
            rows = min(LOW_RANK_ROWS, count - first)
            part = some if rows == count else some[first : first + rows]
            if rows < LOW_RANK_ROWS or part.dtype != up.dtype:
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
        """Return out [n, outputs] of x [n, inputs] with the adapter applied; own: the layer's bias. May overwrite `out`."""
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


class LinearBank(Bank[LinearLoRA]):
    table: AdapterTable | None = None  # addresses of the same weights, for kernels
    on_change: Callable[[int, LinearLoRA | None], None] | None = None  # called with every change; None: the slot is empty

    def put(self, slot: int, weights: LinearLoRA) -> None:
        self.slots[slot] = weights
        if self.on_change is not None:
            self.on_change(slot, weights)

    def drop(self, slot: int) -> None:
        if self.slots.pop(slot, None) is not None and self.on_change is not None:
            self.on_change(slot, None)

    def add(self, out: Tensor, x: Tensor, rows: LoRATokens | None, own: Tensor | None) -> Tensor:
        """Return out [T, outputs] of x [T, inputs] with each token's adapter applied. May overwrite `out`. Overridable by
        __torch_function__."""
        if has_torch_function_unary(x):
            return handle_torch_function(LinearBank.add, (x,), self, out, x, rows, own)
        if self.table is not None and rows is not None and rows.tiles is not None:
            return add_tiled(out, x, rows.tiles, self.table, own)
        flat, given = x.reshape(-1, x.shape[-1]), out.reshape(-1, out.shape[-1])
        for weights, tokens in self.of(rows):
            if weights.simple and flat.device.type == "cpu":
                weights.add_to(given, flat, tokens)
            elif tokens is None:
                given = weights.change(given, flat, own)
            else:
                given[tokens] = weights.change(given[tokens], flat[tokens], own)
        return given.view(out.shape)

    def gated(self, out: Tensor, x: Tensor, rows: LoRATokens, own: Tensor | None, activation: str) -> Tensor:
        """Apply the adapters as `add` does, then activation(gate) * up -> [T, outputs / 2]."""
        if self.table is not None and rows.tiles is not None:
            return add_tiled(out, x, rows.tiles, self.table, own, activation)
        return gated(self.add(out, x, rows, own), activation)


class HeadBank(LinearBank):
    more = 0  # vocabulary that adapters may add: the logits have `more` extra columns

    def widen(self, logits: Tensor, hidden: Tensor, rows: LoRATokens | None, shape: Callable[[Tensor], Tensor]) -> Tensor:
        """Return logits [P, V + more]; added tokens that a token's adapter does not have get -inf.

        shape: the scaling and soft cap that the head applies to logits.
        """
        own = logits.shape[1]
        wide = F.pad(logits, (0, self.more), value=-torch.inf)
        for weights, tokens in self.of(rows):
            if weights.more is not None:
                some, columns = slice(None) if tokens is None else tokens, slice(own, own + weights.more.shape[1])
                wide[some, columns] = shape(times(hidden[some], weights.more).float())
        return wide


@dataclass(frozen=True)
class EmbeddingLoRA:
    """One adapter's weights for an embedding: `whole` replaces the rows, `down` and `up` add to them."""

    down: Tensor | None = None  # [tokens, rank]
    up: Tensor | None = None  # [rank, size], multiplied by the adapter's scale
    whole: Tensor | None = None  # [tokens, size]
    more: Tensor | None = None  # [n, size] added vocabulary
    other: OtherRows | None = None


class EmbeddingBank(Bank[EmbeddingLoRA]):
    more = 0  # vocabulary that adapters may add

    def add(self, x: Tensor, ids: Tensor, rows: LoRATokens | None, theirs: Tensor | None = None) -> Tensor:
        """Return x [T, size] of ids [T] with adapters applied. May overwrite x. theirs [T]: tokens that another rank holds."""
        for weights, tokens in self.of(rows):
            some = slice(None) if tokens is None else tokens
            found = x[some] if weights.whole is None else F.embedding(ids[some], weights.whole).to(x.dtype)
            if weights.other is not None:
                found = weights.other.look_up(ids[some], found)
            if weights.down is not None and weights.up is not None:
                found = found + times(F.embedding(ids[some], weights.down), weights.up)
            x[some] = found if theirs is None else found.masked_fill(theirs[some].unsqueeze(1), 0.0)
        return x

    def add_more(self, x: Tensor, ids: Tensor, rows: LoRATokens | None, own: int) -> Tensor:
        """Overwrite x [T, size] where ids [T] are added vocabulary, beyond the model's `own` tokens."""
        for weights, tokens in self.of(rows):
            if weights.more is not None:
                some = slice(None) if tokens is None else tokens
                beyond = ids[some] - own
                found = F.embedding(beyond.clamp(0, len(weights.more) - 1), weights.more).to(x.dtype)
                x[some] = torch.where((beyond >= 0).unsqueeze(1), found, x[some])
        return x


@dataclass(frozen=True)
class ExpertsLoRA:
    """One adapter's low-rank matrices for all experts of a layer; None: that matrix is not changed."""

    up: tuple[Tensor, Tensor] | None = None  # down [E, hidden, rank], up [E, rank, 2 * inner]
    down: tuple[Tensor, Tensor] | None = None  # down [E, inner, rank], up [E, rank, hidden]


class FloatExperts(Protocol):
    @property
    def up(self) -> Tensor:
        """[E, 2 * inner, hidden], gate rows first; [E, inner, hidden] without gates."""

    @property
    def down(self) -> Tensor:
        """[E, hidden, inner]."""

    @property
    def activation(self) -> Inner: ...

    @property
    def biases(self) -> ExpertBiases | None: ...


class ExpertsBank(Bank[ExpertsLoRA]):
    def replace(
        self, out: Tensor, x: Tensor, weights: Tensor, experts: Tensor, rows: LoRATokens | None, layer: FloatExperts
    ) -> Tensor:
        """Return out [T, H] of x [T, H], with the tokens whose adapter changes experts recomputed."""
        for lora, tokens in self.of(rows):
            some = slice(None) if tokens is None else tokens
            out[some] = _run_experts(x[some], weights[some], experts[some], layer, lora)
        return out


def _run_experts(x: Tensor, weights: Tensor, experts: Tensor, layer: FloatExperts, lora: ExpertsLoRA) -> Tensor:
    out, biases = torch.zeros_like(x, dtype=torch.float32), layer.biases
    for expert in sorted({*experts.flatten().tolist()}):
        mine, which = (experts == expert).nonzero(as_tuple=True)
        some = x[mine]
        inner = F.linear(some, layer.up[expert])
        if biases is not None:
            inner = inner + biases.up[expert]
        if lora.up is not None:
            inner = inner + times(times(some, lora.up[0][expert]), lora.up[1][expert])
        inner = reference_gated(inner, layer.activation)
        back = F.linear(inner, layer.down[expert])
        if biases is not None and biases.down is not None:
            back = back + biases.down[expert]
        if lora.down is not None:
            back = back + times(times(inner, lora.down[0][expert]), lora.down[1][expert])
        out.index_add_(0, mine, back.float() * weights[mine, which].unsqueeze(1))
    return out.to(x.dtype)


def times(x: Tensor, matrix: Tensor) -> Tensor:
    """Return x [n, inner] @ matrix [inner, outputs].

    CPU libraries choose a kernel by the number of rows, and kernels sum in different orders. So every GEMM has GEMM_ROWS rows
    there, which makes a token's result independent of the batch.
    """
    x = x.to(matrix.dtype)
    if x.device.type != "cpu":
        return x @ matrix
    rows = len(x)
    if rows % GEMM_ROWS:
        x = F.pad(x, (0, 0, 0, -rows % GEMM_ROWS))
    products = [torch.mm(some, matrix) for some in torch.split(x, GEMM_ROWS)]
    return (products[0] if len(products) == 1 else torch.cat(products))[:rows]
