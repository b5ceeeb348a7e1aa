"""The life of a server with several API processes, as the hub lives it.

listen ─► start API processes and engines ─► all of them ready ─► ... ─► SIGTERM or Ctrl-C ─► all drain ─► engines end ─► 0
              └► 1 or 2, with one line     one lost: another     engines given up ─► 1     a second signal ─► 128 + its number
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from typing import Any

from quire.config.args import EngineArgs
from quire.config.config import Config
from quire.config.resolve import resolve
from quire.config.server_args import ServerArgs
from quire.device.registry import describe_unseen
from quire.engine.child import COMMAND, Child
from quire.engine.router import start_engines
from quire.engine.timeline import Timeline
from quire.proc.spawn import environment, exit_reason, with_thread_option
from quire.serve.fronts import wire
from quire.serve.fronts.hub import Desk, Hub
from quire.serve.sockets import page_of, url_of
from quire.types.errors import EngineError

logger = logging.getLogger(__name__)

FRONT = (sys.executable, "-P", "-m", "quire.serve.fronts.process")
FAILED, SIGNALLED = 1, 128
GLANCE = 0.1  # seconds between looks at the processes
LAST_WORDS = 10.0  # seconds that an API process has beyond its deadline
ENGINE_FAREWELL = 5.0  # seconds for engines to end by themselves
SILENCE = 10.0  # seconds in which an API process that serves says something; it does every second


def tell_ready(name: str, url: str, started: float, page: str | None, timeline: Timeline | None) -> None:
    now = time.monotonic()
    where = "" if page is None else f"; open {page} in a browser to try it"
    logger.info("ready: serving %s on %s after %.1f s%s", name, url, now - started, where)
    if timeline is not None:
        logger.debug("ready after %s", timeline.within(started, "command line", "open the API", now))


class FrontProcess:
    """One API process as the hub holds it."""

    def __init__(self, sockets: Sequence[socket.socket]) -> None:
        ours, theirs = socket.socketpair()
        listeners = [one.fileno() for one in sockets]
        with theirs:
            try:
                self.process = subprocess.Popen(
                    [*FRONT, str(os.getpid()), str(theirs.fileno()), ",".join(map(str, listeners)), *with_thread_option()],
                    pass_fds=[theirs.fileno(), *listeners],
                    env=environment(),
                    stdin=subprocess.DEVNULL,
                    process_group=0,  # Ctrl-C is for the hub
                )
            except BaseException:
                ours.close()
                raise
        self.line = wire.Line(ours)
        self.desk: Desk | None = None

    async def wait(self, seconds: float) -> int:
        """How it ended; it is killed if it does not in time."""
        deadline = time.monotonic() + seconds
        while (code := self.process.poll()) is None:
            if time.monotonic() > deadline:
                self.process.kill()
                return self.process.wait()
            await asyncio.sleep(GLANCE / 5)
        return code


class FrontsLaunch:
    def __init__(
        self, engine_args: EngineArgs, settings: ServerArgs, sockets: list[socket.socket], spare: Child | None
    ) -> None:
        self._engine_args, self._settings, self._sockets, self._spare = engine_args, settings, sockets, spare
        self._hub = Hub()
        self._fronts: list[FrontProcess] = []
        self._asked, self._asked_again, self._lost = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._signal = 0
        self._replaced: deque[float] = deque()  # when, within the window
        self._tasks: list[asyncio.Task[Any]] = []

    async def run(self, started: float) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        life, at_once = self._start(self._live(started)), self._start(self._asked_again.wait())
        try:
            await asyncio.wait({life, at_once}, return_when=asyncio.FIRST_COMPLETED)
            if life.done():
                return int(life.result())
            logger.warning("stopping at once")
            return SIGNALLED + self._signal
        finally:
            self._end(kindly=not at_once.done())

    def _on_signal(self, number: int) -> None:
        if self._asked.is_set():
            self._asked_again.set()
        self._signal = number
        self._asked.set()

    def _end(self, kindly: bool) -> None:
        self._asked.set()  # nobody is replaced any more
        for task in self._tasks:
            task.cancel()
        for front in self._fronts:
            front.line.close()
            front.process.kill()
            front.process.wait()
        if self._hub.engines is not None:
            self._hub.engines.stop(ENGINE_FAREWELL if kindly else 0.0)

    # ---- the life of the hub ---------------------------------------------------------------------------------------------

    async def _live(self, started: float) -> int:
        url, count = url_of(self._settings, self._sockets), self._settings.api_server_count
        logger.info("listening on %s with %d API processes, loading %s", url, count, self._engine_args.model)
        self._fronts = [FrontProcess(self._sockets) for _ in range(count)]
        resolving = self._start(self._resolve())
        if not await self._unless_asked(resolving):
            return 0
        config = resolving.result()
        self._hub.engines = engines = start_engines(config, self._hub, COMMAND, self._spare)
        for number, front in enumerate(self._fronts):
            self._begin(front, started, greets=number == 0)
        self._start(engines.run())
        self._start(self._hub.tell())
        ready = self._start(self._wait_ready())
        if not await self._unless_asked(ready):
            logger.info("stopped before the model was loaded")
            return 0
        ready.result()
        tell_ready(config.served_names[0], url, started, page_of(self._settings, self._sockets), None)
        if await self._unless_asked(self._start(self._watch())):
            return await self._mourn()
        return await self._drain()

    async def _resolve(self) -> Config:
        """In a thread that nobody waits for: finding a model may mean fetching it, and that cannot be interrupted."""
        loop = asyncio.get_running_loop()
        made: asyncio.Future[Config] = loop.create_future()

        def tell(config: Config | None, error: Exception | None) -> None:
            if made.cancelled():
                return
            if config is not None:
                made.set_result(config)
            elif error is not None:
                made.set_exception(error)

        def find() -> None:
            config, failure = None, None
            try:
                config = resolve(self._engine_args, lambda: "cpu", describe_unseen)
            except Exception as error:
                failure = error
            with contextlib.suppress(RuntimeError):  # the event loop is gone
                loop.call_soon_threadsafe(tell, config, failure)

        threading.Thread(target=find, name="quire-resolve", daemon=True).start()
        return await made

    async def _wait_ready(self) -> None:
        assert self._hub.engines is not None
        await self._hub.engines.wait_ready()
        while not all(front.desk is not None and front.desk.serving for front in self._fronts):
            if self._lost.is_set():
                raise EngineError("the API processes cannot be started; their last lines say why")
            await asyncio.sleep(GLANCE / 5)

    async def _watch(self) -> None:
        """Until the engines are dead, or API processes were lost too often. One that is silent is lost."""
        looked = time.monotonic()
        while self._hub.engines is not None and self._hub.engines.state != "dead" and not self._lost.is_set():
            await asyncio.sleep(GLANCE)
            now = time.monotonic()
            passed, looked = min(now - looked, 2 * GLANCE), now  # time in which we did not look is not held against anybody
            for front in self._fronts:
                if front.desk is not None and front.desk.serving:
                    front.desk.silent += passed
                    if front.desk.silent > SILENCE:
                        logger.error("API process %d has been silent for %.1f s", front.process.pid, front.desk.silent)
                        front.process.kill()
                        front.desk.silent = 0.0

    # ---- API processes ---------------------------------------------------------------------------------------------------

    def _begin(self, front: FrontProcess, started: float, greets: bool = False) -> None:
        settings = self._settings if greets else replace(self._settings, open=False, sample=None)
        if any(desk.serving for desk in self._hub.desks):  # it takes over what they have, not what was there at the start
            settings = replace(settings, lora_modules=[])
        first = front is self._fronts[0]
        front.desk = self._hub.enter(front.line, lambda name: wire.Begin(self._engine_args, settings, name, started, first))
        self._start(self._attend(front, front.desk))

    async def _attend(self, front: FrontProcess, desk: Desk) -> None:
        async def hear(frame: bytes) -> None:
            await self._hub.hear(desk, frame)

        try:
            await front.line.listen(hear)
        finally:
            self._hub.leave(desk)
        if self._asked.is_set():
            return
        code = await front.wait(LAST_WORDS)
        if self._asked.is_set() or self._hub.engines is None or self._hub.engines.state == "dead":
            return
        logger.error("API process %d ended with %s", front.process.pid, exit_reason(code))
        if self._may_replace():
            fresh = FrontProcess(self._sockets)
            self._fronts[self._fronts.index(front)] = fresh
            logger.warning("another API process is started in its place")
            self._begin(fresh, time.monotonic())
        else:
            logger.critical("API processes were lost %d times, the most allowed: the server ends", len(self._replaced))
            self._lost.set()

    def _may_replace(self) -> bool:
        """As often as engines may be restarted, for each."""
        now, args = time.monotonic(), self._engine_args
        while self._replaced and now - self._replaced[0] > args.engine_restart_window:
            self._replaced.popleft()
        self._replaced.append(now)
        return len(self._replaced) <= args.max_engine_restarts * self._settings.api_server_count

    # ---- the end ---------------------------------------------------------------------------------------------------------

    async def _drain(self) -> int:
        """API processes let their requests finish, and end; then the engines do."""
        for front in self._fronts:
            front.process.terminate()
        seconds = self._settings.shutdown_timeout + LAST_WORDS
        served = [front.desk is not None and front.desk.serving for front in self._fronts]  # others may end as they like
        codes = await asyncio.gather(*(front.wait(seconds) for front in self._fronts))
        dead = self._hub.engines is not None and self._hub.engines.state == "dead"
        return FAILED if dead or any(code and had for code, had in zip(codes, served, strict=True)) else 0

    async def _mourn(self) -> int:
        """The engines are given up, or nobody answers any more. API processes tell their clients, and end."""
        logger.critical("the server ends")
        if self._hub.engines is not None and self._hub.engines.state != "dead":
            for front in self._fronts:
                front.process.terminate()
        await asyncio.gather(*(front.wait(LAST_WORDS) for front in self._fronts))
        return FAILED

    async def _unless_asked(self, task: "asyncio.Task[Any]") -> bool:
        """Waits for the task, and for a signal: True if it was the task that came first."""
        asked = self._start(self._asked.wait())
        await asyncio.wait({task, asked}, return_when=asyncio.FIRST_COMPLETED)
        return task.done()

    def _start(self, work: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        task = asyncio.create_task(work)
        self._tasks.append(task)
        return task
