"""Supervises one engine process: starts it, receives its reports, notices when it is lost, and starts the next one.

    starting ──► ready ──► restarting ──► ready ...
       └──────────┴────────────┴────────► dead         for good: a failed start, too many restarts, or a shutdown

An engine is lost when its process ends, when its heartbeats stop (frozen), or when a step takes too long (hung). The listener
decides about its requests. Everything runs on one event loop; only the start and the stop are plain functions.
"""

import asyncio
import errno
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
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

CHECK_INTERVAL_S = 0.1  # seconds between checks of the process
DELTAS_PER_TURN = 128  # deltas that are passed on before the event loop runs other tasks
CLOSED_POLL_S = 0.01  # between checks of a process that has closed its connection
LAST_REPORTS_S = 0.05  # for the last reports of an ended process to arrive
STOPPED_TIMEOUT_S = 0.5  # silence after which a stopped process (SIGSTOP) is lost
START_SILENCE_S = 300.0  # allowed without a heartbeat while an engine starts: importing libraries blocks its thread
KILL_TIMEOUT_S = 30.0
SLOW_CALL_S = 1800.0
OUT_OF_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.ENOBUFS)  # of descriptors, memory, processes

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
        """The engine is lost while it worked on these requests. Another one will be ready, unless on_dead comes first."""

    def on_dead(self, error: QuireError) -> None: ...


@dataclass(frozen=True)
class SupervisorLimits:
    """Time limits and restarts of an engine."""

    dead_after: float
    hang_timeout: float
    start_timeout: float
    max_restarts: int
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
    """Supervise one engine process."""

    def __init__(
        self, start: Callable[[], AnyChild], limits: SupervisorLimits, listener: Listener, name: str = "the engine"
    ) -> None:
        """name: of the engine, for the log."""
        self._start, self._limits, self._listener, self._name = start, limits, listener, name
        self.state: State = "starting"
        self.error: QuireError | None = None  # the reason of state "dead"
        self._failure: QuireError | None = None  # of the latest start, as the engine reported it
        self.restarts = 0
        self._lost_by: str | None = None  # why the current engine is being replaced
        self.last_loss: str | None = None  # why the latest engine was lost
        self._lost_at = 0.0  # time of the latest loss of a ready engine
        self._restart_limit = RestartLimit(limits.max_restarts, limits.restart_window)
        self._doom: QuireError | None = None  # if set, the engine is not restarted
        self._waiters: set[asyncio.Future[None]] = set()
        self._detach: Callable[[], None] = lambda: None
        self.received_at = self._started_at = time.monotonic()
        self._silence = Silence(CHECK_INTERVAL_S)
        self._busy = 0.0  # seconds in the present step, by the latest heartbeat
        self._patient_until = 0.0
        self._child: AnyChild | None = start()

    # ---- state ----------------------------------------------------------------------------------------------------------

    @property
    def busy_for(self) -> float:
        return self._busy + time.monotonic() - self.received_at if self._busy else 0.0

    @property
    def pid(self) -> int | None:
        return None if self._child is None else self._child.pid

    async def wait_ready(self) -> None:
        """Return when the engine takes requests; raise why if it never will."""
        while self.state != "ready":
            if self.error is not None:
                raise self.error
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.add(waiter)
            try:
                await waiter
            finally:
                self._waiters.discard(waiter)

    # ---- commands -------------------------------------------------------------------------------------------------------

    def send(self, command: ipc.Command) -> None:
        """Send a command. Only while the engine is ready."""
        assert self._child is not None
        self._child.send(command)
        if self._child.full:
            self._flush(self._child)

    def _flush(self, child: AnyChild) -> None:
        """Send what is left in the channel as the engine reads."""
        loop = asyncio.get_running_loop()
        child.flush()
        if child.full:
            loop.add_writer(child.fd, self._flush, child)
        else:
            loop.remove_writer(child.fd)

    def stop(self, timeout: float) -> None:
        """End the engine for good; it may end by itself for up to `timeout` seconds."""
        child, self._child = self._child, None
        if child is not None:
            self._detach()
            child.stop(timeout if self.state == "ready" else 0.0)
        if self.state != "dead":
            self._change("dead", EngineDead("the engine was shut down"))

    def doom(self, error: QuireError) -> None:
        """Kill the engine, and do not restart it."""
        self._doom = error
        if self._child is not None:
            self._child.kill()

    # ---- watching -----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Run until the engine is dead. May be cancelled and run again, on another event loop too."""
        try:
            while (child := self._child) is not None:
                self._lost_by = self._lost_by or await self._watch(child)
                if self._child is child:
                    await self._replace(child, self._lost_by)
                self._lost_by = None
        except Exception as error:  # a bug: callers must not wait forever
            logger.exception("the engine's supervisor failed")
            self._give_up(EngineDead(f"the engine's supervisor failed: {type(error).__name__}: {error}"))

    async def _watch(self, child: AnyChild) -> str:
        """Receive reports until the engine is lost; return why."""
        loop, wake, fd = asyncio.get_running_loop(), asyncio.Event(), child.fd
        loop.add_reader(fd, wake.set)
        ticker: asyncio.TimerHandle | None = None

        def tick() -> None:
            nonlocal ticker
            wake.set()
            ticker = loop.call_later(CHECK_INTERVAL_S, tick)

        def detach() -> None:
            self._detach = lambda: None
            if child.fd == fd:  # otherwise it is closed already
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
                    await self._handle(report)
                    if isinstance(report, ipc.Failed):
                        return report.message
                if self._child is not child:
                    return "it was stopped"
                if child.closed:  # it has sent everything, and ends
                    loop.remove_reader(child.fd)
                    loop.call_later(CLOSED_POLL_S, wake.set)
                if ended or (child.closed and child.ending() is not None):
                    return f"its process ended with {child.ending()}"
                if ended := self._silence.update() and child.ending() is not None:
                    await asyncio.sleep(LAST_REPORTS_S)
                elif (reason := self._diagnose()) is not None:
                    return reason
                else:
                    await wake.wait()
        finally:
            if self._child is child:
                detach()

    async def _handle(self, report: ipc.Report) -> None:
        self.received_at, self._busy = time.monotonic(), 0.0
        self._silence.reset()
        match report:
            case ipc.StepReport(deltas):
                for i in range(0, len(deltas), DELTAS_PER_TURN):
                    self._listener.on_deltas(deltas[i : i + DELTAS_PER_TURN] if len(deltas) > DELTAS_PER_TURN else deltas)
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
                        " continues" if count == 1 else "s continue",
                    )
                self._listener.on_ready(report)
            case ipc.Failed():
                self._failure = ipc.start_error(report)

    def _diagnose(self) -> str | None:
        """Return what is wrong with an engine whose process is alive, or None."""
        started, silence = self.state == "ready", self._silence.seconds
        patient = started and time.monotonic() < self._patient_until
        if silence > STOPPED_TIMEOUT_S and self._child is not None and self._child.stopped:
            return f"its process is stopped (SIGSTOP), and has been silent for {silence:.1f} s"
        if patient:
            return None
        waits = isinstance(self._child, RemoteEngine) and self._child.waits
        if not waits and silence > (self._limits.dead_after if started else max(self._limits.dead_after, START_SILENCE_S)):
            return f"it has been silent for {silence:.1f} s"
        if started and self._busy > self._limits.hang_timeout:
            return f"it has been in one step for {self._busy:.1f} s"
        if not started and not self._in_time:
            return f"it was not ready after {self._limits.start_timeout:.0f} s"
        return None

    @contextmanager
    def patient(self) -> Iterator[None]:
        """Accept that the engine is silent for up to SLOW_CALL_S: writing a trace blocks its heartbeats."""
        self._patient_until = time.monotonic() + SLOW_CALL_S
        try:
            yield
        finally:
            self._patient_until = 0.0
            self._silence.reset()

    async def _replace(self, child: AnyChild, reason: str) -> None:
        was, self._busy = self.state, 0.0
        self.state = "starting" if was == "starting" else "restarting"
        try:
            await _kill_and_wait(child)
        except asyncio.CancelledError:
            self.state = was  # the listener was not called: the next run does so
            raise
        if self._child is not child:
            return
        in_flight = child.in_flight() if was == "ready" else set()
        child.close()
        if was == "starting" and isinstance(child, RemoteEngine) and child.never_began and self._in_time:
            logger.warning("%s did not start: %s. Waiting for another node", self._name, reason)
            self._child = self._start()
            return
        if was == "starting":
            self._give_up(self._failure or EngineDead(f"{self._name} could not start: {reason}{child.log_tail()}"))
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
        return time.monotonic() - self._started_at < self._limits.start_timeout

    def _may_restart(self, reason: str) -> bool:
        if self._doom is not None:
            self._give_up(self._doom)
            return False
        if self._restart_limit.allow():
            return True
        logger.critical("%s is given up", self._name)
        limits = self._limits
        times = f"restarted {limits.max_restarts} times in {limits.restart_window:.0f} s, the most allowed"
        self._give_up(EngineDead(f"{self._name} was lost: {reason}. It was {times}"))
        return False

    async def _restart(self, child: AnyChild) -> None:
        """Start the next process; try again while the system is out of descriptors, memory or processes."""
        while True:
            if self._restart_limit.failed_starts:
                await asyncio.sleep(self._restart_limit.backoff_s)
            if self._child is not child or self._doom is not None:
                return
            self._started_at, self._failure = time.monotonic(), None
            try:
                self._child = self._start()
            except OSError as error:
                if error.errno not in OUT_OF_RESOURCES:
                    raise
                self._restart_limit.failed_starts += 1
                logger.error("the engine cannot be restarted now; trying again: %s", error)
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


async def _kill_and_wait(child: AnyChild) -> None:
    """Kill the process and wait for its end, so that its memory is free for the next one."""
    child.kill()
    deadline = time.monotonic() + KILL_TIMEOUT_S
    while child.ending() is None:
        if time.monotonic() > deadline:
            logger.error("the engine process %d does not go away", child.pid)
            return
        await asyncio.sleep(0.01)
