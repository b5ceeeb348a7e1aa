"""The grammar process: `python -m quire.features.structured.grammar.worker SOCKET MEMORY [with-thread] [spare] [gives-way]`.

SOCKET and MEMORY are inherited file descriptors. The process holds a matcher for every open request, takes in sampled tokens
and writes the masks of the next ones into the shared memory. A thread compiles new grammars after they were vetted, so the loop
keeps answering. The process ends when the engine closes the socket.

A matcher that was slow before is deferred: its tokens wait until all received commands are answered. Then the deferred matcher
that has used the least processor time gets one turn, before the next commands are read. So other matchers wait for at most one
slow mask.
"""

import contextlib
import mmap
import os
import selectors
import signal
import socket
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from quire.features.structured.grammar import wire
from quire.features.structured.grammar.backend import GrammarBackend, GrammarError, Matcher
from quire.features.structured.grammar.vetting import VettingJob, decode_verdict, encode, start_vetting
from quire.files.resolve import resolve_model
from quire.files.threads import lower_priority
from quire.proc.channel import Frames
from quire.proc.spawn import set_up
from quire.text.tokenizer_files import read_tokenizer

MAX_KEPT = 256  # compiled grammars
MAX_KEPT_BYTES = 32 << 20  # of their texts
MAX_REFUSED = 4096
SLOW = 0.005  # seconds of processor time for one matcher's turn, from which on it is reported to the engine
SLOW_TOGETHER = 0.01  # by the clock, for all masks of a turn: from then on each is measured
WATCHED_TURNS = 32
LONGEST_WORK = 30  # seconds for one matcher, then the process ends: its engine may have lost interest in it
COMPILE_STACK = 64 << 20  # more than a trial has
ALL = np.uint32(0xFFFFFFFF)
Words = npt.NDArray[np.uint32]


class CompiledGrammars:
    """Compiled grammars by content, the most recently used ones, and what was found wrong with others."""

    def __init__(self) -> None:
        self._good: OrderedDict[bytes, Matcher] = OrderedDict()
        self._bad: OrderedDict[bytes, str] = OrderedDict()
        self._bytes = 0

    def get(self, key: bytes) -> Matcher | str | None:
        if key in self._good:
            self._good.move_to_end(key)
            return self._good[key]
        return self._bad.get(key)

    def keep(self, key: bytes, outcome: Matcher | str) -> None:
        if isinstance(outcome, str):
            self._bad[key] = outcome
            if len(self._bad) > MAX_REFUSED:
                self._bad.popitem(last=False)
            return
        self._good[key] = outcome
        self._bytes += len(key)
        while len(self._good) > MAX_KEPT or (self._bytes > MAX_KEPT_BYTES and len(self._good) > 1):
            self._bytes -= len(self._good.popitem(last=False)[0])


@dataclass
class Live:
    """One request: its matcher, and the tail of its tokens while it waits for the ones that start its grammar."""

    matcher: Matcher
    row: int
    rules: wire.Rules
    sampled: int = 0
    matched: int = 0  # those of them that the matcher has seen
    slow: float = 0.0  # seconds of processor time of its slow turns
    tail: list[int] | None = field(init=False)  # None: the grammar holds

    def __post_init__(self) -> None:
        self.tail = None if self.rules.params.starts_after is None else []

    def accept(self, tokens: Sequence[int]) -> None:
        self.sampled += len(tokens)
        for i, token in enumerate(tokens):
            if self.tail is None:
                self.matched += len(tokens) - i
                self.matcher.accept(tokens[i:])
                return
            starts = self.rules.params.starts_after or []
            self.tail = [*self.tail, token][-len(starts) :]
            if self.tail == starts:
                self.tail = None

    def along(self, drafts: Sequence[int]) -> Iterator[None]:
        """Goes on with one draft after the other, as far as they are allowed, and back to where it was."""
        sampled, matched, tail = self.sampled, self.matched, self.tail
        for draft in drafts:
            if self.tail is None and not self.matcher.valid([draft]):
                break
            self.accept([draft])
            yield
        self.matcher.rollback(self.matched - matched)
        self.sampled, self.matched, self.tail = sampled, matched, tail

    def forced(self, eos_ids: Sequence[int]) -> list[int]:
        if self.tail is not None:
            return []
        return [eos_ids[0]] if self.matcher.done else self.matcher.forced()

    @property
    def may_not_end(self) -> bool:
        """Is the end of the text forbidden where the grammar alone would allow it?"""
        return (self.rules.ignore_eos or self.sampled < self.rules.min_tokens) and not self.matcher.done


@dataclass
class Deferred:
    """What a matcher that was slow before has to catch up with."""

    number: int  # of the latest message
    tokens: list[int]
    drafts: list[int]


class GrammarWorker:
    def __init__(self, frames: Frames, masks: Words, backend: GrammarBackend) -> None:
        """masks [rows, words]."""
        self._frames, self._masks, self._backend = frames, masks, backend
        self._kept = CompiledGrammars()
        self._live: dict[int, Live] = {}
        self._deferred: dict[int, Deferred] = {}
        self._waiting: dict[bytes, list[wire.Open | wire.Check]] = {}  # for a grammar that is being tried or compiled
        self._jobs: dict[int, bytes] = {}
        self._numbers = 0
        self._watched = 0  # turns in which masks are made one by one
        ends = np.zeros(backend.words, np.uint32)
        for token in backend.eos_ids:
            ends[token // 32] |= np.uint32(1 << token % 32)
        self._not_ends = ~ends  # [words]
        self._end = np.zeros(backend.words, np.uint32)  # the end that `Live.forced` reports
        self._end[backend.eos_ids[0] // 32] = np.uint32(1 << backend.eos_ids[0] % 32)
        self._vetting = start_vetting(backend, frames.socket)
        threading.stack_size(COMPILE_STACK)
        self._compiler = ThreadPoolExecutor(1, thread_name_prefix="compiler")
        self._done: list[tuple[bytes, Matcher | str]] = []
        self._bell, self._ring = socket.socketpair()

    def run(self) -> None:
        self._obey()  # what came together with the first frame
        with selectors.DefaultSelector() as selector:
            for source, act in (
                (self._frames.socket, self._take_commands),
                (self._vetting.socket, self._take_verdicts),
                (self._bell, self._take_compiled),
            ):
                selector.register(source, selectors.EVENT_READ, act)
            while all(key.data() for key, _ in selector.select(0 if self._deferred else None)):
                self._catch_up()
                signal.alarm(0)

    def _take_commands(self) -> bool:
        alive = self._frames.receive()
        self._obey()
        return alive

    def _obey(self) -> None:
        while (frame := self._frames.next()) is not None:
            signal.alarm(LONGEST_WORK)
            match wire.decode_command(frame):
                case wire.Accept() as command:
                    self._accept(command)
                case wire.Open() | wire.Check() as command:
                    self._want(command)
                case wire.Close(ids):
                    self._close(ids)
                case wire.StartWorker():
                    raise RuntimeError("a grammar process is started only once")

    def _close(self, ids: Sequence[int]) -> None:
        for number in ids:
            self._deferred.pop(number, None)
            if self._live.pop(number, None) is None:
                for commands in self._waiting.values():
                    commands[:] = [command for command in commands if command.id != number]

    # ---- tokens in, masks out

    def _accept(self, command: wire.Accept) -> None:
        good: list[tuple[int, Live]] = []
        forced: list[tuple[int, list[int]]] = []
        failed: list[tuple[int, str]] = []
        deferred, drafted = list[int](), dict(command.drafts)
        for number, tokens in command.tokens:
            live = self._live.get(number)
            if live is not None and live.slow:
                self._defer(number, command.number, tokens, drafted.pop(number, []))
                deferred.append(number)
            elif live is not None:
                began = time.thread_time()
                live.accept(tokens)
                if (error := live.matcher.error) is not None:
                    failed.append((number, error))
                else:
                    good.append((number, live))
                    if must := live.forced(self._backend.eos_ids):
                        forced.append((number, must))
                self._measure(number, live, began)
        self._send(wire.Accepted(command.number, forced, failed))
        self._fill_all(good)
        for number, drafts in drafted.items():
            if (live := self._live.get(number)) is not None and live.matcher.error is None:
                began = time.thread_time()
                self._fill_along(live, drafts)
                self._measure(number, live, began)
        lost = [(number, error) for number, live in good if (error := live.matcher.error) is not None]
        self._send(wire.Masked(command.number, lost, deferred))

    def _defer(self, number: int, message: int, tokens: list[int], drafts: list[int]) -> None:
        before = self._deferred.get(number)
        self._deferred[number] = Deferred(message, [*before.tokens, *tokens] if before else tokens, drafts)

    def _catch_up(self) -> None:
        """Give a turn to the deferred matcher that has used the least processor time."""
        if not self._deferred:
            return
        number = min(self._deferred, key=lambda number: self._live[number].slow)
        late, live = self._deferred.pop(number), self._live[number]
        signal.alarm(LONGEST_WORK)
        began = time.thread_time()
        live.accept(late.tokens)
        forced: list[int] = []
        if live.matcher.error is None:
            forced = live.forced(self._backend.eos_ids)
            self._fill([(live, live.row)])
            if live.matcher.error is None and late.drafts:
                self._fill_along(live, late.drafts)
        self._measure(number, live, began)
        self._send(wire.CaughtUp(number, late.number, forced, live.matcher.error))

    def _measure(self, number: int, live: Live, began: float) -> None:
        seconds = time.thread_time() - began
        if seconds > SLOW:
            live.slow += seconds
            self._send(wire.Slow(number, seconds))
            signal.alarm(LONGEST_WORK)

    def _fill_all(self, good: list[tuple[int, Live]]) -> None:
        """Fill all masks together while that is fast. Only masks that are filled one by one show which matcher is slow."""
        if self._watched or len(good) == 1:
            self._watched = max(0, self._watched - 1)
            for number, live in good:
                began = time.thread_time()
                self._fill([(live, live.row)])
                self._measure(number, live, began)
        else:
            began = time.monotonic()
            self._fill([(live, live.row) for _, live in good])
            if time.monotonic() - began > SLOW_TOGETHER:
                self._watched = WATCHED_TURNS

    def _fill_along(self, live: Live, drafts: Sequence[int]) -> None:
        """Fill the masks after each draft. After a draft that is not allowed any mask will do: no token is sampled with it."""
        self._masks[live.row + 1 : live.row + 1 + len(drafts)] = ALL
        for after, _ in enumerate(live.along(drafts), live.row + 1):
            self._fill([(live, after)])

    def _fill(self, places: Sequence[tuple[Live, int]]) -> None:
        bound = [(live.matcher, row) for live, row in places if live.tail is None]
        if bound:
            self._backend.fill(bound, self._masks.ctypes.data, len(self._masks))
        for live, place in places:
            row = self._masks[place]
            if live.tail is not None:
                row[:] = ALL
            elif live.matcher.done:
                row[:] = self._end
            if live.may_not_end:
                shortened = row & self._not_ends
                if shortened.any():
                    row[:] = shortened

    # ---- new grammars

    def _want(self, command: wire.Open | wire.Check) -> None:
        params = command.rules.params if isinstance(command, wire.Open) else command.params
        key = wire.key_of(params)
        outcome = self._kept.get(key)
        if outcome is not None:
            self._serve(command, outcome)
        elif key in self._waiting:
            self._waiting[key].append(command)
        else:
            self._waiting[key] = [command]
            self._numbers += 1
            self._jobs[self._numbers] = key
            self._vetting.send(encode(VettingJob(self._numbers, params)))

    def _take_verdicts(self) -> bool:
        if not self._vetting.receive():
            signal.raise_signal(signal.SIGTERM)  # it was killed, and the engine is to see this process as killed too
        while (frame := self._vetting.next()) is not None:
            verdict = decode_verdict(frame)
            key = self._jobs.pop(verdict.id)
            if verdict.error is not None:
                self._settle(key, verdict.error)
            else:
                self._compiler.submit(self._compile, key, verdict.source)
        return True

    def _compile(self, key: bytes, source: str) -> None:
        """In the compiler's thread."""
        outcome: Matcher | str
        try:
            outcome = self._backend.load(source)
        except GrammarError as error:
            outcome = str(error)
        self._done.append((key, outcome))
        self._ring.send(b"!")

    def _take_compiled(self) -> bool:
        self._bell.recv(4096)
        while self._done:
            self._settle(*self._done.pop(0))
        return True

    def _settle(self, key: bytes, outcome: Matcher | str) -> None:
        self._kept.keep(key, outcome)
        for command in self._waiting.pop(key):
            self._serve(command, outcome)

    def _serve(self, command: wire.Open | wire.Check, outcome: Matcher | str) -> None:
        if isinstance(outcome, str) or isinstance(command, wire.Check):
            self._send(wire.GrammarOpened(command.id, outcome if isinstance(outcome, str) else None, []))
            return
        live = self._live[command.id] = Live(outcome.copy(), command.row, command.rules)
        signal.alarm(LONGEST_WORK)
        began = time.thread_time()
        live.accept(command.tokens)
        self._fill([(live, live.row)])
        self._measure(command.id, live, began)
        error = live.matcher.error
        self._send(wire.GrammarOpened(command.id, error, [] if error else live.forced(self._backend.eos_ids)))

    def _send(self, answer: wire.Answer) -> None:
        self._frames.send(wire.encode(answer))


def open_backend(start: wire.StartWorker) -> GrammarBackend:
    path = Path(start.path)
    if start.tokenizer is not None:
        path = resolve_model(start.tokenizer, revision=start.revision, weights=False).path
    tokenizer = read_tokenizer(path)
    own = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    ends = [token for token in dict.fromkeys([*own, *start.eos_ids]) if 0 <= token < start.vocab_size]
    if start.backend == "xgrammar":
        from quire.features.structured.grammar.xgrammar import XGrammar

        return XGrammar(tokenizer, start.vocab_size, ends)
    from quire.features.structured.grammar.llguidance import LLGuidance

    return LLGuidance(tokenizer, start.vocab_size, ends)


def open_spare(start: wire.StartWorker) -> GrammarBackend:
    """The same by a thread that gives way to others: a process that does cannot go back."""
    with ThreadPoolExecutor(1, initializer=lower_priority) as opener:
        return opener.submit(open_backend, start).result()


def main(argv: Sequence[str]) -> int:
    connection, shared, *options = argv
    set_up("grammar", options, descriptors=[connection, shared])
    if wire.GIVES_WAY in options:
        lower_priority()
    frames = Frames(socket.socket(fileno=int(connection)))
    if (frame := frames.wait()) is None:
        return 0
    start = wire.decode_command(frame)
    assert isinstance(start, wire.StartWorker), start
    try:
        backend = (open_spare if wire.SPARE in options else open_backend)(start)
    except GrammarError as error:
        frames.send(wire.encode(wire.WorkerStarted(str(error))))
        return 0
    rows = start.rows * (1 + start.drafts)
    memory = mmap.mmap(int(shared), 4 * rows * backend.words)
    os.close(int(shared))
    masks: Words = np.frombuffer(memory, np.uint32).reshape(rows, backend.words)
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the engine is gone
        worker = GrammarWorker(frames, masks, backend)
        frames.send(wire.encode(wire.WorkerStarted(None)))
        worker.run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
