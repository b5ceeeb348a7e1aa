"""A decoder compiled in segments for a CPU. A segment is what lies between two attentions or all-reduces (`trace.py`): one
call of own kernels or of OpenVINO.

Decode steps, with or without draft tokens, run on memory that is bound once: nothing is allocated, looked up or copied. There,
attention is also a direct kernel call if `ops/paged_attention.py` supports the layer, and two if a row has several tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from quire.attn.batch import Batch, LoRATokens
from quire.attn.cpu import batch_rows
from quire.device.cpu.autotune import NEVER, dequantize_from
from quire.device.cpu.graph import Graph, Runtime
from quire.device.cpu.program import Scratch
from quire.device.cpu.session import Call, Session
from quire.device.cpu.trace import Boundary, Segment, Symbol, Trace
from quire.layers.attention import SelfAttention, attend_heads
from quire.ops import paged_attention

CAPACITY_STEP = 16  # the capacity of bound memory is a multiple of this, in tokens
MAX_BOUND_SIZES = 16  # numbers of tokens whose calls are cached

Bind = Callable[[int], Call]  # number of tokens -> call
MAX_BOUND_TOKENS = 64  # tokens of a step on bound memory, if rows have several


class BoundAttention:
    """A layer's attention on bound memory, from `qkv` to `out`, each [C, columns]."""

    def __init__(self, attention: SelfAttention, qkv: Tensor, out: Tensor) -> None:
        core = attention.core
        self._attention, self._qkv, self._out, self._kv, self._group = attention, qkv, out, core.bound(), core.group
        self._calls: tuple[paged_attention.PagedAttention, ...] = ()  # for decode rows; else one writes keys and one attends
        rotation = None if attention.rope is None else attention.rope.table
        by_halves = rotation is None or not rotation.interleaved
        plain = attention.sinks is None and core.spec.slopes is None
        if plain and by_halves and paged_attention.suits(self._kv):
            bind = partial(
                paged_attention.PagedAttention, self._kv, scale=core.spec.scale, window=core.spec.window,
                soft_cap=core.spec.soft_cap, rotation=rotation, norms=attention.norms,
            )  # fmt: skip
            queries = qkv[:, : core.spec.heads * core.spec.head_dim]
            self._calls = bind(qkv, out), bind(qkv, None), bind(queries, out, placed=True)

    @property
    def stale(self) -> bool:
        return self._attention.core.kv is not self._kv

    def run(self, batch: Batch) -> None:
        tokens = len(batch.ids)
        if not self._calls or not batch.regular:
            self._out[:tokens] = attend_heads(self._attention, self._qkv[:tokens], batch)
            return
        for call in self._calls[:1] if tokens == len(batch.rows) else self._calls[1:]:
            call.run(batch_rows(batch, self._group))


class BoundSum:
    """An all-reduce (`Boundary.add`) on bound memory, from `part` to `total`, each [C, columns]."""

    stale = False

    def __init__(self, add: Callable[[Tensor], Tensor], part: Tensor, total: Tensor) -> None:
        self._add, self._part, self._total = add, part, total

    def run(self, batch: Batch) -> None:
        tokens = len(batch.ids)
        self._total[:tokens] = self._add(self._part[:tokens])


class SegmentMemory:
    """Matrices of C rows that can be reused. It must outlive the calls bound to it."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self._all: list[Tensor] = []
        self._free: dict[int, list[Tensor]] = {}

    def take(self, columns: int) -> Tensor:
        free = self._free.setdefault(columns, [])
        if not free:
            free.append(torch.empty(self.rows, columns))
            self._all += free
        return free.pop()

    def give(self, matrix: Tensor) -> None:
        self._free[matrix.shape[1]].append(matrix)


class BoundSegments:
    """Stages in order, each with the attention and all-reduces after it, for at most C tokens."""

    def __init__(
        self,
        source: Tensor,
        result: Tensor,
        stages: Sequence[tuple[Bind, Sequence[BoundAttention | BoundSum]]],
        memory: SegmentMemory,
        slots: Tensor | None = None,
    ) -> None:
        """Bind stages to memory.

        source, result: [C, columns].
        slots: adapter slots of the tokens, [C, 1], zero at first.
        """
        self._adapter_slots, self._adapted = slots, False  # whether any is not zero
        self._source, self._result, self._memory = source, result, memory  # [C, columns]
        self._binds = [bind for bind, _ in stages]
        self._boundaries = [following for _, following in stages]
        self._calls: dict[int, list[Call]] = {}  # by number of tokens

    def suits(self, tokens: int) -> bool:
        return tokens <= self._memory.rows and not any(each.stale for each in self._boundaries[0])

    def run(self, x: Tensor, batch: Batch) -> Tensor:
        """Return hidden states of x [T, columns]. The next run overwrites them."""
        tokens = len(x)
        calls = self._calls.get(tokens) or self._bind(tokens)
        self._source[:tokens] = x
        if self._adapted or batch.tokens.lora is not None:
            self._place(batch)
        for call, following in zip(calls, self._boundaries, strict=True):
            call.run()
            for each in following:
                each.run(batch)
        return self._result[:tokens]

    def _place(self, batch: Batch) -> None:
        """Write the adapter slot of each token; reset those of the last step."""
        if self._adapter_slots is None:
            return
        lora = batch.tokens.lora
        self._adapted = lora is not None
        self._adapter_slots.zero_()
        if lora is not None:
            self._adapter_slots[: len(batch.ids), 0] = torch.from_numpy(lora.slots)

    def _bind(self, tokens: int) -> list[Call]:
        if len(self._calls) >= MAX_BOUND_SIZES:
            self._calls.clear()
        self._calls[tokens] = [bind(tokens) for bind in self._binds]
        return self._calls[tokens]


def capacity_for(tokens: int) -> int:
    """Return the capacity of bound memory for this number of tokens."""
    return -(-tokens // CAPACITY_STEP) * CAPACITY_STEP


@dataclass(frozen=True)
class SegmentStage:
    """A compiled segment and what follows it."""

    session: Session
    read: tuple[Symbol, ...]
    made: tuple[Symbol, ...]
    boundaries: tuple[Boundary, ...]
    dead: tuple[Symbol, ...]  # not read by later stages


class Segments:
    """A decoder in compiled segments."""

    def __init__(self, trace: Trace, runtime: Runtime, *, whole: bool, held: bool = False) -> None:
        """Compile a trace.

        whole: the decoder itself will not run again, so its float matrices are freed, unless `held`.
        """
        segments, self._first, self._last = trace.segments, trace.first, trace.last
        self._adapter_slots, self._tables = trace.slots, trace.tables
        # tokens from which the decoder itself is faster
        self.too_many = NEVER if whole else dequantize_from(trace.quickly)
        scratch = Scratch()
        sources = [{boundary.source for boundary in segment.boundaries} for segment in segments]
        needed = [{*segment.read} | following for segment, following in zip(segments, sources, strict=True)] + [{self._last}]
        self._stages = []
        for i, segment in enumerate(segments):
            later = set().union(*needed[i + 1 :])
            made = [symbol for step in segment.steps for symbol in step.outputs]
            results = [symbol for symbol in made if symbol in later or symbol in sources[i]]
            session = _compile(segment, results, runtime, scratch)
            if whole and not held:
                _give_back(segment)
            dead = {*needed[i], *results} - later
            self._stages.append(
                SegmentStage(session, tuple(segment.read), tuple(results), tuple(segment.boundaries), tuple(dead))
            )
            segment.steps.clear()  # releases the matrices
        self._bound: BoundSegments | None = None  # for steps of few tokens

    def suit(self, batch: Batch) -> bool:
        """Return whether it is faster than the decoder. With many decode rows, faster products outweigh slower attention."""
        return len(batch.ids) < self.too_many or _are_single(batch)

    def know(self, adapters: LoRATokens) -> list[int]:
        """Return the adapter slots whose LoRA it adds."""
        return [] if self._tables is None else self._tables.supported(slot for slot, _ in adapters.groups)

    def find_rows(self, batch: Batch) -> list[int]:  # noqa: ARG002
        """Return no rows: none of a batch that does not suit are worth a separate run."""
        return []

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        """Return hidden states of x [T, columns]. The next call overwrites them."""
        if _are_single(batch) or (batch.logit_tokens is None and len(x) <= MAX_BOUND_TOKENS):
            if self._bound is None or not self._bound.suits(len(x)):
                self._bound = self._lay(len(x))
            return self._bound.run(x, batch)
        values = (
            {self._first: x} if self._adapter_slots is None else {self._first: x, self._adapter_slots: _adapter_slots_of(batch)}
        )
        for stage in self._stages:
            results = stage.session.run(*[values[symbol] for symbol in stage.read])
            values.update(zip(stage.made, results, strict=True))
            for boundary in stage.boundaries:
                values[boundary.target] = boundary.do(values[boundary.source], batch)
            for symbol in stage.dead:
                del values[symbol]
        return values[self._last]

    def _lay(self, rows: int) -> BoundSegments:
        memory = SegmentMemory(capacity_for(rows))
        values = {self._first: memory.take(self._first.columns)}
        source, stages, slots = values[self._first], [], None
        if self._adapter_slots is not None:
            slots = values[self._adapter_slots] = memory.take(1).zero_()
        for stage in self._stages:
            values.update((symbol, memory.take(symbol.columns)) for symbol in stage.made)
            bind = partial(_bind, stage.session, [values[s] for s in stage.read], [values[s] for s in stage.made])
            following = list[BoundAttention | BoundSum]()
            for boundary in stage.boundaries:
                if boundary.group is not None:
                    values[boundary.target] = memory.take(boundary.target.columns)
                    following.append(BoundSum(boundary.add, values[boundary.source], values[boundary.target]))
                elif boundary.attention is None:  # all tokens stay
                    values[boundary.target] = values[boundary.source]
                else:
                    values[boundary.target] = memory.take(boundary.target.columns)
                    following.append(BoundAttention(boundary.attention, values[boundary.source], values[boundary.target]))
            stages.append((bind, following))
            for symbol in stage.dead:
                matrix = values.pop(symbol)
                if all(matrix is not other for other in values.values()):
                    memory.give(matrix)
        return BoundSegments(source, values[self._last], stages, memory, slots)


def _are_single(batch: Batch) -> bool:
    """Return whether every row is one token and all are kept to the end."""
    return len(batch.ids) == len(batch.rows) and batch.logit_tokens is None


def _adapter_slots_of(batch: Batch) -> Tensor:
    """Return the adapter slot of each token, [T, 1] float32."""
    lora = batch.tokens.lora
    if lora is None:
        return torch.zeros(len(batch.ids), 1)
    return torch.from_numpy(lora.slots).float().unsqueeze(1)


def _bind(session: Session, inputs: Sequence[Tensor], outputs: Sequence[Tensor], rows: int) -> Call:
    """Bind the session to the first rows of these matrices."""
    return session.bind([matrix[:rows] for matrix in inputs], [matrix[:rows] for matrix in outputs])


def _give_back(segment: Segment) -> None:
    for step in segment.steps:
        if step.matrix is not None:
            step.matrix.give_back()


def _compile(segment: Segment, outputs: Sequence[Symbol], runtime: Runtime, scratch: Scratch) -> Session:
    graph = Graph(runtime)
    names = {symbol: graph.name() for symbol in segment.read}
    inputs = [(names[symbol], symbol.columns) for symbol in segment.read]
    for step in segment.steps:
        names.update(zip(step.outputs, step.emit(graph, [names[symbol] for symbol in step.inputs]), strict=True))
    results = [(names[symbol], symbol.columns) for symbol in outputs]
    return Session(graph, inputs, results, scratch=scratch)
