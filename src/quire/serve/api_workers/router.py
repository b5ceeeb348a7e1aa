"""The router between engines and API processes: it assigns each delta to the process of its request. It handles no text."""

import asyncio
import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Any

from msgspec.structs import replace

from quire.engine import ipc
from quire.engine.handle import EngineHandle, EngineStatus, OneEngine
from quire.features.lora.client import NamedAdapter
from quire.obs.instruments import BoardState, add_states
from quire.obs.metrics import Metrics
from quire.serve.api_workers import wire
from quire.types.engine_snapshot import EngineSnapshot
from quire.types.errors import QuireError, RequestError
from quire.types.outputs import TokenDelta

logger = logging.getLogger(__name__)

REPORT_INTERVAL_S = 0.25  # between two reports of the engines' states
COUNTS_TIMEOUT_S = 1.0  # for other API processes to report their counts; then their latest counts are used
OF_ENGINES = Metrics("quire", "", 1, {}).of_engines


class WorkerConnection:
    """What the router keeps for one API process."""

    def __init__(self, name: str, channel: wire.WorkerChannel) -> None:
        self.name, self.channel = name, channel  # ids of its requests begin with the name
        self.requests: set[str] = set()
        self.watches = False
        self.serving = False  # it takes requests
        self.counts = wire.Counts(0, [])
        self.asked: dict[int, asyncio.Future[int]] = {}  # questions that it has not answered


class Router:
    """An `EngineListener` that also receives messages of API processes. `engines` is set before the first of either."""

    def __init__(self) -> None:
        self.engines: EngineHandle | None = None
        self._workers: dict[str, WorkerConnection] = {}
        self._names, self._questions = itertools.count(1), itertools.count()
        self._ready: dict[int, ipc.Ready] = {}
        self._gone: list[BoardState] = []  # counts of processes that have ended
        self._watched = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._named: dict[str, NamedAdapter] = {}  # adapters, as all API processes know them
        self._claims: dict[str, list[tuple[WorkerConnection, int]]] = {}  # by name: the owner, then the processes that wait

    @property
    def workers(self) -> list[WorkerConnection]:
        return list(self._workers.values())

    def enter(self, channel: wire.WorkerChannel, begin: Callable[[str], wire.Begin]) -> WorkerConnection:
        """An API process that has just been started."""
        name = f"{next(self._names)}."
        worker = self._workers[name] = WorkerConnection(name, channel)
        channel.post(begin(name))
        for known, adapter in self._named.items():
            channel.post(wire.Named(-1, known, adapter))
        for engine, ready in self._ready.items():
            channel.post(wire.EngineReady(engine, ready, self._views()[engine]))
        return worker

    def leave(self, worker: WorkerConnection) -> None:
        """The process has ended: abort its requests."""
        del self._workers[worker.name]
        worker.channel.close()
        for name in list(self._claims):
            self._yield(worker, name)
        for number in list(worker.asked):
            _answer(worker, number)
        if worker.counts.boards:
            self._gone = add_states(self._gone, worker.counts.boards, OF_ENGINES) if self._gone else worker.counts.boards
        if self.engines is not None:
            self.engines.abort(worker.requests)
            self._watch()

    async def report_states(self) -> None:
        """Send the engines' states regularly, and whenever one changes."""
        sent, age = None, REPORT_INTERVAL_S
        while True:
            views = self._views()
            states = [(view.state, view.pid) for view in views]
            if states != sent or age >= REPORT_INTERVAL_S:
                sent, age = states, 0.0
                for worker in self.workers:
                    worker.channel.post(wire.EnginesSeen(views))
            await asyncio.sleep(REPORT_INTERVAL_S / 5)
            age += REPORT_INTERVAL_S / 5

    # ---- from engines ----------------------------------------------------------------------------------------------------

    def on_ready(self, ready: ipc.Ready, engine: int = 0) -> None:
        self._ready[engine] = ready
        for adapter in self._named.values():
            if adapter.pinned and self.engines is not None:
                self.engines.engines[engine].pin_again(adapter.ref)
        view = self._views()[engine]
        for worker in self.workers:
            worker.channel.post(wire.EngineReady(engine, ready, view))

    def on_deltas(self, deltas: Sequence[TokenDelta], engine: int = 0) -> None:
        shares: dict[str, list[TokenDelta]] = {}
        for delta in deltas:
            shares.setdefault(_owner(delta.request_id), []).append(delta)
        for name, share in shares.items():
            worker = self._workers.get(name)
            if worker is not None:
                worker.requests.difference_update(one.request_id for one in share if one.finish_reason is not None)
                worker.channel.post(wire.Deltas(engine, share))

    def on_step(self, report: ipc.StepReport, engine: int = 0) -> None:
        """The engines' clients keep the latest statistics; `report_states` sends them."""

    def on_snapshot(self, snapshot: EngineSnapshot, engine: int = 0) -> None:
        for worker in self.workers:
            if worker.watches:
                worker.channel.post(wire.Shown(engine, snapshot))

    def on_refused(self, engine_id: str, error: QuireError) -> None:
        worker = self._workers.get(_owner(engine_id))
        if worker is not None:
            worker.requests.discard(engine_id)
            parameter = error.parameter if isinstance(error, RequestError) else None
            worker.channel.post(ipc.Refused(engine_id, type(error).__name__, str(error), parameter))

    # ---- from API processes ----------------------------------------------------------------------------------------------

    async def on_frame(self, worker: WorkerConnection, frame: bytes) -> None:
        engines = self.engines
        assert engines is not None
        match wire.decode_up(frame):
            case ipc.Add() as command:
                self._add(worker, engines, command)
            case ipc.Abort(ids):
                worker.requests.difference_update(ids)
                engines.abort(ids)
            case ipc.SetWatched(on):
                worker.watches = on
                self._watch()
            case ipc.CallMethod(number, method, args):
                self._start(self._call(worker, number, engines.call(method, *args)))
                await asyncio.sleep(0)  # send this call before the next message is handled
            case wire.LoadOn(number, engine, ref, pinned):
                self._start(self._call(worker, number, engines.engines[engine].load_adapter(ref, pinned)))
                await asyncio.sleep(0)
            case wire.Notify(engine, method, args):
                engines.engines[engine].notify(method, *args)
            case wire.Claim(number, name):
                waiting = self._claims.setdefault(name, [])
                waiting.append((worker, number))
                if len(waiting) == 1:
                    worker.channel.post(ipc.Reply(number, None))
            case wire.Yield(name):
                self._yield(worker, name)
            case wire.Name(number, name, adapter):
                self._start(self._publish_name(worker, number, name, adapter))
                await asyncio.sleep(0)
            case wire.Noted(number):
                _answer(worker, number)
            case wire.Aborted(number, requests):
                _answer(worker, number, requests)
            case wire.AbortInOthers(number, answers):
                self._start(self._abort_in_others(worker, number, answers))
            case wire.Counts() as counts:
                worker.counts = counts
                _answer(worker, counts.id)
            case wire.Gather(number):
                self._start(self._gather(worker, number))
            case wire.Open():
                worker.serving = True

    def _add(self, worker: WorkerConnection, engines: EngineHandle, command: ipc.Add) -> None:
        requests = command.restored()
        worker.requests.update(request.id for request in requests)
        try:
            engines.add(requests)
        except Exception as error:
            refusal = error if isinstance(error, QuireError) else QuireError(f"{type(error).__name__}: {error}")
            for request in requests:
                self.on_refused(request.id, refusal)

    async def _call(self, worker: WorkerConnection, number: int, work: Any) -> None:
        try:
            reply = ipc.Reply(number, await work)
        except RequestError as error:
            reply = ipc.Reply(number, None, str(error), type(error).__name__, error.parameter)
        except QuireError as error:
            reply = ipc.Reply(number, None, str(error))
        worker.channel.post(reply)

    async def _gather(self, asking: WorkerConnection, number: int) -> None:
        others = [worker for worker in self.workers if worker is not asking and worker.serving]
        await self._ask(others, wire.SendCounts)
        boards = [worker.counts.boards for worker in others if worker.name in self._workers and worker.counts.boards]
        if self._gone:
            boards.append(self._gone)
        there = [worker.counts for worker in others if worker.name in self._workers]
        waiting, running = (tuple({name for counts in there for name in counts.adapters[i]}) for i in (0, 1))
        asking.channel.post(wire.Gathered(number, sum(worker.counts.open for worker in others), boards, (waiting, running)))

    async def _abort_in_others(self, asking: WorkerConnection, number: int, answers: list[str]) -> None:
        others = [worker for worker in self.workers if worker is not asking and worker.serving]
        aborted = await self._ask(others, lambda question: wire.AbortNamed(question, answers))
        asking.channel.post(ipc.Reply(number, sum(aborted)))

    async def _publish_name(self, asking: WorkerConnection, number: int, name: str, adapter: NamedAdapter | None) -> None:
        """A process that is starting receives the name before it serves."""
        self._named.pop(name, None)
        if adapter is not None:
            self._named[name] = adapter
        others = [worker for worker in self.workers if worker is not asking]
        for worker in others:
            if not worker.serving:
                worker.channel.post(wire.Named(-1, name, adapter))
        await self._ask([worker for worker in others if worker.serving], lambda question: wire.Named(question, name, adapter))
        asking.channel.post(ipc.Reply(number, None))

    async def _ask(self, workers: Sequence[WorkerConnection], question: Callable[[int], Any]) -> list[int]:
        """Return the answers that arrive within COUNTS_TIMEOUT_S."""
        number = next(self._questions)
        for worker in workers:
            worker.asked[number] = asyncio.get_running_loop().create_future()
            worker.channel.post(question(number))
        waiting = [worker.asked[number] for worker in workers]
        if waiting:
            await asyncio.wait(waiting, timeout=COUNTS_TIMEOUT_S)
        for worker in workers:
            worker.asked.pop(number, None)
        return [answer.result() for answer in waiting if answer.done()]

    def _yield(self, worker: WorkerConnection, name: str) -> None:
        """Release a claim, and grant it to the next process. A process claims a name once at a time."""
        before = self._claims.pop(name, [])
        if waiting := [one for one in before if one[0] is not worker]:
            self._claims[name] = waiting
            if waiting[0] is not before[0]:
                waiting[0][0].channel.post(ipc.Reply(waiting[0][1], None))

    # ---- inside ----------------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        watched = any(worker.watches for worker in self.workers)
        if watched != self._watched and self.engines is not None:
            self._watched = watched
            self.engines.watch(watched)

    def _start(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _views(self) -> list[EngineStatus]:
        return [] if self.engines is None else [_status(one, i) for i, one in enumerate(self.engines.engines)]


def _answer(worker: WorkerConnection, number: int, value: int = 0) -> None:
    """Complete a question that the process has answered, or never will."""
    if (asked := worker.asked.pop(number, None)) is not None and not asked.done():
        asked.set_result(value)


def _owner(engine_id: str) -> str:
    return engine_id[: engine_id.index(".") + 1]


def _status(one: OneEngine, number: int) -> EngineStatus:
    status = one.status
    return status if status.stats is None else replace(status, stats=replace(status.stats, engine=number))
