"""Keeps one engine process alive: starts it, listens to it, notices when it is lost, and starts another one.

    starting ──► ready ──► restarting ──► ready ...
       └──────────┴────────────┴────────► dead         for good: a failed start, too many restarts, or a shutdown

An engine is lost when its process ends, when nothing is heard of it (frozen), or when a turn of its loop takes too long (hung).
What becomes of its requests is the listener's business. Everything here runs on one event loop; only the start and the stop are
plain functions.
"""

import asyncio
import errno
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from quire.config.args import EngineArgs
from quire.engine import ipc
from quire.engine.child import Child
from quire.engine.handle import State
from quire.engine.node_listener import RemoteEngine
from quire.proc.liveness import RestartLimit, Silence
from quire.types.engine_snapshot import EngineSnapshot
from quire.types.errors import EngineDead, QuireError
from quire.types.outputs import TokenDelta

AnyChild = Child | RemoteEngine

TICK = 0.1  # seconds between looks at the process
CHUNK = 128  # requests whose news are handed out before the event loop may do something else
LAST = 0.01  # seconds between looks at one that has closed its connection
GRACE = 0.05  # seconds for the last reports of an ended process to come through
STOPPED = 0.5  # seconds of silence of a process that is stopped
START_SILENCE = 300.0  # seconds without a beat that a starting engine is allowed: libraries load, beside busy neighbours
BURIAL = 30.0  # seconds for a killed process to disappear
WANT = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.ENOBUFS)  # of descriptors, memory, processes

logger = logging.getLogger(__name__)


class Listener(Protocol):
    @property
    def num_open(self) -> int:
        """Requests that are not finished."""

    def on_ready(self, ready: ipc.Ready) -> None: ...

    def on_deltas(self, deltas: Sequence[TokenDelta]) -> None: ...

    def on_step(self, report: ipc.StepReport) -> None:
        """After all its deltas."""

    def on_snapshot(self, snapshot: EngineSnapshot) -> None: ...

    def on_answer(self, answer: ipc.Refused | ipc.Reply) -> None: ...

    def on_lost(self, in_flight: set[str]) -> None:
        """The engine is gone, and with it the work on these requests. Another one will be ready, unless on_dead comes first."""

    def on_dead(self, error: QuireError) -> None: ...


@dataclass(frozen=True)
class SupervisorLimits:
    dead_after: float
    hang_timeout: float
    start_timeout: float
    most_restarts: int
    restart_window: float

    @classmethod
    def of(cls, args: EngineArgs) -> "SupervisorLimits":
        return cls(
            args.engine_dead_after,
            args.engine_hang_timeout,
            args.engine_start_timeout,
            args.max_engine_restarts,
            args.engine_restart_window,
        )


class Supervisor:
    def __init__(
        self, start: Callable[[], AnyChild], limits: SupervisorLimits, listener: Listener, name: str = "the engine"
    ) -> None:
        """`name` is what the log calls it."""
        self._start, self._limits, self._listener, self._name = start, limits, listener, name
        self.state: State = "starting"
        self.error: QuireError | None = None  # why it is dead
        self._failure: QuireError | None = None  # why the latest start failed, in the engine's own words
        self.restarts = 0
        self._lost_by: str | None = None  # why the present engine is being replaced
        self.last_loss: str | None = None  # why the latest one was
        self._lost_at = 0.0  # when the latest one that had been ready was
        self._restart_limit = RestartLimit(limits.most_restarts, limits.restart_window)
        self._doom: QuireError | None = None  # why there is to be no other one
        self._waiters: set[asyncio.Future[None]] = set()
        self._detach: Callable[[], None] = lambda: None
        self.heard_at = self._born = time.monotonic()
        self._silence = Silence(TICK)
        self._busy = 0.0  # what the latest beat said
        self._child: AnyChild | None = start()

    # ---- what others may know -------------------------------------------------------------------------------------------

    @property
    def busy_for(self) -> float:
        return self._busy + time.monotonic() - self.heard_at if self._busy else 0.0

    @property
    def pid(self) -> int | None:
        return None if self._child is None else self._child.pid

    async def wait_ready(self) -> None:
        """Returns when the engine takes requests; raises why if it never will."""
        while self.state != "ready":
            if self.error is not None:
                raise self.error
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.add(waiter)
            try:
                await waiter
            finally:
                self._waiters.discard(waiter)

    # ---- what others may ask --------------------------------------------------------------------------------------------

    def send(self, command: ipc.Command) -> None:
        """Only while ready."""
        assert self._child is not None
        self._child.send(command)
        if self._child.full:
            self._flush(self._child)

    def _flush(self, child: AnyChild) -> None:
        """What the engine had no room for is sent when it has."""
        loop = asyncio.get_running_loop()
        child.flush()
        if child.full:
            loop.add_writer(child.fd, self._flush, child)
        else:
            loop.remove_writer(child.fd)

    def stop(self, timeout: float) -> None:
        """Ends the engine, kindly for up to `timeout` seconds. For good."""
        child, self._child = self._child, None
        if child is not None:
            self._detach()
            child.stop(timeout if self.state == "ready" else 0.0)
        if self.state != "dead":
            self._change("dead", EngineDead("the engine was shut down"))

    def doom(self, error: QuireError) -> None:
        """The engine is killed, and given up for this."""
        self._doom = error
        if self._child is not None:
            self._child.kill()

    # ---- the watch ------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Until the engine is dead. May be cancelled and run again, on another event loop too."""
        try:
            while (child := self._child) is not None:
                self._lost_by = self._lost_by or await self._watch(child)
                if self._child is child:
                    await self._replace(child, self._lost_by)
                self._lost_by = None
        except Exception as error:  # a mistake of ours; nobody must wait for what cannot come
            logger.exception("the engine's supervisor failed")
            self._give_up(EngineDead(f"the engine's supervisor failed: {type(error).__name__}: {error}"))

    async def _watch(self, child: AnyChild) -> str:
        """Listens until the engine is lost, and says why it is."""
        loop, wake, fd = asyncio.get_running_loop(), asyncio.Event(), child.fd
        loop.add_reader(fd, wake.set)
        ticker: asyncio.TimerHandle | None = None

        def tick() -> None:
            nonlocal ticker
            wake.set()
            ticker = loop.call_later(TICK, tick)

        def detach() -> None:
            self._detach = lambda: None
            if child.fd == fd:  # else it is closed, and with it whatever was awaited
                loop.remove_reader(fd)
                loop.remove_writer(fd)
            if ticker is not None:
                ticker.cancel()

        self._detach = detach
        self._silence.begin()
        self._flush(child)
        tick()
        ended = False
        try:
            while True:
                wake.clear()
                while self._child is child and (report := child.receive()) is not None:
                    await self._hear(report)
                    if isinstance(report, ipc.Failed):
                        return report.message
                if self._child is not child:
                    return "it was stopped"
                if child.closed:  # it has said all, and ends
                    loop.remove_reader(child.fd)
                    loop.call_later(LAST, wake.set)
                if ended or (child.closed and child.ending() is not None):
                    return f"its process ended with {child.ending()}"
                if ended := self._silence.look() and child.ending() is not None:
                    await asyncio.sleep(GRACE)
                elif (reason := self._diagnose()) is not None:
                    return reason
                else:
                    await wake.wait()
        finally:
            if self._child is child:
                detach()

    async def _hear(self, report: ipc.Report) -> None:
        self.heard_at, self._busy = time.monotonic(), 0.0
        self._silence.heard()
        match report:
            case ipc.StepReport(deltas):
                for i in range(0, len(deltas), CHUNK):
                    self._listener.on_deltas(deltas[i : i + CHUNK] if len(deltas) > CHUNK else deltas)
                    await asyncio.sleep(0)
                self._listener.on_step(report)
            case ipc.Seen(snapshot):
                self._listener.on_snapshot(snapshot)
            case ipc.Beat(busy):
                self._busy = busy
            case ipc.Refused() | ipc.Reply():
                self._listener.on_answer(report)
            case ipc.Ready():
                self._restart_limit.failed_starts = 0
                self._change("ready")
                if self.restarts:
                    gone, count = time.monotonic() - self._lost_at, self._listener.num_open
                    logger.info(
                        "%s is back after %.1f s; %d open request%s",
                        self._name,
                        gone,
                        count,
                        " goes on" if count == 1 else "s go on",
                    )
                self._listener.on_ready(report)
            case ipc.Failed():
                self._failure = ipc.start_error(report)

    def _diagnose(self) -> str | None:
        """What is wrong with an engine whose process lives, if anything is."""
        started, silence = self.state == "ready", self._silence.seconds
        if silence > STOPPED and self._child is not None and self._child.stopped:
            return f"its process is stopped (SIGSTOP), and has been silent for {silence:.1f} s"
        if silence > (self._limits.dead_after if started else max(self._limits.dead_after, START_SILENCE)):
            return f"it has been silent for {silence:.1f} s"
        if started and self._busy > self._limits.hang_timeout:
            return f"it has been in one step for {self._busy:.1f} s"
        if not started and not self._in_time:
            return f"it was not ready after {self._limits.start_timeout:.0f} s"
        return None

    async def _replace(self, child: AnyChild, reason: str) -> None:
        was, self._busy = self.state, 0.0
        self.state = "starting" if was == "starting" else "restarting"
        try:
            await _bury(child)
        except asyncio.CancelledError:
            self.state = was  # nobody has been told: the next run does
            raise
        if self._child is not child:
            return
        in_flight = child.in_flight() if was == "ready" else set()
        child.close()
        if was == "starting" and isinstance(child, RemoteEngine) and child.strange and self._in_time:
            logger.warning("%s has not come: %s. Waiting for another node", self._name, reason)
            self._child = self._start()
            return
        if was == "starting":
            self._give_up(self._failure or EngineDead(f"{self._name} could not start: {reason}{child.last_words()}"))
            return
        self.last_loss = reason
        logger.error("%s was lost: %s", self._name, reason)
        if was == "ready":
            self._lost_at = time.monotonic()
            self._listener.on_lost(in_flight)
        else:
            self._restart_limit.failed_starts += 1
        while self._child is child and self._may_restart(reason):
            try:
                await self._restart(child)
            except OSError as error:
                self._restart_limit.failed_starts += 1
                reason = f"its process could not be started: {error}"

    @property
    def _in_time(self) -> bool:
        return time.monotonic() - self._born < self._limits.start_timeout

    def _may_restart(self, reason: str) -> bool:
        if self._doom is not None:
            self._give_up(self._doom)
            return False
        if self._restart_limit.allow():
            return True
        logger.critical("%s is given up", self._name)
        limits = self._limits
        times = f"restarted {limits.most_restarts} times in {limits.restart_window:.0f} s, the most allowed"
        self._give_up(EngineDead(f"{self._name} was lost: {reason}. It was {times}"))
        return False

    async def _restart(self, child: AnyChild) -> None:
        """Tries as long as the system has nothing to start a process with: that is not the engine's fault, and it may pass."""
        while True:
            if self._restart_limit.failed_starts:
                await asyncio.sleep(self._restart_limit.backoff_s)
            if self._child is not child or self._doom is not None:
                return
            self._born, self._failure = time.monotonic(), None
            try:
                self._child = self._start()
            except OSError as error:
                if error.errno not in WANT:
                    raise
                self._restart_limit.failed_starts += 1
                logger.error("the engine cannot be restarted now, and will be later: %s", error)
            else:
                self.restarts += 1
                logger.warning("restarting %s (restart %d)", self._name, self.restarts)
                return

    def _give_up(self, error: QuireError) -> None:
        child, self._child = self._child, None
        if child is not None:
            self._detach()
            child.stop(0.0)
        self._change("dead", error)
        self._listener.on_dead(error)

    def _change(self, state: State, error: QuireError | None = None) -> None:
        self.state, self.error = state, error
        for waiter in self._waiters:
            with suppress(RuntimeError):  # its event loop is closed
                if not waiter.done():
                    waiter.set_result(None)


async def _bury(child: AnyChild) -> None:
    """Kills the process and waits for its end, so that its memory is free for the next one."""
    child.kill()
    deadline = time.monotonic() + BURIAL
    while child.ending() is None:
        if time.monotonic() > deadline:
            logger.error("the engine process %d does not go away", child.pid)
            return
        await asyncio.sleep(0.01)
