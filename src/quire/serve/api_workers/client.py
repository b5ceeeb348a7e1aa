"""The engines as an API process uses them through the router, with the interface of `EngineClient`."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any
from weakref import WeakValueDictionary

from quire.async_llm import AsyncLLM
from quire.config.resolve import resolve
from quire.device.registry import describe_unseen
from quire.engine import ipc
from quire.engine.client import check_number
from quire.engine.handle import EngineGroup, EngineListener, EngineStatus, EngineView
from quire.features.lora.client import AdapterNames, NamedAdapter
from quire.obs.instruments import Board, take
from quire.obs.metrics import AdaptersInUse
from quire.proc.messages import PendingCalls
from quire.serve.api_workers import wire
from quire.types.adapter import AdapterRef
from quire.types.errors import EngineDead
from quire.types.outputs import TokenDelta
from quire.types.request import EngineRequest
from quire.types.stats import Stats

ROUTER_GONE = "the server's main process is gone"


class EngineMirror(EngineView):
    """One engine of the router, as of its latest status."""

    def __init__(self, client: "RouterClient", number: int) -> None:
        self._client, self._number = client, number
        self._status = EngineStatus(received_at=time.monotonic())

    def update(self, status: EngineStatus) -> None:
        self._status = status

    @property
    def status(self) -> EngineStatus:
        return self._status

    @property
    def engines(self) -> "list[EngineMirror]":
        return [self]

    @property
    def pages(self) -> int:
        return self._status.pages

    @property
    def stats(self) -> Stats | None:
        return self._status.stats

    async def load_adapter(self, ref: AdapterRef, pinned: bool) -> None:
        await self._client.load_adapter(self._number, ref, pinned)

    def notify(self, method: str, *args: Any) -> None:
        self._client.notify(self._number, method, *args)

    def pin_again(self, ref: AdapterRef) -> None:
        """The router does so itself."""


class SharedNames:
    """Adapter names, equal in all API processes. The router grants each change; it is complete when all processes have it."""

    def __init__(self, router: "RouterClient") -> None:
        self._router = router
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    @asynccontextmanager
    async def alone(self, name: str) -> AsyncIterator[None]:
        lock = self._locks.setdefault(name, asyncio.Lock())
        async with lock:  # in this process
            try:
                await self._router.ask(lambda number: wire.Claim(number, name))
                yield
            finally:
                self._router.post(wire.Yield(name))

    async def publish(self, name: str, adapter: NamedAdapter | None) -> None:
        await self._router.ask(lambda number: wire.Name(number, name, adapter))


class RouterClient(EngineGroup):
    """The engines of the router. `counted` returns this process's metrics and its number of open requests."""

    def __init__(self, channel: wire.WorkerChannel, engines: int, listener: EngineListener) -> None:
        self._channel, self._listener = channel, listener
        self.engines: list[EngineMirror] = [EngineMirror(self, number) for number in range(engines)]
        self.counted: Callable[[], wire.Counts] = lambda: wire.Counts(0, [])
        self.names: AdapterNames | None = None  # of this process
        self.abort_here: Callable[[list[str]], Awaitable[int]] | None = None  # by the ids of answers, in this process
        self._open: set[str] = set()
        self._calls = PendingCalls()
        self._ready = asyncio.Event()
        self._gone = False  # the router has ended, or this client was stopped

    # ---- state -----------------------------------------------------------------------------------------------------------

    @property
    def status(self) -> EngineStatus:
        return EngineStatus("dead", error=ROUTER_GONE) if self._gone else super().status

    async def wait_ready(self) -> None:
        await self._ready.wait()
        self.check()

    async def run(self) -> None:
        """Receive messages from the router until it ends."""
        try:
            await self._channel.listen(self._on_frame)
        finally:
            self._end("error", ROUTER_GONE)

    # ---- requests and calls ----------------------------------------------------------------------------------------------

    def add(self, requests: Iterable[EngineRequest]) -> None:
        self.check()
        fresh = list(requests)
        self._channel.post(ipc.add(fresh))
        self._open.update(request.id for request in fresh)

    def abort(self, ids: Iterable[str]) -> None:
        gone = [name for name in ids if name in self._open]
        self._open.difference_update(gone)
        if gone:
            self._channel.post(ipc.Abort(gone))

    def watch(self, watched: bool) -> None:
        self._channel.post(ipc.SetWatched(watched))

    async def call(self, method: str, *args: Any) -> Any:
        return await self.ask(lambda number: ipc.CallMethod(number, method, list(args)))

    async def load_adapter(self, engine: int, ref: AdapterRef, pinned: bool) -> None:
        await self.ask(lambda number: wire.LoadOn(number, engine, ref, pinned))

    def notify(self, engine: int, method: str, *args: Any) -> None:
        self._channel.post(wire.Notify(engine, method, list(args)))

    def post(self, frame: Any) -> None:
        self._channel.post(frame)

    async def gather(self) -> wire.Gathered:
        """Return the counts of the other API processes."""
        found = await self.ask(wire.Gather)
        assert isinstance(found, wire.Gathered)
        return found

    async def abort_in_others(self, answers: list[str]) -> int:
        """Abort requests of the other API processes by the ids of their answers; return how many were aborted."""
        return int(await self.ask(lambda number: wire.AbortInOthers(number, answers)))

    def send_open(self) -> None:
        """Report that this process takes requests."""
        self._channel.post(wire.Open())

    def send_counts(self, asked: int = -1) -> None:
        counts = self.counted()
        counts.id = asked
        self._channel.post(counts)

    def check(self, engine: int | None = None) -> None:
        check_number(engine, len(self.engines))
        if self._gone:
            raise EngineDead(ROUTER_GONE)
        dead = [one.status.error for one in (self.engines if engine is None else [self.engines[engine]]) if one.state == "dead"]
        if len(dead) == (len(self.engines) if engine is None else 1):
            raise EngineDead(str(dead[0]))

    def stop(self, timeout: float) -> None:  # noqa: ARG002
        """Open requests end with `abort`. The engines are the router's."""
        if not self._gone:
            self.send_counts()
        self._end("abort", None)
        self._channel.close()

    # ---- messages from the router ----------------------------------------------------------------------------------------

    async def _on_frame(self, frame: bytes) -> None:
        match wire.decode_down(frame):
            case wire.Deltas(engine, deltas):
                self._open.difference_update(one.request_id for one in deltas if one.finish_reason is not None)
                self._listener.on_deltas(deltas, engine)
                await asyncio.sleep(0)
            case wire.EnginesSeen(engines):
                for number, (mirror, status) in enumerate(zip(self.engines, engines, strict=True)):
                    mirror.update(status)
                    if status.stats is not None:
                        self._listener.on_step(ipc.StepReport([], status.stats, 0), number)
                if super().status.state == "dead":
                    self._ready.set()
            case wire.EngineReady(engine, ready, status):
                self.engines[engine].update(status)
                self._listener.on_ready(ready, engine)
                if all(one.state != "starting" for one in self.engines):
                    self._ready.set()
            case wire.Shown(engine, snapshot):
                self._listener.on_snapshot(snapshot, engine)
            case ipc.Refused() as refused:
                self._open.discard(refused.id)
                self._listener.on_refused(refused.id, ipc.request_error(refused))
            case ipc.Reply(number, value, error) as reply:
                self._calls.resolve(number, value, None if error is None else ipc.reply_error(reply))
            case wire.Gathered() as gathered:
                self._calls.resolve(gathered.id, gathered)
            case wire.Named(number, name, adapter):
                if self.names is not None:
                    self.names.apply_change(name, adapter)
                self._channel.post(wire.Noted(number))
            case wire.SendCounts(number):
                self.send_counts(number)
            case wire.AbortNamed(number, answers):
                aborted = 0 if self.abort_here is None else await self.abort_here(answers)
                self._channel.post(wire.Aborted(number, aborted))
            case wire.Begin():
                raise RuntimeError("an API process is started only once")

    async def ask(self, question: Callable[[int], Any]) -> Any:
        """Post the message that `question` makes of the call's number, and return the reply."""
        self.check()
        return await self._calls.ask(lambda number: self._channel.post(question(number)))

    def _end(self, reason: Any, why: str | None) -> None:
        if self._gone:
            return
        self._gone = True
        self._ready.set()
        self._calls.fail_all(EngineDead("the server was shut down"))
        names, self._open = self._open, set()
        if names:
            self._listener.on_deltas([TokenDelta(name, [], reason, error=why) for name in names])


KEYS = 1 << 16  # adapter keys: a process draws its own number plus multiples of this
COUNTS_INTERVAL_S = 1.0  # a process that is killed loses at most these counts


class ApiWorker:
    def __init__(self, begin: wire.Begin, channel: wire.WorkerChannel) -> None:
        self.begin, self._channel = begin, channel
        self.router: RouterClient | None = None

    def make(self) -> AsyncLLM:
        config = resolve(self.begin.args, lambda: "cpu", describe_unseen)
        return AsyncLLM(config, connect=self._connect, name=self.begin.name, share=self._share)

    def _share(self, names: AdapterNames) -> SharedNames:
        assert self.router is not None
        names.number(int(self.begin.name.rstrip(".")), KEYS)
        self.router.names = names
        return SharedNames(self.router)

    async def send_counts(
        self, open_requests: Callable[[], int], boards: Sequence[Board], adapters: Callable[[], AdaptersInUse] | None
    ) -> None:
        """Report that this process takes requests, then send its counts regularly."""
        router = self.router
        assert router is not None

        def count() -> wire.Counts:
            _, waiting, running = (0, (), ()) if adapters is None else adapters()
            return wire.Counts(open_requests(), [take(board) for board in boards], (waiting, running))

        router.counted = count
        router.send_open()
        with contextlib.suppress(EngineDead):
            while True:
                await asyncio.sleep(COUNTS_INTERVAL_S)
                router.send_counts()

    def _connect(self, listener: EngineListener) -> RouterClient:
        self.router = RouterClient(self._channel, self.begin.args.data_parallel_size, listener)
        return self.router
