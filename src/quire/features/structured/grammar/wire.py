"""Messages between the engine process and the grammar process; the process, its socket and the memory of its masks."""

import contextlib
import mmap
import os
import signal
import socket
import subprocess
import weakref
from collections.abc import Callable

import msgspec
import numpy as np
import numpy.typing as npt

from quire.proc.channel import Channel
from quire.proc.messages import WireMessage, decoder
from quire.proc.messages import encode as encode
from quire.proc.spawn import ChildProcess, anonymous_memory, command_of, spawn
from quire.types.structured import StructuredOutputsParams

SPARE = "spare"  # option of a process that no request waits for yet
GIVES_WAY = "gives-way"  # option of a process that runs at low priority


# ---- to the grammar process


class StartWorker(WireMessage):
    """The first message: where the tokenizer is, and sizes of the model."""

    path: str
    tokenizer: str | None
    revision: str | None
    vocab_size: int
    eos_ids: list[int]
    rows: int  # maximum requests with masks in the shared memory
    drafts: int = 0  # draft tokens per request: each has a mask of its own
    backend: str = "guidance"  # or "xgrammar"


class Rules(msgspec.Struct, array_like=True, frozen=True):
    """The constraint of one request, and when its text may end."""

    params: StructuredOutputsParams
    ignore_eos: bool = False  # the text may end only when nothing else may follow
    min_tokens: int = 0  # it may not end earlier, unless nothing else may follow


class Open(WireMessage):
    """Make a request's matcher; the answer is GrammarOpened.

    row: of its mask in the shared memory; the masks after draft tokens follow it
    tokens: the text so far
    """

    id: int
    row: int
    rules: Rules
    tokens: list[int]


class Check(WireMessage):
    """Ask whether a constraint can be compiled; the answer is GrammarOpened."""

    id: int
    params: StructuredOutputsParams


class Accept(WireMessage):
    """Sampled tokens by matcher, and draft tokens after them.

    The answers are Accepted, and Masked when the masks after the tokens and after each draft token are written.
    """

    number: int
    tokens: list[tuple[int, list[int]]]
    drafts: list[tuple[int, list[int]]] = msgspec.field(default_factory=list)


class Close(WireMessage):
    ids: list[int]


# ---- from the grammar process


class WorkerStarted(WireMessage):
    """The first answer, unless the tokenizer cannot be read."""

    error: str | None  # why structured outputs are not supported with this model


class GrammarOpened(WireMessage):
    id: int
    error: str | None  # why the constraint cannot be compiled
    forced: list[int]  # the tokens that must come next


class Accepted(WireMessage):
    number: int
    forced: list[tuple[int, list[int]]]  # the only tokens that may come next, by matcher
    failed: list[tuple[int, str]]


class Masked(WireMessage):
    number: int
    failed: list[tuple[int, str]]
    # matchers that were slow before: CaughtUp follows for each of them
    deferred: list[int] = msgspec.field(default_factory=list)


class CaughtUp(WireMessage):
    """A deferred matcher has taken all tokens up to message `number`, and its masks are written."""

    id: int
    number: int
    forced: list[int]
    error: str | None


class Slow(WireMessage):
    """One turn of a matcher took this many seconds of processor time."""

    id: int
    seconds: float


Command = StartWorker | Open | Check | Accept | Close
Answer = WorkerStarted | GrammarOpened | Accepted | Masked | CaughtUp | Slow

decode_command: Callable[[bytes], Command] = decoder(Command)
decode_answer: Callable[[bytes], Answer] = decoder(Answer)


def key_of(params: StructuredOutputsParams) -> bytes:
    """Return a key that is equal for requests that can share a compiled grammar; `starts_after` is not part of it."""
    starts, params.starts_after = params.starts_after, None
    key = encode(params)
    params.starts_after = starts
    return key


# ---- starting the process

EXIT_TIMEOUT_S = 1.0  # for a process that closed its socket
OUTSIDE_SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # sent by other processes, never by a fault
COMMAND = command_of("quire.features.structured.grammar.worker")
SINGLE_THREADED = {"OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}  # the process forks
Words = npt.NDArray[np.uint32]


class Process:
    def __init__(self, start: StartWorker, words: int, spare: bool = False, gives_way: bool = False) -> None:
        """
        words: 32-bit words of a mask
        spare: no request waits for the process yet, so it runs at low priority while it starts
        gives_way: the process always runs at low priority
        """
        ours, theirs = socket.socketpair()
        with contextlib.ExitStack() as cleaning:
            cleaning.callback(theirs.close)
            rows = start.rows * (1 + start.drafts)
            memory = anonymous_memory("quire-masks", 4 * rows * words)
            cleaning.callback(os.close, memory)
            flags = [flag for flag, is_set in ((SPARE, spare), (GIVES_WAY, gives_way)) if is_set]
            shared = (theirs.fileno(), memory)
            self._child = spawn(COMMAND, ["{0}", "{1}", *flags], shared, settings=SINGLE_THREADED, with_thread=True)
            self.masks: Words = np.frombuffer(mmap.mmap(memory, 0), np.uint32).reshape(rows, words)
        self.pid = self._child.pid
        self.started = False  # WorkerStarted was received
        self.mailbox = Channel(ours)  # never blocks: a stopped process does not read
        self.end = weakref.finalize(self, _end, self._child, ours)
        self.mailbox.send(encode(start))

    def killed_from_outside(self) -> bool:
        """Return whether another process ended this one. Must be called before `end`, which kills it."""
        try:
            return -self._child.wait(EXIT_TIMEOUT_S) in OUTSIDE_SIGNALS
        except subprocess.TimeoutExpired:
            return False


def _end(child: ChildProcess, connection: socket.socket) -> int:
    """Kill the process and return its exit status, as `Popen.returncode`."""
    connection.close()
    child.kill()
    return child.wait()
