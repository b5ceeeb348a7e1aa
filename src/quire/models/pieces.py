"""A decoder of float32 numbers on a CPU, compiled for ONNX Runtime in pieces: what is between two attentions is one call.

The decoder's own forward is run once with symbols in place of tensors. What happens to them is written down, operator by
operator; an attention ends a piece, for it goes through the cache. Behind the last one, tokens may be left out.

    embedding | norm qkv | attention | o_proj add norm gate_up silu mul down add norm qkv | attention | ... norm
              '- piece -'             '---------------------- piece ---------------------'

Steps in which every row is one token run on memory that stays (`track.py`). A decoder that does anything else to its hidden
states is `Untraceable`, and runs layer by layer.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from quire.attn.batch import Batch
from quire.layers.attention import SelfAttention, attend_heads, keep
from quire.layers.linear import Linear
from quire.layers.quant.gguf import GGUFMethod
from quire.models.track import BoundAttention, Group, Memory, Track, room_for
from quire.ops import gemm
from quire.ops.choice import NEVER, unfold_from
from quire.ops.linear import linear
from quire.ops.nbits import emit, forgets
from quire.ops.norm import add_rms_norm, rms_norm
from quire.ops.onnx import CONTRIB, Binding, Graph, Session

logger = logging.getLogger(__name__)

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
    quickly: bool = True  # unfolds the body its matrix in blocks, if it has one


@dataclass(frozen=True)
class Between:
    """What is done behind a piece: an attention, or the choice of the tokens that are kept."""

    attention: SelfAttention | None
    source: "Symbol"
    target: "Symbol"

    def do(self, x: Tensor, batch: Batch) -> Tensor:
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
        return [emit(graph, names[0], method.take(layer))]

    return x.then(make, columns=[layer.outputs], quickly=method.unfolds_quickly)[0]


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


def _attend(attention: SelfAttention, qkv: Symbol, batch: Batch) -> Symbol:  # noqa: ARG001
    spec = attention.core.spec
    target = Symbol(qkv.pieces, spec.heads * spec.head_dim)
    qkv.pieces[-1].behind.append(Between(attention, qkv, target))
    qkv.pieces.append(Piece())
    return target


def _keep(x: Symbol, batch: Batch) -> Symbol:  # noqa: ARG001
    """x went past the latest attention, and is thinned out beside it."""
    if len(x.pieces) == 1 or any(x in step.outputs for step in x.pieces[-1].steps):
        raise Untraceable("leaving out tokens anywhere else")
    target = Symbol(x.pieces, x.columns)
    x.pieces[-2].behind.append(Between(None, x, target))
    return target


OPERATORS: dict[Callable[..., Any], Callable[..., Any]] = {
    GGUFMethod.apply: _linear,
    linear: _plain_linear,
    rms_norm: _rms_norm,
    add_rms_norm: _add_rms_norm,
    F.silu: _silu,
    F.gelu: _gelu,
    attend_heads: _attend,
    keep: _keep,
}


@dataclass(frozen=True)
class Stage:
    """A compiled piece, and what comes behind it."""

    session: Session
    read: tuple[Symbol, ...]
    made: tuple[Symbol, ...]
    behind: tuple[Between, ...]
    dead: tuple[Symbol, ...]  # nobody reads them any more


def compile_body(body: Callable[[Any, Any], Any], columns: int, *, whole: bool) -> "Pieces | None":
    try:
        return Pieces(body, columns, whole=whole)
    except Untraceable as reason:
        logger.info("the model runs layer by layer: %s cannot be compiled", reason)
        return None


class Pieces:
    def __init__(self, body: Callable[[Any, Any], Any], columns: int, *, whole: bool) -> None:
        """`body` is a decoder's way from embedded tokens [T, columns] to its last hidden states. `whole`: it will not be run
        itself any more, and what it holds in matrices of floats is given back."""
        pieces = [Piece()]
        self._first = Symbol(pieces, columns)
        self._last: Symbol = body(self._first, None)
        quickly = all(step.quickly for piece in pieces for step in piece.steps)
        self.too_many = NEVER if whole else unfold_from(quickly)  # tokens: from there on the body itself is faster
        sources = [{between.source for between in piece.behind} for piece in pieces]
        wanted = [{*piece.read} | behind for piece, behind in zip(pieces, sources, strict=True)] + [{self._last}]
        self._stages = []
        for i, piece in enumerate(pieces):
            later = set().union(*wanted[i + 1 :])
            made = [symbol for step in piece.steps for symbol in step.outputs]
            kept = [symbol for symbol in made if symbol in later or symbol in sources[i]]
            session = _compile(piece, kept)
            if whole and gemm.forgets():
                _give_back(piece)
            dead = {*wanted[i], *kept} - later
            self._stages.append(Stage(session, tuple(piece.read), tuple(kept), tuple(piece.behind), tuple(dead)))
        self._track: Track | None = None  # for steps of rows of one token

    def suit(self, batch: Batch) -> bool:
        """Are they faster than the body? With many rows of one token the body loses in attention what it gains in products."""
        return len(batch.ids) < self.too_many or _are_single(batch)

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        """x [T, columns] -> hidden states; they are overwritten by the next call."""
        if _are_single(batch):
            if self._track is None or not self._track.suits(len(x)):
                self._track = self._lay(len(x))
            return self._track.run(x, batch)
        values = {self._first: x}
        for stage in self._stages:
            results = stage.session.run(*[values[symbol] for symbol in stage.read])
            values.update(zip(stage.made, results, strict=True))
            for between in stage.behind:
                values[between.target] = between.do(values[between.source], batch)
            for symbol in stage.dead:
                del values[symbol]
        return values[self._last]

    def _lay(self, rows: int) -> Track:
        memory, groups = Memory(room_for(rows)), dict[int, Group]()
        values = {self._first: memory.take(self._first.columns)}
        source, stages = values[self._first], []
        for stage in self._stages:
            values.update((symbol, memory.take(symbol.columns)) for symbol in stage.made)
            bind = partial(_bind, stage.session, [values[s] for s in stage.read], [values[s] for s in stage.made])
            attending = None
            for between in stage.behind:
                if between.attention is None:  # all tokens are kept
                    values[between.target] = values[between.source]
                else:
                    values[between.target] = memory.take(between.target.columns)
                    attending = BoundAttention(between.attention, values[between.source], values[between.target], groups)
            stages.append((bind, attending))
            for symbol in stage.dead:
                matrix = values.pop(symbol)
                if all(matrix is not other for other in values.values()):
                    memory.give(matrix)
        return Track(source, values[self._last], stages, list(groups.values()), memory)


def _are_single(batch: Batch) -> bool:
    """Are its rows of one token, and do all go on to the end?"""
    return len(batch.ids) == len(batch.rows) and batch.kept is None


def _bind(session: Session, inputs: Sequence[Tensor], outputs: Sequence[Tensor], rows: int) -> Binding:
    """The session at work on the first rows of these matrices."""
    return session.bind([matrix[:rows] for matrix in inputs], [matrix[:rows] for matrix in outputs])


def _give_back(piece: Piece) -> None:
    for step in piece.steps:
        if step.matrix is not None:
            step.matrix.give_back()


def _compile(piece: Piece, outputs: Sequence[Symbol]) -> Session:
    graph = Graph()
    names = {symbol: graph.name() for symbol in piece.read}
    inputs = [(names[symbol], symbol.columns) for symbol in piece.read]
    for step in piece.steps:
        names.update(zip(step.outputs, step.emit(graph, [names[symbol] for symbol in step.inputs]), strict=True))
    return Session(
        graph,
        inputs,
        [(names[symbol], symbol.columns) for symbol in outputs],
        hold=not (forgets(4) and forgets(8) and gemm.forgets()),
    )
