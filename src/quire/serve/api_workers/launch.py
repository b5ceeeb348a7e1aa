"""The life of a server with several API processes, in the router's process.

listen ─► start API processes and engines ─► all of them ready ─► ... ─► SIGTERM or Ctrl-C ─► all drain ─► engines end ─► 0
              └► 1 or 2, with one line     one lost: another     engines given up ─► 1     a second signal ─► 128 + its number
"""

import asyncio
import contextlib
import logging
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from quire.config.args import EngineArgs
from quire.config.config import Config
from quire.config.resolve import resolve
from quire.config.server_args import ServerArgs
from quire.device.registry import describe_unseen
from quire.engine.child import COMMAND
from quire.engine.handle import EngineHandle
from quire.engine.router import start_engines
from quire.engine.timeline import Timeline
from quire.proc.fork_server import LazyForkServer
from quire.proc.liveness import RestartLimit, Silence
from quire.proc.spawn import PARENT, command_of, exit_reason, spawn
from quire.serve.api_workers import wire
from quire.serve.api_workers.router import Router, WorkerConnection
from quire.serve.http import page_of, url_of
from quire.types.errors import EngineError

logger = logging.getLogger(__name__)

WORKER_COMMAND = command_of("quire.serve.api_workers.process")
FAILED, SIGNALLED = 1, 128
T = TypeVar("T")
POLL_S = 0.1  # between two checks of the processes
EXIT_GRACE_S = 10.0  # for an API process, beyond its own deadline
ENGINE_STOP_S = 5.0  # for engines to end by themselves
SILENCE_S = 10.0  # an API process that serves sends a message every second


def log_ready(name: str, url: str, started: float, page: str | None, timeline: Timeline | None) -> None:
    now = time.monotonic()
    where = "" if page is None else f"; open {page} in a browser to try it"
    logger.info("ready: serving %s on %s after %.1f s%s", name, url, now - started, where)
    if timeline is not None:
        logger.debug("ready after %s", timeline.within(started, "command line", "open the API", now))


class WorkerProcess:
    """An API process, from the router's side."""

    def __init__(self, sockets: Sequence[socket.socket]) -> None:
        ours, theirs = socket.socketpair()
        listeners = [one.fileno() for one in sockets]
        arguments = [PARENT, "{0}", ",".join(f"{{{i + 1}}}" for i in range(len(listeners)))]
        with theirs:
            try:
                process = spawn(WORKER_COMMAND, arguments, [theirs.fileno(), *listeners], with_thread=True)
            except BaseException:
                ours.close()
                raise
        assert isinstance(process, subprocess.Popen)
        self.process = process
        self.channel = wire.WorkerChannel(ours)
        self.connection: WorkerConnection | None = None
        self.silence = Silence(POLL_S)

    @property
    def serving(self) -> bool:
        return self.connection is not None and self.connection.serving

    async def wait(self, seconds: float) -> int:
        """Return the exit code; the process is killed if it does not end in time."""
        deadline = time.monotonic() + seconds
        while (code := self.process.poll()) is None:
            if time.monotonic() > deadline:
                self.process.kill()
                return self.process.wait()
            await asyncio.sleep(POLL_S / 5)
        return code


class Launch:
    """A server's tasks, the first signal (drain and end) and the second (end at once)."""

    def __init__(self) -> None:
        self._stop_asked, self._stop_now = asyncio.Event(), asyncio.Event()
        self._signal = 0
        self._tasks: list[asyncio.Task[Any]] = []

    def _handle_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: int) -> None:
        if self._stop_asked.is_set():
            self._stop_now.set()
        self._signal = number
        self._stop_asked.set()

    def _start(self, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        task = asyncio.create_task(work)
        self._tasks.append(task)
        return task

    async def _before_signal(self, task: "asyncio.Task[Any]") -> bool:
        """Wait for the task or a signal; True if the task came first."""
        asked = self._start(self._stop_asked.wait())
        await asyncio.wait({task, asked}, return_when=asyncio.FIRST_COMPLETED)
        return task.done()


async def in_daemon_thread(work: Callable[[], T], discard: Callable[[T], None] = lambda _: None) -> T:
    """Run work that cannot be interrupted, such as a download, without delaying the end of the process.

    discard: called with a result that arrives after the caller was cancelled.
    """
    loop = asyncio.get_running_loop()
    made: asyncio.Future[T] = loop.create_future()

    def deliver(results: list[T], error: Exception | None) -> None:
        if made.cancelled():
            for result in results:
                discard(result)
        elif error is not None:
            made.set_exception(error)
        else:
            made.set_result(results[0])

    def run() -> None:
        results: list[T] = []
        failure: Exception | None = None
        try:
            results.append(work())
        except Exception as error:
            failure = error
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            loop.call_soon_threadsafe(deliver, results, failure)

    threading.Thread(target=run, name="quire-load", daemon=True).start()
    return await made


class ApiWorkersLaunch(Launch):
    def __init__(
        self, engine_args: EngineArgs, settings: ServerArgs, sockets: list[socket.socket], fork_server: LazyForkServer | None
    ) -> None:
        super().__init__()
        self._engine_args, self._settings, self._sockets, self._fork_server = engine_args, settings, sockets, fork_server
        self._router = Router()
        self._workers: list[WorkerProcess] = []
        self._lost = asyncio.Event()  # API processes were lost too often
        # as many restarts for each API process as for an engine
        most = engine_args.max_engine_restarts * settings.api_server_count
        self._restarts = RestartLimit(most, engine_args.engine_restart_window)

    async def run(self, started: float) -> int:
        self._handle_signals()
        life, at_once = self._start(self._live(started)), self._start(self._stop_now.wait())
        try:
            await asyncio.wait({life, at_once}, return_when=asyncio.FIRST_COMPLETED)
            if life.done():
                return int(life.result())
            logger.warning("stopping at once")
            return SIGNALLED + self._signal
        finally:
            self._end(graceful=not at_once.done())

    def _end(self, graceful: bool) -> None:
        self._stop_asked.set()  # no process is replaced after this
        for task in self._tasks:
            task.cancel()
        for worker in self._workers:
            worker.channel.close()
            worker.process.kill()
            worker.process.wait()
        if self._router.engines is not None:
            self._router.engines.stop(ENGINE_STOP_S if graceful else 0.0)

    # ---- the life of the router ---------------------------------------------------------------------------------------------

    async def _live(self, started: float) -> int:
        url, count = url_of(self._settings, self._sockets), self._settings.api_server_count
        logger.info("listening on %s with %d API processes, loading %s", url, count, self._engine_args.model)
        self._workers = [WorkerProcess(self._sockets) for _ in range(count)]
        starting = self._start(self._start_engines())
        if not await self._before_signal(starting):
            return 0
        config, engines = starting.result()
        self._router.engines = engines
        for number, worker in enumerate(self._workers):
            self._begin(worker, started, greets=number == 0)
        self._start(engines.run())
        self._start(self._router.report_states())
        ready = self._start(self._wait_ready())
        if not await self._before_signal(ready):
            logger.info("stopped before the model was loaded")
            return 0
        ready.result()
        log_ready(config.served_names[0], url, started, page_of(self._settings, self._sockets), None)
        if await self._before_signal(self._start(self._watch())):
            return await self._end_after_loss()
        return await self._drain()

    async def _start_engines(self) -> tuple[Config, EngineHandle]:
        def start() -> tuple[Config, EngineHandle]:
            config = resolve(self._engine_args, lambda: "cpu", describe_unseen)
            return config, start_engines(config, self._router, COMMAND, self._fork_server)

        return await in_daemon_thread(start, discard=lambda late: late[1].stop(0.0))

    async def _wait_ready(self) -> None:
        assert self._router.engines is not None
        await self._router.engines.wait_ready()
        while not all(worker.serving for worker in self._workers):
            if self._lost.is_set():
                raise EngineError("the API processes cannot be started; their last log lines give the reason")
            await asyncio.sleep(POLL_S / 5)

    async def _watch(self) -> None:
        """Return when the engines are dead or API processes were lost too often. A process that hangs is killed."""
        while self._router.engines is not None and self._router.engines.state != "dead" and not self._lost.is_set():
            await asyncio.sleep(POLL_S)
            for worker in self._workers:
                if not worker.serving:
                    continue
                worker.silence.update()
                if worker.silence.seconds > SILENCE_S:
                    logger.error("API process %d hangs: no message for %.1f s", worker.process.pid, worker.silence.seconds)
                    worker.process.kill()
                    worker.silence.reset()

    # ---- API processes ---------------------------------------------------------------------------------------------------

    def _begin(self, worker: WorkerProcess, started: float, greets: bool = False) -> None:
        settings = self._settings if greets else replace(self._settings, open=False, sample=None)
        if any(one.serving for one in self._router.workers):  # the others have the adapters of today, not of the start
            settings = replace(settings, lora_modules=[])
        first = worker is self._workers[0]
        worker.connection = self._router.enter(
            worker.channel, lambda name: wire.Begin(self._engine_args, settings, name, started, first)
        )
        self._start(self._attend(worker, worker.connection))

    async def _attend(self, worker: WorkerProcess, connection: WorkerConnection) -> None:
        async def on_frame(frame: bytes) -> None:
            worker.silence.reset()
            await self._router.on_frame(connection, frame)

        try:
            await worker.channel.listen(on_frame)
        finally:
            self._router.leave(connection)
        if self._stop_asked.is_set():
            return
        code = await worker.wait(EXIT_GRACE_S)
        if self._stop_asked.is_set() or self._router.engines is None or self._router.engines.state == "dead":
            return
        logger.error("API process %d ended with %s", worker.process.pid, exit_reason(code))
        if self._restarts.allow():
            fresh = WorkerProcess(self._sockets)
            self._workers[self._workers.index(worker)] = fresh
            logger.warning("API process %d replaced by %d", worker.process.pid, fresh.process.pid)
            self._begin(fresh, time.monotonic())
        else:
            limit = self._restarts
            logger.critical("API processes were lost more than %d times in %.0f s: exiting", limit.max_restarts, limit.window_s)
            self._lost.set()

    # ---- the end ---------------------------------------------------------------------------------------------------------

    async def _drain(self) -> int:
        """End the API processes after their requests; the engines end after that."""
        for worker in self._workers:
            worker.process.terminate()
        seconds = self._settings.shutdown_timeout + EXIT_GRACE_S
        served = [worker.serving for worker in self._workers]  # the exit code of others does not matter
        codes = await asyncio.gather(*(worker.wait(seconds) for worker in self._workers))
        dead = self._router.engines is not None and self._router.engines.state == "dead"
        return FAILED if dead or any(code and had for code, had in zip(codes, served, strict=True)) else 0

    async def _end_after_loss(self) -> int:
        """The engines, or all API processes, are lost. Let API processes answer their clients with errors, and end."""
        logger.critical("the server ends")
        if self._router.engines is not None and self._router.engines.state != "dead":
            for worker in self._workers:
                worker.process.terminate()
        await asyncio.gather(*(worker.wait(EXIT_GRACE_S) for worker in self._workers))
        return FAILED
