"""A decoder of float32 numbers on a CPU, compiled in pieces: what is between two attentions or sums over ranks (`trace.py`) is
one call, of Quire's own kernels or of OpenVINO. Steps in which every row is one token, or one and its drafts, run on memory
that stays (`bound_segments.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from quire.attn.batch import Batch, LoRATokens
from quire.device.cpu.autotune import NEVER, dequantize_from
from quire.device.cpu.bound_segments import BoundAttention, BoundSegments, BoundSum, Memory, room_for
from quire.device.cpu.graph import Graph, Runtime
from quire.device.cpu.program import Scratch
from quire.device.cpu.session import Call, Session
from quire.device.cpu.trace import Between, Piece, Symbol, Trace

MOST_BOUND = 64  # tokens of a step whose rows have several, on memory that stays


@dataclass(frozen=True)
class Stage:
    """A compiled piece, and what comes behind it."""

    session: Session
    read: tuple[Symbol, ...]
    made: tuple[Symbol, ...]
    behind: tuple[Between, ...]
    dead: tuple[Symbol, ...]  # nobody reads them any more


class Segments:
    def __init__(self, trace: Trace, runtime: Runtime, *, whole: bool, held: bool = False) -> None:
        """`whole`: the decoder will not be run itself any more, and what it holds in matrices of floats is given back, unless
        it is `held` nevertheless."""
        pieces, self._first, self._last = trace.pieces, trace.first, trace.last
        self._places, self._tables = trace.places, trace.tables
        # tokens: from there on the decoder itself is faster
        self.too_many = NEVER if whole else dequantize_from(trace.quickly)
        scratch = Scratch()
        sources = [{between.source for between in piece.behind} for piece in pieces]
        wanted = [{*piece.read} | behind for piece, behind in zip(pieces, sources, strict=True)] + [{self._last}]
        self._stages = []
        for i, piece in enumerate(pieces):
            later = set().union(*wanted[i + 1 :])
            made = [symbol for step in piece.steps for symbol in step.outputs]
            kept = [symbol for symbol in made if symbol in later or symbol in sources[i]]
            session = _compile(piece, kept, runtime, scratch)
            if whole and not held:
                _give_back(piece)
            dead = {*wanted[i], *kept} - later
            self._stages.append(Stage(session, tuple(piece.read), tuple(kept), tuple(piece.behind), tuple(dead)))
            piece.steps.clear()  # they hold matrices, and symbols hold them
        self._track: BoundSegments | None = None  # for steps of few tokens

    def suit(self, batch: Batch) -> bool:
        """Are they faster than the body? With many rows of one token the body loses in attention what it gains in products."""
        return len(batch.ids) < self.too_many or _are_single(batch)

    def know(self, adapters: LoRATokens) -> list[int]:
        """The places of those whose additions they make."""
        return [] if self._tables is None else self._tables.have(place for place, _ in adapters.groups)

    def find_rows(self, batch: Batch) -> list[int]:  # noqa: ARG002
        """Of a batch that does not suit, none are worth a run of their own."""
        return []

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        """x [T, columns] -> hidden states; they are overwritten by the next call."""
        if _are_single(batch) or (batch.kept is None and len(x) <= MOST_BOUND):
            if self._track is None or not self._track.suits(len(x)):
                self._track = self._lay(len(x))
            return self._track.run(x, batch)
        values = {self._first: x} if self._places is None else {self._first: x, self._places: _places_of(batch)}
        for stage in self._stages:
            results = stage.session.run(*[values[symbol] for symbol in stage.read])
            values.update(zip(stage.made, results, strict=True))
            for between in stage.behind:
                values[between.target] = between.do(values[between.source], batch)
            for symbol in stage.dead:
                del values[symbol]
        return values[self._last]

    def _lay(self, rows: int) -> BoundSegments:
        memory = Memory(room_for(rows))
        values = {self._first: memory.take(self._first.columns)}
        source, stages, places = values[self._first], [], None
        if self._places is not None:
            places = values[self._places] = memory.take(1).zero_()
        for stage in self._stages:
            values.update((symbol, memory.take(symbol.columns)) for symbol in stage.made)
            bind = partial(_bind, stage.session, [values[s] for s in stage.read], [values[s] for s in stage.made])
            behind = list[BoundAttention | BoundSum]()
            for between in stage.behind:
                if between.group is not None:
                    values[between.target] = memory.take(between.target.columns)
                    behind.append(BoundSum(between.add, values[between.source], values[between.target]))
                elif between.attention is None:  # all tokens are kept
                    values[between.target] = values[between.source]
                else:
                    values[between.target] = memory.take(between.target.columns)
                    behind.append(BoundAttention(between.attention, values[between.source], values[between.target]))
            stages.append((bind, behind))
            for symbol in stage.dead:
                matrix = values.pop(symbol)
                if all(matrix is not other for other in values.values()):
                    memory.give(matrix)
        return BoundSegments(source, values[self._last], stages, memory, places)


def _are_single(batch: Batch) -> bool:
    """Are its rows of one token, and do all go on to the end?"""
    return len(batch.ids) == len(batch.rows) and batch.kept is None


def _places_of(batch: Batch) -> Tensor:
    """[T, 1] float32: of each token's adapter."""
    lora = batch.tokens.lora
    if lora is None:
        return torch.zeros(len(batch.ids), 1)
    return torch.from_numpy(lora.places).float().unsqueeze(1)


def _bind(session: Session, inputs: Sequence[Tensor], outputs: Sequence[Tensor], rows: int) -> Call:
    """The session at work on the first rows of these matrices."""
    return session.bind([matrix[:rows] for matrix in inputs], [matrix[:rows] for matrix in outputs])


def _give_back(piece: Piece) -> None:
    for step in piece.steps:
        if step.matrix is not None:
            step.matrix.give_back()


def _compile(piece: Piece, outputs: Sequence[Symbol], runtime: Runtime, scratch: Scratch) -> Session:
    graph = Graph(runtime)
    names = {symbol: graph.name() for symbol in piece.read}
    inputs = [(names[symbol], symbol.columns) for symbol in piece.read]
    for step in piece.steps:
        names.update(zip(step.outputs, step.emit(graph, [names[symbol] for symbol in step.inputs]), strict=True))
    results = [(names[symbol], symbol.columns) for symbol in outputs]
    return Session(graph, inputs, results, scratch=scratch)
