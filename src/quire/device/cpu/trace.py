"""A decoder's forward written down: it is run once with symbols in place of tensors. What happens to them is noted, operator
by operator; an attention ends a piece, for it goes through the cache, and so does a sum over ranks. Behind the last attention,
tokens may be left out.

    embedding | norm qkv | attention | o_proj add norm gate_up silu mul down add norm qkv | attention | ... norm
              '- piece -'             '---------------------- piece ---------------------'

A decoder that does anything else to its hidden states is `Untraceable`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from quire.attn.batch import Batch
from quire.device.cpu import gemm
from quire.device.cpu.graph import CONTRIB, Graph
from quire.device.cpu.low_rank import LowRankTables
from quire.device.cpu.product import emit, repack
from quire.dist.collectives import Group, add_parts, join_parts, spread
from quire.layers.attention import SelfAttention, attend_heads, keep
from quire.layers.linear import Linear
from quire.layers.lora import LinearBank
from quire.layers.quant.gguf import GGUFMethod
from quire.ops.linear import linear
from quire.ops.norm import add_rms_norm, rms_norm

Emit = Callable[[Graph, Sequence[str]], Sequence[str]]  # names of inputs -> names of outputs


class Untraceable(Exception):
    pass


@dataclass(frozen=True)
class Matrix:
    """Of floats, that the runtime repacks."""

    weight: Tensor  # [N, K]
    bias: Tensor | None  # [N]

    def multiply(self, parts: int = 1) -> Emit:
        """The product in equal parts of its columns."""
        return lambda graph, names: gemm.emit(graph, names[0], self.weight, self.bias, parts)

    def give_back(self) -> None:
        self.weight.data = self.weight.new_empty(0)


@dataclass(frozen=True)
class Step:
    """One operator of a piece."""

    emit: Emit
    inputs: "tuple[Symbol, ...]"
    outputs: "tuple[Symbol, ...]"
    matrix: Matrix | None = None  # by which it multiplies
    quickly: bool = True  # dequantizes the body its matrix in blocks, if it has one


@dataclass(frozen=True)
class Between:
    """What is done behind a piece: an attention, a sum over the ranks of a group, or the choice of the tokens that are kept.
    `columns`: of the sum those that this rank has, if each rank has others."""

    attention: SelfAttention | None
    source: "Symbol"
    target: "Symbol"
    group: Group | None = None
    columns: range | None = None

    def add(self, part: Tensor) -> Tensor:
        assert self.group is not None
        return self.group.add(part if self.columns is None else spread(part, self.columns, self.target.columns))

    def do(self, x: Tensor, batch: Batch) -> Tensor:
        if self.group is not None:
            return self.add(x)
        return keep(x, batch) if self.attention is None else attend_heads(self.attention, x, batch)


@dataclass
class Piece:
    steps: list[Step] = field(default_factory=list)
    behind: list[Between] = field(default_factory=list)

    @property
    def read(self) -> "list[Symbol]":
        made = {symbol for step in self.steps for symbol in step.outputs}
        return list(dict.fromkeys(symbol for step in self.steps for symbol in step.inputs if symbol not in made))


class Symbol:
    """Stands for hidden states [T, columns] while a forward is written down."""

    is_cuda = False

    def __init__(self, pieces: list[Piece], columns: int) -> None:
        self.pieces, self.columns = pieces, columns

    def then(
        self, emit: Emit, *others: "Symbol", columns: Sequence[int], matrix: Matrix | None = None, quickly: bool = True
    ) -> "list[Symbol]":
        outputs = [Symbol(self.pieces, count) for count in columns]
        self.pieces[-1].steps.append(Step(emit, (self, *others), tuple(outputs), matrix, quickly))
        return outputs

    def simple(self, operator: str, *others: "Symbol", domain: str = "", **attributes: Any) -> "Symbol":
        """An operator that keeps the shape."""
        return self.then(
            lambda graph, names: graph.add(operator, names, domain=domain, **attributes), *others, columns=[self.columns]
        )[0]

    def __add__(self, other: "Symbol") -> "Symbol":
        return self.simple("Add", _symbol(other))

    def __mul__(self, other: "Symbol") -> "Symbol":
        return self.simple("Mul", _symbol(other))

    mul_ = __mul__

    def __getattr__(self, name: str) -> Any:
        raise Untraceable(f"a use of {name!r}")

    def __getitem__(self, index: object) -> "Symbol":
        raise Untraceable("a part of hidden states")

    def chunk(self, count: int, dim: int) -> "list[Symbol]":
        if dim != -1:
            raise Untraceable(f"a cut along dimension {dim}")
        sizes, steps = [self.columns // count] * count, self.pieces[-1].steps
        if steps and steps[-1].matrix is not None and steps[-1].outputs == (self,):  # nobody else has seen the whole
            parts = [Symbol(self.pieces, size) for size in sizes]
            steps[-1] = replace(steps[-1], emit=steps[-1].matrix.multiply(count), outputs=tuple(parts))
            return parts
        return self.then(
            lambda graph, names: graph.add("Split", names, outputs=count, axis=1, num_outputs=count), columns=sizes
        )

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if function not in OPERATORS:
            raise Untraceable(f"{function}")
        return OPERATORS[function](*args, **(kwargs or {}))


def _symbol(value: Any) -> Symbol:
    if not isinstance(value, Symbol):
        raise Untraceable(f"arithmetic with a {type(value).__name__}")
    return value


def _linear(method: GGUFMethod, layer: Linear, x: Symbol) -> Symbol:
    def make(graph: Graph, names: Sequence[str]) -> Sequence[str]:
        return [emit(graph, names[0], repack(method.parts, layer.bias, graph.runtime))]

    return x.then(make, columns=[layer.outputs], quickly=method.dequantizes_quickly)[0]


def _plain_linear(x: Symbol, weight: Tensor, bias: Tensor | None = None) -> Symbol:
    matrix = Matrix(weight, bias)
    return x.then(matrix.multiply(), columns=[len(weight)], matrix=matrix)[0]


def _weight(weight: Tensor, offset: float) -> Any:
    return (weight.float() + offset).numpy()


def _rms_norm(x: Symbol, weight: Tensor, eps: float, offset: float = 0.0) -> Symbol:
    def make(graph: Graph, names: Sequence[str]) -> Sequence[str]:
        return graph.add(
            "SimplifiedLayerNormalization", [*names, graph.constant(_weight(weight, offset))], axis=-1, epsilon=eps
        )

    return x.then(make, columns=[x.columns])[0]


def _add_rms_norm(x: Symbol, residual: Symbol, weight: Tensor, eps: float, offset: float = 0.0) -> tuple[Symbol, Symbol]:
    def make(graph: Graph, names: Sequence[str]) -> Sequence[str]:
        normed, total = graph.name(), graph.name()
        inputs = [*names, graph.constant(_weight(weight, offset))]
        graph.place("SkipSimplifiedLayerNormalization", inputs, [normed, "", "", total], CONTRIB, epsilon=eps)
        return normed, total

    normed, total = x.then(make, residual, columns=[x.columns, x.columns])
    return normed, total


def _silu(x: Symbol, inplace: bool = False) -> Symbol:  # noqa: ARG001
    return x.simple("QuickGelu", domain=CONTRIB, alpha=1.0)


def _gelu(x: Symbol, approximate: str = "none") -> Symbol:
    return x.simple("Gelu", approximate=approximate)


def _attend(attention: SelfAttention, qkv: Symbol, batch: "AnyBatch") -> Symbol:
    spec = attention.core.spec
    target = Symbol(qkv.pieces, spec.heads * spec.head_dim)
    qkv.pieces[-1].behind.append(Between(attention, qkv, target))
    lora, final = batch.tokens.lora, batch.final.tokens.lora
    if attention.last and lora is not None and final is not None:
        final.there = True
        qkv.pieces[-1].behind.append(Between(None, lora.places, final.places))
    qkv.pieces.append(Piece())
    return target


def _add_parts(part: Symbol, group: Group) -> Symbol:
    target = Symbol(part.pieces, part.columns)
    part.pieces[-1].behind.append(Between(None, part, target, group))
    part.pieces.append(Piece())
    return target


def _join_parts(part: Symbol, group: Group, kept: range, total: int) -> Symbol:
    target, pieces = Symbol(part.pieces, total), part.pieces
    if not pieces[-1].steps and len(pieces) > 1:  # right behind an attention
        pieces[-2].behind.append(Between(None, part, target, group, kept))
    else:
        pieces[-1].behind.append(Between(None, part, target, group, kept))
        pieces.append(Piece())
    return target


def _keep(x: Symbol, batch: Batch) -> Symbol:  # noqa: ARG001
    """x went past the latest attention, and is thinned out beside it."""
    since, found = list[Symbol](), None
    for piece in reversed(x.pieces):
        if any(between.attention is not None for between in piece.behind):
            found = piece
            break
        since += [symbol for step in piece.steps for symbol in step.outputs] + [between.target for between in piece.behind]
    if found is None or x in since:
        raise Untraceable("leaving out tokens anywhere else")
    target = Symbol(x.pieces, x.columns)
    found.behind.append(Between(None, x, target))
    return target


def _adapted(bank: LinearBank, out: Symbol, x: Symbol, lora: "AnyLoRA", own: Tensor | None) -> Symbol:  # noqa: ARG001
    if not lora.there:
        raise Untraceable("adapters of tokens that were not left out by an attention")
    table = lora.tables.of(bank, x.columns)
    emit: Emit = lambda graph, names: graph.add("LowRank", names, table=table.address)  # noqa: E731
    return out.then(emit, x, lora.places, columns=[out.columns])[0]


OPERATORS: dict[Callable[..., Any], Callable[..., Any]] = {
    LinearBank.add: _adapted,
    GGUFMethod.apply: _linear,
    linear: _plain_linear,
    rms_norm: _rms_norm,
    add_rms_norm: _add_rms_norm,
    F.silu: _silu,
    F.gelu: _gelu,
    attend_heads: _attend,
    add_parts: _add_parts,
    join_parts: _join_parts,
    keep: _keep,
}


@dataclass(frozen=True)
class Trace:
    """Of a way from embedded tokens to the last hidden states."""

    pieces: list[Piece]
    first: Symbol
    last: Symbol
    places: Symbol | None = None  # of the tokens' adapters, if they are run with what those add
    tables: LowRankTables | None = None

    @property
    def has_floats(self) -> bool:
        """Is any of its matrices of floats?"""
        return any(step.matrix is not None for piece in self.pieces for step in piece.steps)

    @property
    def divided(self) -> bool:
        """Has each rank a share of it?"""
        return any(between.group is not None for piece in self.pieces for between in piece.behind)

    @property
    def quickly(self) -> bool:
        """Does the decoder itself dequantize all of its matrices in blocks quickly?"""
        return all(step.quickly for piece in self.pieces for step in piece.steps)


@dataclass
class AnyLoRA:
    """Stands for the LoRA adapters of tokens (`LoRATokens`)."""

    places: Symbol
    tables: LowRankTables
    there: bool = True  # are their places known behind the latest piece?
    tiles = None


@dataclass(frozen=True)
class AnyTokens:
    lora: AnyLoRA | None = None


class AnyBatch:
    """Stands for batches. Without `lora` none of their tokens has an adapter."""

    def __init__(self, lora: AnyLoRA | None = None, final: "AnyBatch | None" = None) -> None:
        self.tokens, self._final = AnyTokens(lora), final

    @property
    def final(self) -> "AnyBatch":
        return self if self._final is None else self._final


def write_down(body: Callable[[Any, Any], Any], columns: int, tables: LowRankTables | None = None) -> Trace:
    """`body` is a decoder's way from embedded tokens [T, columns] to its last hidden states. `tables`: of what adapters add, if
    that is to be written down, too."""
    pieces = [Piece()]
    first = Symbol(pieces, columns)
    if tables is None:
        return Trace(pieces, first, body(first, AnyBatch()))
    places = Symbol(pieces, 1)
    final = AnyBatch(AnyLoRA(Symbol(pieces, 1), tables, there=False))
    return Trace(pieces, first, body(first, AnyBatch(AnyLoRA(places, tables), final)), places, tables)
