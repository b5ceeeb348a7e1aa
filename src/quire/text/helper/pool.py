"""Text processes as an event loop uses them: a job goes to one that is free, and if none becomes free soon there will be one
more. No job holds up the loop. Whoever waits is handed a process in turn, tenant by tenant.

A process that is lost, or that stands still, is replaced, and its job is done once more by another one; a job that loses two is
refused. A job that is given up by whoever asked for it may end by itself for a moment; then its process is killed.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import struct
import subprocess
import sys
import time
import weakref
from collections import deque
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any

import msgspec

from quire.paced import Pace
from quire.proc.spawn import environment, processor_time, with_thread_option
from quire.text.helper import wire
from quire.types.errors import EngineDead, EngineError, InvalidParameter

SETTINGS = {"TOKENIZERS_PARALLELISM": "false", "OPENBLAS_NUM_THREADS": "1", "RUST_BACKTRACE": "0"}
COMMAND = (sys.executable, "-P", "-m", "quire.text.helper.worker")
LONGEST = 600.0  # seconds that a process may take for a job: it counts its own processor time, and may be starved of it
BUSY = 0.05  # seconds that a job waits for the processes there are, before another one is started: that takes longer
SILENCE = 15.0  # seconds in which a process that has a job runs at least for a moment: one that does not was stopped, or hangs
PATIENCE = 1.0  # seconds that a job may go on which nobody waits for any more
_LENGTH = struct.Struct("<I")
_PIECE = 1 << 17
_NOTHING = [msgspec.json.encode(wire.Parse(1, 1, 1, 1))], [b"0"]  # a job that shows that a process is ready

logger = logging.getLogger(__name__)

whose: ContextVar[str | None] = ContextVar("whose", default=None)  # the tenant that the work of this task is for


class Lost(Exception):
    """The process is gone."""


class Helper:
    """One process. `lasting`: the thread that starts it is there as long as it is needed."""

    def __init__(self, where: str, lasting: bool = False) -> None:
        ours, theirs = socket.socketpair()
        with contextlib.ExitStack() as cleaning:
            cleaning.callback(theirs.close)
            unused = cleaning.enter_context(contextlib.ExitStack())
            unused.callback(ours.close)
            self._child = subprocess.Popen(
                [*COMMAND, str(theirs.fileno()), where, *with_thread_option(lasting)],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**(environment() or os.environ), **SETTINGS},
                process_group=0,  # Ctrl-C is for the parent
            )
            unused.pop_all()
        ours.setblocking(False)
        self.asked = False  # it has a whole job, and its answer is not read to the end
        self.ends = False  # it has said that its latest answer was the last
        self._socket = ours
        self._buffer = bytearray()
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
            pieces = [_LENGTH.pack(sizes[0]), *head, _LENGTH.pack(sizes[1]), *blob]
            for piece in [b"".join(pieces)] if sum(sizes) < _PIECE else pieces:
                await loop.sock_sendall(self._socket, piece)
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
        size = _LENGTH.size
        while len(self._buffer) < size or len(self._buffer) < size + _LENGTH.unpack_from(self._buffer)[0]:
            data = await asyncio.get_running_loop().sock_recv(self._socket, _PIECE)
            if not data:
                raise Lost
            self._buffer += data
        end = size + _LENGTH.unpack_from(self._buffer)[0]
        frame = bytes(self._buffer[size:end])
        del self._buffer[:end]
        return frame


def _end(child: "subprocess.Popen[bytes]", connection: socket.socket) -> None:
    connection.close()
    child.kill()
    child.wait()


class ProcessPool:
    """At most so many processes, started when they are needed."""

    def __init__(self, where: wire.Where, most: int, threads: ThreadPoolExecutor) -> None:
        self._where = msgspec.json.encode(where).decode()
        self._most, self._threads = most, threads
        self._helpers: set[Helper] = set()
        self._free: list[Helper] = []
        self._starting = False  # a process is, and is not ready
        self._waiting: dict[str | None, deque[asyncio.Future[Helper]]] = {}  # by tenant, the next one first
        self._closed = False

    def start(self) -> None:
        """Starts the first process now. It takes a while to be ready; nobody waits for it."""
        if not self._helpers and not self._closed:
            self._free.append(self._add())

    def stop(self) -> None:
        self._closed = True
        for helper in self._helpers:
            helper.kill()
        for helper in self._helpers:
            helper.end()
        self._helpers.clear()
        self._free.clear()
        while (turn := self._next()) is not None:
            turn.set_exception(EngineDead("the engine was shut down"))

    @property
    def pids(self) -> list[int]:
        return [helper.pid for helper in self._helpers]

    async def run(self, head: Sequence[bytes], blob: Sequence[bytes], what: str, parameter: str | None) -> Any:
        """Raises RequestError where the job is to blame."""
        for attempt in range(2):
            helper = await self._take()
            watching = asyncio.create_task(_watch(helper))
            try:
                value = await helper.ask(head, blob)
            except Lost:
                self._drop(helper)
                if self._closed:
                    raise EngineDead("the engine was shut down") from None
                overdue = await asyncio.get_running_loop().run_in_executor(self._threads, helper.overdue)
                if overdue:
                    raise InvalidParameter(f"{what} takes too much processor time", parameter) from None
                logger.warning("a text process was lost at work%s", "; its job is done again" if not attempt else "")
            except asyncio.CancelledError:
                self._leave(helper)
                raise
            except BaseException:
                self._give_back(helper)
                raise
            else:
                self._give_back(helper)
                return value
            finally:
                watching.cancel()
        raise InvalidParameter(f"{what} cannot be done: two processes were lost over it", parameter)

    async def _take(self) -> Helper:
        if self._closed:
            raise EngineDead("the engine was shut down")
        while self._free:
            helper = self._free.pop()
            if helper.runs:
                return helper
            self._drop(helper)
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[Helper] = loop.create_future()
        self._waiting.setdefault(whose.get(), deque()).append(turn)
        if not self._helpers:
            self._grow()
        growing = loop.call_later(BUSY, self._grow)
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
        if self._waiting and not self._closed and not self._starting and len(self._helpers) < self._most:
            self._starting = True
            _keep(self._start_one())

    async def _start_one(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            try:
                helper = await self._started()
            except Lost:  # somebody may have killed it: that is held against processes only when it happens twice
                helper = await self._started()
        except EngineDead:
            return
        except (Lost, OSError, RuntimeError) as error:  # no descriptors, no memory, no threads
            why = "it ended at once" if isinstance(error, Lost) else str(error)
            logger.error("a text process cannot be started: %s", why)
            if (turn := self._next()) is not None:
                turn.set_exception(EngineError(f"a text process cannot be started: {why}"))
        else:
            self._give_back(helper)
        finally:
            self._starting = False
        loop.call_later(BUSY if self._helpers else 0.0, self._grow)

    async def _started(self) -> Helper:
        """One more process, ready."""
        loop = asyncio.get_running_loop()
        helper = await loop.run_in_executor(self._threads, Helper, self._where, True)
        self._helpers.add(helper)
        if self._closed:
            self._drop(helper)
            raise EngineDead("the engine was shut down")
        late = loop.call_later(LONGEST, helper.kill)
        try:
            await helper.ask(*_NOTHING)
        except Lost:
            self._drop(helper)
            if self._closed:
                raise EngineDead("the engine was shut down") from None
            raise
        finally:
            late.cancel()
        return helper

    def _add(self) -> Helper:
        helper = Helper(self._where)
        self._helpers.add(helper)
        return helper

    def _give_back(self, helper: Helper) -> None:
        if helper.ends or helper not in self._helpers or not helper.runs:
            self._drop(helper)
        elif (turn := self._next()) is not None:
            turn.set_result(helper)
        else:
            self._free.append(helper)

    def _drop(self, helper: Helper) -> None:
        self._helpers.discard(helper)
        try:
            self._threads.submit(helper.end)
        except RuntimeError:  # there are no threads any more
            helper.end()
        self._grow()

    def _leave(self, helper: Helper) -> None:
        """Nobody waits for its answer any more."""
        if not helper.asked or self._closed:
            self._drop(helper)
            return

        async def finish() -> None:
            try:
                async with asyncio.timeout(PATIENCE):
                    await helper.answer()
            except (Lost, TimeoutError, OSError, asyncio.CancelledError):
                self._drop(helper)
                return
            except Exception:
                pass  # it was refused
            self._give_back(helper)

        _keep(finish())

    def _next(self) -> "asyncio.Future[Helper] | None":
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
    """Goes on with work that nobody waits for."""
    _kept.add(task := asyncio.get_running_loop().create_task(work))
    task.add_done_callback(_kept.discard)


async def _watch(helper: Helper) -> None:
    """Kills a process that does nothing about its job, or never ends it."""
    end, before = time.monotonic() + LONGEST, processor_time(helper.pid)
    while time.monotonic() < end:
        await asyncio.sleep(SILENCE)
        now = processor_time(helper.pid)
        if now is not None and now == before:
            logger.warning("a text process stands still")
            break
        before = now
    helper.kill()
