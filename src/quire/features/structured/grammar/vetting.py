"""Every new grammar is tried in a child process first, which may run out of time, memory or stack without anyone noticing.

The vetting process is forked from the grammar process while that has a single thread, and forks a child for each grammar: the
tokenizer is shared, nothing has to be sent. A child compiles the grammar and walks through it for some tokens. What passes is
compiled once more by the grammar process, which then knows how long it takes at most; the translation is not done again.
"""

import os
import random
import resource
import selectors
import signal
import socket
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from quire.features.structured.grammar.backend import GrammarBackend, GrammarError
from quire.features.structured.grammar.schema import Place, pointer, subschemas
from quire.proc.channel import Frames
from quire.proc.spawn import end_with_parent, processor_time
from quire.types.errors import InvalidParameter
from quire.types.structured import StructuredOutputsParams, read_object

MAX_SECONDS = 1.5  # of a trial, unless others keep it from running:
LEAST_WORK = 1.0  # seconds of processor time that it gets in any case, looked at that often:
LOOK = 0.3
LONGEST_TRIAL = 10.0  # seconds, however little it ran
MAX_STEP_SECONDS = 0.1  # of processor time, for one mask
MAX_BYTES = 512 << 20  # that a trial may take beyond what there is
MAX_TRIALS = 4  # at a time
LONGEST_WALK = 32  # tokens
LONGEST_MESSAGE = 1000
NICENESS = 5
GOOD = b"\0"  # before a source

TOO_SLOW = f"the grammar is too complex: it could not be compiled within {MAX_SECONDS:g} s"
TOO_DEEP = f"the grammar is too complex: compiling it took more than {MAX_BYTES >> 20} MiB or too deep a recursion"
TOO_SLOW_STEP = f"the grammar is too complex: finding the tokens that may come next takes more than {MAX_STEP_SECONDS:g} s"


class VettingJob(msgspec.Struct, array_like=True):
    id: int
    params: StructuredOutputsParams


class Verdict(msgspec.Struct, array_like=True):
    id: int
    error: str | None
    source: str = ""  # what the backend has to load


encode = msgspec.msgpack.Encoder().encode
_decode_job = msgspec.msgpack.Decoder(VettingJob).decode
decode_verdict = msgspec.msgpack.Decoder(Verdict).decode


def start_vetting(backend: GrammarBackend, private: socket.socket) -> Frames:
    """Forks the vetting process; -> the connection to it. It ends when that is closed. It has no part in `private`."""
    ours, theirs = socket.socketpair()
    if os.fork():
        theirs.close()
        return Frames(ours)
    try:
        end_with_parent()
        ours.close()
        private.close()
        os.nice(NICENESS)
        _Vetting(backend, Frames(theirs)).run()
    finally:
        os._exit(0)


@dataclass
class _Trial:
    job: int
    pid: int
    begun: float
    news: bytes = b""

    def __post_init__(self) -> None:
        self.deadline = self.begun + MAX_SECONDS

    def goes_on(self) -> bool:
        """Beyond its deadline, because it could hardly run: the machine is busy."""
        now = time.monotonic()
        self.deadline = min(now + LOOK, self.begun + LONGEST_TRIAL)
        worked = processor_time(self.pid)
        return now < self.begun + LONGEST_TRIAL and worked is not None and worked < LEAST_WORK


class _Vetting:
    def __init__(self, backend: GrammarBackend, frames: Frames) -> None:
        self._backend, self._frames = backend, frames
        self._waiting: deque[VettingJob] = deque()
        self._trials: dict[int, _Trial] = {}  # by the pipe its child writes to
        self._selector = selectors.DefaultSelector()
        self._selector.register(frames.socket, selectors.EVENT_READ)

    def run(self) -> None:
        while True:
            deadline = min((trial.deadline for trial in self._trials.values()), default=None)
            wait = None if deadline is None else max(0.0, deadline - time.monotonic())
            for key, _ in self._selector.select(wait):
                if key.fileobj is self._frames.socket:
                    if not self._frames.receive():
                        return self._end_all()
                    while (frame := self._frames.next()) is not None:
                        self._waiting.append(_decode_job(frame))
                else:
                    self._hear(key.fd)
            for pipe, trial in list(self._trials.items()):
                if trial.deadline <= time.monotonic() and not trial.goes_on():
                    os.kill(trial.pid, signal.SIGKILL)
                    self._close(pipe, TOO_SLOW)
            while self._waiting and len(self._trials) < MAX_TRIALS:
                self._begin(self._waiting.popleft())

    def _begin(self, job: VettingJob) -> None:
        reading, writing = os.pipe()
        pid = os.fork()
        if not pid:
            try:
                end_with_parent()
                os.close(reading)
                _limit_memory()
                with os.fdopen(writing, "wb") as pipe:
                    pipe.write(try_out(self._backend, job.params))
            finally:
                os._exit(0)
        os.close(writing)
        self._trials[reading] = _Trial(job.id, pid, time.monotonic())
        self._selector.register(reading, selectors.EVENT_READ)

    def _hear(self, pipe: int) -> None:
        news = os.read(pipe, 1 << 16)
        if news:
            self._trials[pipe].news += news
            return
        verdict = self._trials[pipe].news
        if verdict.startswith(GOOD):
            self._close(pipe, None, verdict[len(GOOD) :].decode())
        else:
            self._close(pipe, verdict.decode(errors="replace") or TOO_DEEP)

    def _close(self, pipe: int, error: str | None, source: str = "") -> None:
        trial = self._trials.pop(pipe)
        self._selector.unregister(pipe)
        os.close(pipe)
        os.waitpid(trial.pid, 0)
        self._frames.send(encode(Verdict(trial.job, error, source)))

    def _end_all(self) -> None:
        for trial in self._trials.values():
            os.kill(trial.pid, signal.SIGKILL)


def _limit_memory() -> None:
    sizes = Path("/proc/self/statm")
    if sizes.exists():
        most = int(sizes.read_text().split()[0]) * resource.getpagesize() + MAX_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def try_out(backend: GrammarBackend, params: StructuredOutputsParams) -> bytes:
    """What is wrong with the grammar, or GOOD and what the backend has to load. A schema's error says where it is."""
    try:
        source = backend.translate(params)
        _walk(backend, source)
    except GrammarError as error:
        message = f"{_find(backend, params, str(error))}{error}"
    except MemoryError:
        message = TOO_DEEP
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
    else:
        return GOOD + source.encode()
    return message[:LONGEST_MESSAGE].encode(errors="replace")


def _walk(backend: GrammarBackend, source: str) -> None:
    """Compiles, and takes some of the tokens that may come, the same for every trial. Those that must come do not count."""
    matcher = backend.load(source)
    mask = np.zeros((1, backend.words), np.uint32)
    choose = random.Random(0)
    for _ in range(LONGEST_WALK):
        begun = time.process_time()
        backend.fill([(matcher, 0)], mask.ctypes.data, 1)
        if time.process_time() - begun > MAX_STEP_SECONDS:
            raise GrammarError(TOO_SLOW_STEP)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        allowed = allowed[~np.isin(allowed, backend.eos_ids)]
        if matcher.error is None and len(allowed):
            matcher.accept(matcher.forced() or [int(choose.choice(allowed))])
        if matcher.error is not None:
            raise GrammarError(f"the grammar leads nowhere or is too complex: {matcher.error}")
        if matcher.done or not len(allowed):
            return


def _find(backend: GrammarBackend, params: StructuredOutputsParams, error: str) -> str:
    """The innermost part of a JSON schema that has the same error when taken alone, as "$.properties.a: "."""
    if params.json is None or error.startswith("$"):
        return ""
    try:
        schema = read_object("json", params.json)
    except InvalidParameter:
        return ""
    shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    place: Place = ()
    found = True
    while found:
        found = False
        for inner, part in subschemas(schema):
            try:
                backend.load(backend.translate(msgspec.structs.replace(params, json={**shared, **part})))
            except GrammarError as other:
                if str(other) == error:
                    place, schema, found = place + inner, part, True
                    break
    return f"{pointer(place)}: " if place else ""
