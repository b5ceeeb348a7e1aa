"""Worker processes as an event loop uses them: a job goes to one that is free, and if none becomes free soon there will be one
more. No job blocks the loop. Waiting jobs get processes in turn, tenant by tenant.

A process that is lost, or that stands still, is replaced, and its job is done once more by another one; a job that loses two is
refused. A job whose caller is gone may finish within ABANDONED_JOB_S; then its process is killed.
"""

import asyncio
import contextlib
import logging
import signal
import socket
import struct
import subprocess
import time
import weakref
from collections import deque
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any

import msgspec

from quire.proc.channel import Frames
from quire.proc.fork_server import LazyForkServer
from quire.proc.spawn import ChildProcess, command_of, processor_time, spawn, with_thread_option
from quire.text.pacing import Pace
from quire.text.workers import wire
from quire.types.errors import EngineDead, EngineError, InvalidParameter

SETTINGS = {"TOKENIZERS_PARALLELISM": "false", "OPENBLAS_NUM_THREADS": "1", "RUST_BACKTRACE": "0"}
COMMAND = command_of("quire.text.workers.worker")
MAX_JOB_S = 600.0  # wall time of one job; the process limits its own CPU time, and may be starved of it
GROW_AFTER_S = 0.05  # a job waits this long for a free process before another one is started
HANG_TIMEOUT_S = 15.0  # a process with a job that uses no CPU time for this long was stopped, or hangs
FORK_SERVER_START_S = 60.0  # until its imports are done
ABANDONED_JOB_S = 1.0  # a job whose caller is gone may finish within this time
_LENGTH = struct.Struct("<I")
_PIECE = 1 << 17
_NOTHING = [msgspec.json.encode(wire.Parse(1, 1, 1, 1))], [b"0"]  # a job that shows that a process is ready

logger = logging.getLogger(__name__)

current_tenant: ContextVar[str | None] = ContextVar("current_tenant", default=None)  # of the current task


class WorkerKind(msgspec.Struct, frozen=True):
    """What the processes of a pool run."""

    name: str  # in logs and errors
    source: str  # their second argument
    command: Sequence[str] | None = None  # None: COMMAND
    ready: tuple[Sequence[bytes], Sequence[bytes]] = _NOTHING  # a job that shows that a process is ready
    hang_timeout_s: float | None = None  # None: HANG_TIMEOUT_S
    server: LazyForkServer | None = None  # forks them


def text_kind(source: wire.TokenizerSource) -> WorkerKind:
    return WorkerKind("text", msgspec.json.encode(source).decode())


class Lost(Exception):
    """The process is gone."""


class WorkerHandle:
    """One process. `lasting`: the thread that starts it is there as long as it is needed."""

    def __init__(self, kind: WorkerKind, lasting: bool = False) -> None:
        self.kind = kind
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                arguments = ["{0}", kind.source, *with_thread_option(lasting)]
                server = None if kind.server is None else kind.server.get(FORK_SERVER_START_S)
                self._child = spawn(kind.command or COMMAND, arguments, [theirs.fileno()], server=server, settings=SETTINGS)
            except BaseException:
                ours.close()
                raise
        ours.setblocking(False)
        self.asked = False  # it has a whole job, and its answer is not read to the end
        self.ends = False  # it has reported that its latest answer was the last
        self._frames = Frames(ours)
        self.end = weakref.finalize(self, _end, self._child, ours)

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def runs(self) -> bool:
        return self._child.poll() is None

    def kill(self) -> None:
        self._child.kill()

    def overdue(self) -> bool:
        """Was it killed for the time it took?"""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._child.wait(1.0) == -signal.SIGXCPU
        return False

    async def ask(self, head: Sequence[bytes], blob: Sequence[bytes]) -> Any:
        loop = asyncio.get_running_loop()
        try:
            sizes = [sum(map(len, frame)) for frame in (head, blob)]
            parts = [_LENGTH.pack(sizes[0]), *head, _LENGTH.pack(sizes[1]), *blob]
            for piece in [b"".join(parts)] if sum(sizes) < _PIECE else parts:
                await loop.sock_sendall(self._frames.socket, piece)
            self.asked = True
            return await self.answer()
        except OSError as error:
            raise Lost from error

    async def answer(self) -> Any:
        """One that was read in part may be read to its end, and is of no use then."""
        reader, pace = wire.FrameReader(), Pace()
        while True:
            frame = await self._frame()
            pace.begin()
            await pace()
            self.asked = frame[:1] not in wire.FINAL
            self.ends = frame[:1] in wire.LAST.values()
            value = reader.take(frame)
            if value is not None:
                return value[0]
            await pace()

    async def _frame(self) -> bytes:
        while (frame := self._frames.next()) is None:
            if not await self._frames.fill():
                raise Lost
        return frame


def _end(child: ChildProcess, connection: socket.socket) -> None:
    connection.close()
    child.kill()
    child.wait()


class ProcessPool:
    """Up to `most` processes, started when they are needed."""

    def __init__(self, kind: WorkerKind, most: int, threads: ThreadPoolExecutor) -> None:
        self._kind = kind
        self._most, self._threads = most, threads
        self._workers: set[WorkerHandle] = set()
        self._free: list[WorkerHandle] = []
        self._starting = False  # a process is, and is not ready
        self._waiting: dict[str | None, deque[asyncio.Future[WorkerHandle]]] = {}  # by tenant, the next one first
        self._closed = False

    def start(self) -> None:
        """Start the first process, without waiting until it is ready."""
        if not self._workers and not self._closed:
            self._free.append(self._add())

    def stop(self) -> None:
        self._closed = True
        for worker in self._workers:
            worker.kill()
        for worker in self._workers:
            worker.end()
        self._workers.clear()
        self._free.clear()
        while (turn := self._next()) is not None:
            turn.set_exception(EngineDead("the engine was shut down"))

    @property
    def pids(self) -> list[int]:
        return [worker.pid for worker in self._workers]

    async def run(self, head: Sequence[bytes], blob: Sequence[bytes], what: str, parameter: str | None) -> Any:
        """Raises RequestError where the job is to blame."""
        for attempt in range(2):
            worker = await self._take()
            watching = asyncio.create_task(_watch(worker))
            try:
                value = await worker.ask(head, blob)
            except Lost:
                self._drop(worker)
                if self._closed:
                    raise EngineDead("the engine was shut down") from None
                overdue = await asyncio.get_running_loop().run_in_executor(self._threads, worker.overdue)
                if overdue:
                    raise InvalidParameter(f"{what} takes too much processor time", parameter) from None
                logger.warning(
                    "a %s process was lost at work%s", self._kind.name, "; its job is done again" if not attempt else ""
                )
            except asyncio.CancelledError:
                self._leave(worker)
                raise
            except BaseException:
                self._give_back(worker)
                raise
            else:
                self._give_back(worker)
                return value
            finally:
                watching.cancel()
        raise InvalidParameter(f"{what} cannot be done: two processes were lost over it", parameter)

    async def _take(self) -> WorkerHandle:
        if self._closed:
            raise EngineDead("the engine was shut down")
        while self._free:
            worker = self._free.pop()
            if worker.runs:
                return worker
            self._drop(worker)
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[WorkerHandle] = loop.create_future()
        self._waiting.setdefault(current_tenant.get(), deque()).append(turn)
        if not self._workers:
            self._grow()
        growing = loop.call_later(GROW_AFTER_S, self._grow)
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self._give_back(turn.result())  # to the next one
            raise
        finally:
            growing.cancel()

    def _grow(self) -> None:
        """Starts one more process for those who wait, if there may be more: one at a time. They need not wait for that one."""
        if self._waiting and not self._closed and not self._starting and len(self._workers) < self._most:
            self._starting = True
            _keep(self._start_one())

    async def _start_one(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            try:
                worker = await self._started()
            except Lost:  # it may have been killed from outside: only a second loss is an error
                worker = await self._started()
        except EngineDead:
            return
        except (Lost, OSError, RuntimeError) as error:  # no descriptors, no memory, no threads
            why = "it ended at once" if isinstance(error, Lost) else str(error)
            logger.error("a %s process cannot be started: %s", self._kind.name, why)
            if (turn := self._next()) is not None:
                turn.set_exception(EngineError(f"a {self._kind.name} process cannot be started: {why}"))
        else:
            self._give_back(worker)
        finally:
            self._starting = False
        loop.call_later(GROW_AFTER_S if self._workers else 0.0, self._grow)

    async def _started(self) -> WorkerHandle:
        """One more process, ready."""
        loop = asyncio.get_running_loop()
        worker = await loop.run_in_executor(self._threads, WorkerHandle, self._kind, True)
        self._workers.add(worker)
        if self._closed:
            self._drop(worker)
            raise EngineDead("the engine was shut down")
        late = loop.call_later(MAX_JOB_S, worker.kill)
        try:
            await worker.ask(*self._kind.ready)
        except Lost:
            self._drop(worker)
            if self._closed:
                raise EngineDead("the engine was shut down") from None
            raise
        finally:
            late.cancel()
        return worker

    def _add(self) -> WorkerHandle:
        worker = WorkerHandle(self._kind)
        self._workers.add(worker)
        return worker

    def _give_back(self, worker: WorkerHandle) -> None:
        if worker.ends or worker not in self._workers or not worker.runs:
            self._drop(worker)
        elif (turn := self._next()) is not None:
            turn.set_result(worker)
        else:
            self._free.append(worker)

    def _drop(self, worker: WorkerHandle) -> None:
        self._workers.discard(worker)
        try:
            self._threads.submit(worker.end)
        except RuntimeError:  # there are no threads any more
            worker.end()
        self._grow()

    def _leave(self, worker: WorkerHandle) -> None:
        """The caller is gone: wait a moment for the answer, so that the process can be used again."""
        if not worker.asked or self._closed:
            self._drop(worker)
            return

        async def finish() -> None:
            try:
                async with asyncio.timeout(ABANDONED_JOB_S):
                    await worker.answer()
            except (Lost, TimeoutError, OSError, asyncio.CancelledError):
                self._drop(worker)
                return
            except Exception:
                pass  # it was refused
            self._give_back(worker)

        _keep(finish())

    def _next(self) -> "asyncio.Future[WorkerHandle] | None":
        """Whose turn it is. A tenant that has more to do waits for all others before its next turn."""
        while self._waiting:
            tenant, turns = next(iter(self._waiting.items()))
            del self._waiting[tenant]
            turn = turns.popleft()
            if turns:
                self._waiting[tenant] = turns
            if not turn.done() and not turn.get_loop().is_closed():
                return turn
        return None


_kept: set["asyncio.Task[None]"] = set()


def _keep(work: Coroutine[Any, Any, None]) -> None:
    """Run work in the background."""
    _kept.add(task := asyncio.get_running_loop().create_task(work))
    task.add_done_callback(_kept.discard)


async def _watch(worker: WorkerHandle) -> None:
    """Kills a process that does nothing about its job, or never ends it."""
    end, before = time.monotonic() + MAX_JOB_S, processor_time(worker.pid)
    while time.monotonic() < end:
        await asyncio.sleep(worker.kind.hang_timeout_s or HANG_TIMEOUT_S)
        now = processor_time(worker.pid)
        if now is not None and now == before:
            logger.warning("a %s process stands still", worker.kind.name)
            break
        before = now
    worker.kill()
