"""A float32 encoder compiled for own kernels: one call per segment between two attentions, one per attention.

Sequences of a batch run in groups of about GROUP_TOKENS tokens, all layers of one group before the next group, so that
intermediate results stay in the caches. All groups use the same memory, which calls are bound to once.

    x of a group ─► segment (in parts of PROGRAM_TOKENS tokens) ─► attention of the group's sequences ─► segment ─► ...
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.attn.batch import Batch
from quire.device.cpu.graph import Graph, Runtime, Value
from quire.device.cpu.program import Binding, Program, Scratch
from quire.device.cpu.segments import SegmentMemory
from quire.device.cpu.session import PROGRAM_TOKENS
from quire.device.cpu.trace import Boundary, Symbol, Trace, Untraceable, trace_body
from quire.layers.packed_attention import PackedSelfAttention
from quire.ops.native_packed_attention import PackedAttention, supports
from quire.types.plan import Ints

GROUP_TOKENS = 512
PART_STEP = 8  # tokens that a product multiplies together


@dataclass(frozen=True)
class EncoderStage:
    """A compiled segment and the attention after it; None: the last segment."""

    program: Program
    inputs: tuple[Symbol, ...]
    outputs: tuple[Symbol, ...]
    names: tuple[str, ...]  # of inputs and outputs in the program
    boundary: Boundary | None
    dead: tuple[Symbol, ...]  # not read by later stages


class BoundEncoder:
    """All stages on memory for `capacity` tokens."""

    def __init__(self, stages: Sequence[EncoderStage], first: Symbol, last: Symbol, capacity: int) -> None:
        self.capacity, memory = capacity, SegmentMemory(capacity + PROGRAM_TOKENS)
        values = {first: memory.take(first.columns)}
        self.source = values[first]
        self._programs: list[tuple[Program, dict[str, Tensor]]] = []
        self._attentions: list[PackedAttention | None] = []
        self._bindings: dict[int, list[Binding]] = {}  # of each stage, by the first token of a part
        for stage in stages:
            values.update((symbol, memory.take(symbol.columns)) for symbol in stage.outputs)
            bound = zip(stage.names, [values[symbol] for symbol in (*stage.inputs, *stage.outputs)], strict=True)
            self._programs.append((stage.program, dict(bound)))
            attention = None
            if stage.boundary is not None:
                values[stage.boundary.target] = memory.take(stage.boundary.target.columns)
                attention = _bind(stage.boundary, values[stage.boundary.source], values[stage.boundary.target])
            self._attentions.append(attention)
            for symbol in stage.dead:
                memory.give(values.pop(symbol))
        self.result = values[last]

    def run(self, starts: Ints, keys: Ints) -> None:
        """Run the sequences in `source`.

        starts: [sequences + 1] where each begins, and the end of the last one.
        keys: [sequences] how many of its tokens, from the first one, are keys.
        """
        tokens = int(starts[-1])
        share = -(-tokens // -(-tokens // PROGRAM_TOKENS))
        share += -share % PART_STEP
        parts = [(self._bind(start), min(share, tokens - start)) for start in range(0, tokens, share)]
        for i, attention in enumerate(self._attentions):
            for bindings, count in parts:
                bindings[i].run(count)
            if attention is not None:
                attention.run(starts, keys)

    def _bind(self, start: int) -> list[Binding]:
        """Return the stages on the memory of up to PROGRAM_TOKENS tokens from `start` on."""
        if start not in self._bindings:
            self._bindings[start] = [
                Binding(program, {name: matrix[start : start + PROGRAM_TOKENS] for name, matrix in bound.items()})
                for program, bound in self._programs
            ]
        return self._bindings[start]


class CompiledEncoder:
    """The body of an encoder."""

    def __init__(self, trace: Trace) -> None:
        """Compile a trace; its float matrices are freed."""
        self._first, self._last = trace.first, trace.last
        self._bound: BoundEncoder | None = None
        scratch = Scratch()
        self._stages = [_compile(trace, number, scratch) for number in range(len(trace.segments))]
        for segment in trace.segments:
            for step in segment.steps:
                if step.matrix is not None:
                    step.matrix.give_back()
            segment.steps.clear()

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        """Return the hidden states of the final tokens of x [T, H]."""
        out = torch.empty_like(x)
        for begin, starts, keys in _groups([(count, keys) for _, count, keys in batch.rows if count]):
            tokens = int(starts[-1])
            if self._bound is None or self._bound.capacity < tokens:
                self._bound = BoundEncoder(self._stages, self._first, self._last, max(GROUP_TOKENS, tokens))
            self._bound.source[:tokens] = x[begin : begin + tokens]
            self._bound.run(starts, keys)
            out[begin : begin + tokens] = self._bound.result[:tokens]
        return batch.take_final(out)


def compile_encoder(body: Callable[[Any, Any], Any], columns: int) -> CompiledEncoder:
    """Compile an encoder body, from embedded tokens [T, columns] to its last hidden states. Raise Untraceable if that is not
    possible."""
    trace = trace_body(body, columns)
    if trace.divided:
        raise Untraceable("an encoder on several ranks")
    if not all(segment.steps for segment in trace.segments):
        raise Untraceable("an encoder without layers")
    for segment in trace.segments:
        for boundary in segment.boundaries:
            attention = boundary.packed
            if attention is None or not supports(attention.head_dim, _rotation(attention)):
                raise Untraceable("this attention")
    return CompiledEncoder(trace)


def _groups(sequences: Sequence[tuple[int, int]]) -> list[tuple[int, Ints, Ints]]:
    """Divide sequences (tokens, keys) into groups: of each the first token, the starts of its sequences within it, and their
    keys."""
    groups: list[tuple[int, Ints, Ints]] = []
    begin, starts, keys = 0, [0], list[int]()
    for count, seen in sequences:
        if keys and starts[-1] + count > GROUP_TOKENS:
            groups.append((begin, np.array(starts, np.int32), np.array(keys, np.int32)))
            begin, starts, keys = begin + starts[-1], [0], []
        starts.append(starts[-1] + count)
        keys.append(seen)
    if keys:
        groups.append((begin, np.array(starts, np.int32), np.array(keys, np.int32)))
    return groups


def _rotation(attention: PackedSelfAttention) -> Any:
    return None if attention.rope is None else attention.rope.table


def _bind(boundary: Boundary, qkv: Tensor, out: Tensor) -> PackedAttention:
    attention = boundary.packed
    assert attention is not None
    bias = None if attention.position_bias is None else attention.position_bias.table
    return PackedAttention(
        qkv, out, attention.head_dim, scale=attention.scale, window=attention.window, rotation=_rotation(attention), bias=bias
    )


def _compile(trace: Trace, number: int, scratch: Scratch) -> EncoderStage:
    segment, boundary = trace.segments[number], next(iter(trace.segments[number].boundaries), None)
    sources = {boundary.source for boundary in segment.boundaries}
    later = {trace.last, *(symbol for each in trace.segments[number + 1 :] for symbol in each.read)}
    later |= {each.source for other in trace.segments[number + 1 :] for each in other.boundaries}
    read = tuple(segment.read)
    made = tuple(symbol for step in segment.steps for symbol in step.outputs if symbol in later or symbol in sources)
    graph = Graph(Runtime.OWN)
    names = {symbol: graph.name() for symbol in read}
    inputs = [Value(names[symbol], ("rows", symbol.columns)) for symbol in read]
    for step in segment.steps:
        names.update(zip(step.outputs, step.emit(graph, [names[symbol] for symbol in step.inputs]), strict=True))
    dead = tuple(symbol for symbol in {*read, *made, *sources} if symbol not in later)
    program = Program(graph, inputs, scratch)
    return EncoderStage(program, read, made, tuple(names[symbol] for symbol in (*read, *made)), boundary, dead)
