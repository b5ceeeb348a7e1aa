"""The engine's side of structured outputs: who has a grammar, which tokens they must take, and masks of those they may.

The grammar process runs beside the engine: tokens are told as they are known, masks are read when they are needed, and what is
in between costs the engine nothing. If that process is lost, its requests end with an error and the next one starts another.
"""

import contextlib
import mmap
import os
import select
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from quire.grammar import wire
from quire.subprocesses import environment
from quire.types.errors import EngineError, InvalidParameter
from quire.types.request import EngineRequest
from quire.types.structured import FIELD, StructuredOutputsParams

COMMAND = (sys.executable, "-P", "-m", "quire.grammar.worker")
LONGEST_STEP = 5.0  # seconds until an answer to sampled tokens is given up
LONGEST_CHECK = 60.0  # the same for a grammar: the process may have to start, and others may be tried before it
ROWS = 4096  # of masks: requests with a grammar at a time; the others wait
LOST = "the grammar process was lost; the request can be sent again"
ALL = 0xFFFFFFFF
Words = npt.NDArray[np.uint32]


@dataclass
class News:
    """What the grammar process has said since it was last asked."""

    ready: list[str] = field(default_factory=list)  # their masks are there
    refused: list[tuple[str, str]] = field(default_factory=list)  # what is wrong with their grammar
    failed: list[tuple[str, str]] = field(default_factory=list)  # what went wrong later


@dataclass(eq=False)
class _Open:
    name: str
    row: int = -1  # -1: no row is free yet
    told: int = 0  # the number of the message with its latest tokens


class Grammars:
    def __init__(self, path: str, tokenizer: str | None, revision: str | None, vocab_size: int, eos_ids: Iterable[int]) -> None:
        self.words = -(-vocab_size // 32)
        self._start = wire.Start(path, tokenizer, revision, vocab_size, sorted(eos_ids), ROWS)
        self._process: _Process | None = None
        self._rows = list(range(ROWS - 1, -1, -1))
        self._open: dict[str, int] = {}
        self._by_number: dict[int, _Open] = {}
        self._queue: list[tuple[int, EngineRequest]] = []  # no row is free for them
        self._numbers = self._sent = self._accepted = self._masked = 0
        self._tokens: dict[int, list[int]] = {}  # to be told
        self._news = News()
        self._forced: dict[int, list[int]] = {}
        self._verdicts: dict[int, wire.Opened | None] = {}  # None: it is awaited

    def __contains__(self, name: str) -> bool:
        return name in self._open

    def __len__(self) -> int:
        return len(self._open)

    # ---- coming and going

    def open(self, request: EngineRequest) -> None:
        """News will say that it is ready, or what is wrong."""
        self._numbers += 1
        self._open[request.id] = self._numbers
        self._by_number[self._numbers] = _Open(request.id)
        self._queue.append((self._numbers, request))
        self._send_queue()

    def close(self, name: str) -> None:
        number = self._open.pop(name, None)
        if number is None:
            return
        entry = self._by_number.pop(number)
        self._forced.pop(number, None)
        if entry.row < 0:
            self._queue = [item for item in self._queue if item[0] != number]
            return
        self._rows.append(entry.row)
        self._tokens.pop(number, None)
        self._send(wire.Close([number]))
        self._send_queue()

    def check(self, params: StructuredOutputsParams) -> None:
        """Waits until it is known whether this can be compiled. Raises InvalidParameter if not."""
        self._numbers += 1
        self._verdicts[self._numbers] = None
        self._spawn()
        self._send(wire.Check(self._numbers, params))
        deadline = time.monotonic() + LONGEST_CHECK
        while self._verdicts[self._numbers] is None and time.monotonic() < deadline and self._read(deadline - time.monotonic()):
            pass
        verdict = self._verdicts.pop(self._numbers)
        if verdict is None:
            raise EngineError(LOST)
        if verdict.error is not None:
            raise refusal(verdict.error)

    def stop(self) -> None:
        if self._process is not None:
            self._process.end()
            self._process = None

    # ---- the loop

    def tell(self, name: str, tokens: Sequence[int]) -> None:
        """The request goes on with these tokens; `send` sends all that was told."""
        number = self._open.get(name)
        if number is not None and tokens:
            self._forced.pop(number, None)
            self._by_number[number].told = self._sent + 1
            self._tokens.setdefault(number, []).extend(tokens)

    def send(self) -> None:
        if self._tokens:
            tokens, self._tokens = self._tokens, {}
            self._sent += 1
            self._send(wire.Accept(self._sent, list(tokens.items())))

    def wait(self, seconds: float) -> None:
        """Until there is something to hear, or for so long."""
        self._read(seconds)

    def news(self) -> News:
        """What came since the last time."""
        self._read(0.0)
        news, self._news = self._news, News()
        return news

    def settle(self) -> None:
        """Waits until `forced` is up to date."""
        self._wait(lambda: self._accepted >= self._sent)

    def forced(self) -> list[tuple[str, list[int]]]:
        """The requests that have no choice, and the tokens they must take."""
        return [(self._by_number[number].name, tokens) for number, tokens in self._forced.items()]

    def settle_masks(self) -> None:
        """Waits until the masks are up to date."""
        self._wait(lambda: self._masked >= self._sent)

    def masks(self, names: Sequence[str]) -> Words:
        """[names, words] the tokens that may come next. All may where a request has no grammar any more."""
        out: Words = np.full((len(names), self.words), ALL, np.uint32)
        for i, name in enumerate(names):
            number = self._open.get(name)
            if number is not None and self._process is not None:
                out[i] = self._process.masks[self._by_number[number].row]
        return out

    # ---- the process

    def _send_queue(self) -> None:
        if self._queue:
            self._spawn()
        while self._queue and self._rows:
            number, request = self._queue.pop(0)
            row = self._by_number[number].row = self._rows.pop()
            params = request.params
            assert params.structured_outputs is not None
            rules = wire.Rules(params.structured_outputs, params.ignore_eos, params.min_tokens)
            self._send(wire.Open(number, row, rules, list(request.resumed)))

    def _spawn(self) -> None:
        if self._process is None:
            self._process = _Process(self._start, self.words)

    def _send(self, command: wire.Command) -> None:
        """A process that is not there needs no command: what it knew is lost, and said to be."""
        if self._process is not None:
            try:
                self._process.frames.send(wire.encode(command))
            except OSError:
                self._lose()

    def _wait(self, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LONGEST_STEP
        while not done() and self._process is not None:
            left = deadline - time.monotonic()
            if left <= 0:
                self._lose()
            else:
                self._read(left)

    def _read(self, wait: float) -> bool:
        """Takes in what there is, waiting for up to `wait` seconds. False: the process is gone."""
        process = self._process
        if process is None:
            return False
        if not select.select([process.frames.socket], [], [], max(0.0, wait))[0]:
            return True
        try:
            alive = process.frames.receive()
        except OSError:
            alive = False
        while (frame := process.frames.next()) is not None:
            self._hear(wire.decode_answer(frame))
        if not alive:
            self._lose()
        return alive

    def _hear(self, answer: wire.Answer) -> None:
        match answer:
            case wire.Opened(number, error, forced):
                entry = self._by_number.get(number)
                if number in self._verdicts:
                    self._verdicts[number] = answer
                elif entry is not None and error is not None:
                    self._news.refused.append((entry.name, error))
                elif entry is not None:
                    self._force([(number, forced)], 0)
                    self._news.ready.append(entry.name)
            case wire.Accepted(number, forced, failed):
                self._accepted = number
                self._force(forced, number)
                self._fail(failed)
            case wire.Masked(number, failed):
                self._masked = number
                self._fail(failed)

    def _force(self, forced: Iterable[tuple[int, list[int]]], message: int) -> None:
        """What message `message` led to is of no interest for those that have gone on since."""
        for number, tokens in forced:
            entry = self._by_number.get(number)
            if tokens and entry is not None and entry.told <= message:
                self._forced[number] = tokens

    def _fail(self, failed: Iterable[tuple[int, str]]) -> None:
        for number, error in failed:
            if number in self._by_number:
                self._news.failed.append((self._by_number[number].name, f"structured outputs: {error}"))

    def _lose(self) -> None:
        """The process is gone or hangs."""
        self.stop()
        self._fail((number, LOST) for number in self._by_number)
        self._queue, self._tokens, self._forced = [], {}, {}
        self._accepted = self._masked = self._sent


def refusal(error: str) -> InvalidParameter:
    return InvalidParameter(f"{FIELD}: {error}", FIELD)


class _Process:
    """The process, the socket and the memory it shares with us."""

    def __init__(self, start: wire.Start, words: int) -> None:
        ours, theirs = socket.socketpair()
        with contextlib.ExitStack() as cleaning:
            cleaning.callback(theirs.close)
            memory = _shared_memory(4 * start.rows * words)
            cleaning.callback(os.close, memory)
            handed = (theirs.fileno(), memory)
            self._process = subprocess.Popen(
                [*COMMAND, *map(str, handed)], pass_fds=handed, stdin=subprocess.DEVNULL, env=_environment(), process_group=0
            )
            self.masks: Words = np.frombuffer(mmap.mmap(memory, 0), np.uint32).reshape(start.rows, words)
        self.frames = wire.Frames(ours)
        self.end = weakref.finalize(self, _end, self._process, ours)
        self.frames.send(wire.encode(start))


def _environment() -> dict[str, str]:
    """It forks, so it had better not have threads that it does not need."""
    return {**(environment() or os.environ), "OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


def _end(process: "subprocess.Popen[bytes]", connection: socket.socket) -> None:
    connection.close()
    process.kill()
    process.wait()


def _shared_memory(size: int) -> int:
    """A file without a name. What was never written takes no memory."""
    if hasattr(os, "memfd_create"):
        memory = os.memfd_create("quire-masks")
    else:
        with tempfile.TemporaryFile() as file:
            memory = os.dup(file.fileno())
    os.ftruncate(memory, size)
    return memory
