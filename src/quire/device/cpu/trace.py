"""Trace a decoder's forward: run it once with symbols instead of tensors and record each operator.

An attention ends a segment, because it needs the KV cache; so does an all-reduce. After the last attention, tokens may be
dropped.

    embedding | norm qkv | attention | o_proj add norm gate_up silu mul down add norm qkv | attention | ... norm
              '-segment--'             '--------------------- segment --------------------'

A decoder that does anything else to its hidden states raises `Untraceable`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.attn.batch import Batch
from quire.device.cpu.graph import CONTRIB, Graph
from quire.device.cpu.program import LowRankTables
from quire.device.cpu.repack import emit, repack
from quire.device.cpu.session import emit_floats
from quire.dist.collectives import Group, add_parts, join_parts, spread
from quire.layers.attention import SelfAttention, attend_heads, take_final
from quire.layers.linear import Linear
from quire.layers.lora import LinearBank
from quire.layers.packed_attention import PackedSelfAttention, attend_sequences
from quire.layers.quant.gguf import GGUFMethod
from quire.ops.linear import linear
from quire.ops.norm import add_rms_norm, rms_norm

Emit = Callable[[Graph, Sequence[str]], Sequence[str]]  # names of inputs -> names of outputs


class Untraceable(Exception):
    """The decoder uses an operation that cannot be compiled."""


@dataclass(frozen=True)
class Matrix:
    """A float matrix, which the runtime repacks."""

    weight: Tensor  # [N, K]
    bias: Tensor | None  # [N]

    def multiply(self, parts: int = 1) -> Emit:
        """Return the product in equal parts of its columns."""
        return lambda graph, names: emit_floats(graph, names[0], self.weight, self.bias, parts)

    def give_back(self) -> None:
        self.weight.data = self.weight.new_empty(0)


@dataclass(frozen=True)
class Step:
    """One operator of a segment."""

    emit: Emit
    inputs: "tuple[Symbol, ...]"
    outputs: "tuple[Symbol, ...]"
    matrix: Matrix | None = None  # of a float product
    quickly: bool = True  # whether the decoder dequantizes its GGUF matrix quickly


@dataclass(frozen=True)
class Boundary:
    """What follows a segment: an attention, an all-reduce over a group, or the selection of the kept tokens.

    columns: if ranks have different columns of the sum, those of this rank.
    """

    attention: SelfAttention | None
    source: "Symbol"
    target: "Symbol"
    group: Group | None = None
    columns: range | None = None
    packed: PackedSelfAttention | None = None  # an encoder's attention

    def add(self, part: Tensor) -> Tensor:
        assert self.group is not None
        return self.group.add(part if self.columns is None else spread(part, self.columns, self.target.columns))

    def do(self, x: Tensor, batch: Batch) -> Tensor:
        if self.group is not None:
            return self.add(x)
        return take_final(x, batch) if self.attention is None else attend_heads(self.attention, x, batch)


@dataclass
class Segment:
    """The operators up to a boundary."""

    steps: list[Step] = field(default_factory=list)
    boundaries: list[Boundary] = field(default_factory=list)

    @property
    def read(self) -> "list[Symbol]":
        made = {symbol for step in self.steps for symbol in step.outputs}
        return list(dict.fromkeys(symbol for step in self.steps for symbol in step.inputs if symbol not in made))


class Symbol:
    """Stand for hidden states [T, columns] during tracing."""

    is_cuda = False

    def __init__(self, segments: list[Segment], columns: int) -> None:
        self.segments, self.columns = segments, columns

    def then(
        self, emit: Emit, *others: "Symbol", columns: Sequence[int], matrix: Matrix | None = None, quickly: bool = True
    ) -> "list[Symbol]":
        outputs = [Symbol(self.segments, count) for count in columns]
        self.segments[-1].steps.append(Step(emit, (self, *others), tuple(outputs), matrix, quickly))
        return outputs

    def simple(self, operator: str, *others: "Symbol", domain: str = "", **attributes: Any) -> "Symbol":
        """Add an operator that keeps the shape."""
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
        sizes, steps = [self.columns // count] * count, self.segments[-1].steps
        if steps and steps[-1].matrix is not None and steps[-1].outputs == (self,):  # the product has no other reader
            parts = [Symbol(self.segments, size) for size in sizes]
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


def _layer_norm(
    x: Symbol, shape: Sequence[int], weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Symbol:
    if list(shape) != [x.columns]:
        raise Untraceable(f"a LayerNorm over {shape}")

    def make(graph: Graph, names: Sequence[str]) -> Sequence[str]:
        scale = torch.ones(x.columns) if weight is None else weight
        shift = [] if bias is None else [graph.constant(bias.detach().float().numpy())]
        scales = graph.constant(scale.detach().float().numpy())
        return graph.add("LayerNormalization", [*names, scales, *shift], axis=-1, epsilon=eps)

    return x.then(make, columns=[x.columns])[0]


def _silu(x: Symbol, inplace: bool = False) -> Symbol:  # noqa: ARG001
    return x.simple("QuickGelu", domain=CONTRIB, alpha=1.0)


def _gelu(x: Symbol, approximate: str = "none") -> Symbol:
    return x.simple("Gelu", approximate=approximate)


def _attend(attention: SelfAttention, qkv: Symbol, batch: "TracedBatch") -> Symbol:
    spec = attention.core.spec
    target = Symbol(qkv.segments, spec.heads * spec.head_dim)
    qkv.segments[-1].boundaries.append(Boundary(attention, qkv, target))
    lora, final = batch.tokens.lora, batch.final.tokens.lora
    if attention.last and lora is not None and final is not None:
        final.known = True
        qkv.segments[-1].boundaries.append(Boundary(None, lora.slots, final.slots))
    qkv.segments.append(Segment())
    return target


def _attend_packed(attention: PackedSelfAttention, qkv: Symbol, batch: "TracedBatch") -> Symbol:  # noqa: ARG001
    target = Symbol(qkv.segments, qkv.columns // 3)
    qkv.segments[-1].boundaries.append(Boundary(None, qkv, target, packed=attention))
    qkv.segments.append(Segment())
    return target


def _add_parts(part: Symbol, group: Group) -> Symbol:
    target = Symbol(part.segments, part.columns)
    part.segments[-1].boundaries.append(Boundary(None, part, target, group))
    part.segments.append(Segment())
    return target


def _join_parts(part: Symbol, group: Group, columns: range, total: int) -> Symbol:
    target, segments = Symbol(part.segments, total), part.segments
    if not segments[-1].steps and len(segments) > 1:  # right after an attention
        segments[-2].boundaries.append(Boundary(None, part, target, group, columns))
    else:
        segments[-1].boundaries.append(Boundary(None, part, target, group, columns))
        segments.append(Segment())
    return target


def _keep(x: Symbol, batch: Batch) -> Symbol:  # noqa: ARG001
    """Drop tokens of x, which bypassed the latest attention (a residual), at that attention."""
    since, found = list[Symbol](), None
    for segment in reversed(x.segments):
        if any(boundary.attention is not None for boundary in segment.boundaries):
            found = segment
            break
        since += [symbol for step in segment.steps for symbol in step.outputs] + [
            boundary.target for boundary in segment.boundaries
        ]
    if found is None or x in since:
        raise Untraceable("dropping tokens elsewhere")
    target = Symbol(x.segments, x.columns)
    found.boundaries.append(Boundary(None, x, target))
    return target


def _add_lora(bank: LinearBank, out: Symbol, x: Symbol, lora: "TracedLoRA", own: Tensor | None) -> Symbol:  # noqa: ARG001
    if not lora.known:
        raise Untraceable("LoRA of tokens that no attention dropped")
    table = lora.tables.of(bank, x.columns)
    emit: Emit = lambda graph, names: graph.add("LowRank", names, table=table.address)  # noqa: E731
    return out.then(emit, x, lora.slots, columns=[out.columns])[0]


OPERATORS: dict[Callable[..., Any], Callable[..., Any]] = {
    LinearBank.add: _add_lora,
    GGUFMethod.apply: _linear,
    linear: _plain_linear,
    rms_norm: _rms_norm,
    add_rms_norm: _add_rms_norm,
    F.silu: _silu,
    F.gelu: _gelu,
    F.layer_norm: _layer_norm,
    attend_heads: _attend,
    attend_sequences: _attend_packed,
    add_parts: _add_parts,
    join_parts: _join_parts,
    take_final: _keep,
}


@dataclass(frozen=True)
class Trace:
    """A recorded body, from embedded tokens to the last hidden states."""

    segments: list[Segment]
    first: Symbol
    last: Symbol
    slots: Symbol | None = None  # adapter slots of the tokens, if LoRA is traced
    tables: LowRankTables | None = None

    @property
    def has_floats(self) -> bool:
        """Return whether any matrix is float32."""
        return any(step.matrix is not None for segment in self.segments for step in segment.steps)

    @property
    def divided(self) -> bool:
        """Return whether the decoder is tensor parallel."""
        return any(boundary.group is not None for segment in self.segments for boundary in segment.boundaries)

    @property
    def quickly(self) -> bool:
        """Return whether the decoder itself dequantizes all its GGUF matrices quickly."""
        return all(step.quickly for segment in self.segments for step in segment.steps)


@dataclass
class TracedLoRA:
    """Stand for the LoRA adapters of tokens (`LoRATokens`)."""

    slots: Symbol
    tables: LowRankTables
    known: bool = True  # whether the adapter slots are known after the latest segment
    tiles = None


@dataclass(frozen=True)
class TracedTokens:
    lora: TracedLoRA | None = None


class TracedBatch:
    """Stand for a batch. Without `lora` no token has an adapter."""

    def __init__(self, lora: TracedLoRA | None = None, final: "TracedBatch | None" = None) -> None:
        self.tokens, self._final = TracedTokens(lora), final

    @property
    def final(self) -> "TracedBatch":
        return self if self._final is None else self._final

    def take_final(self, x: Symbol) -> Symbol:
        """Return x: who runs a compiled encoder drops tokens afterwards."""
        return x


def trace_body(body: Callable[[Any, Any], Any], columns: int, tables: LowRankTables | None = None) -> Trace:
    """Return the trace of a decoder body, from embedded tokens [T, columns] to its last hidden states.

    tables: for LoRA, if it is to be traced too.
    """
    segments = [Segment()]
    first = Symbol(segments, columns)
    if tables is None:
        return Trace(segments, first, body(first, TracedBatch()))
    slots = Symbol(segments, 1)
    final = TracedBatch(TracedLoRA(Symbol(segments, 1), tables, known=False))
    return Trace(segments, first, body(first, TracedBatch(TracedLoRA(slots, tables), final)), slots, tables)
