"""The hub: engines on one side, API processes on the other. It knows which process has which request, and nothing of text."""

import asyncio
import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from quire.engine import ipc
from quire.engine.adapter_names import NamedAdapter
from quire.engine.client import EngineClient
from quire.engine.view import Engines
from quire.obs.instruments import BoardState, add_states
from quire.obs.metrics import Metrics
from quire.serve.fronts import wire
from quire.types.errors import QuireError, RequestError
from quire.types.outputs import TokenDelta
from quire.types.sight import Sight

logger = logging.getLogger(__name__)

TELL_EVERY = 0.25  # seconds between two views of the engines
GATHERING = 1.0  # seconds that others have to tell what they counted; then what they said last counts
OF_ENGINES = Metrics("quire", "", 1, {}).of_engines


class Desk:
    """What the hub keeps for one API process."""

    def __init__(self, name: str, line: wire.Line) -> None:
        self.name, self.line = name, line  # ids of its requests begin with the name
        self.requests: set[str] = set()
        self.watches = False
        self.serving = False  # it takes requests
        self.counts = wire.Counts(0, [])
        self.asked: dict[int, asyncio.Event] = {}  # who waits for its counts
        self.silent = 0.0  # seconds


class Hub:
    """A `FleetHearer`. `engines` is set before anything is heard or asked."""

    def __init__(self) -> None:
        self.engines: Engines | None = None
        self._desks: dict[str, Desk] = {}
        self._names, self._questions = itertools.count(1), itertools.count()
        self._ready: dict[int, ipc.Ready] = {}
        self._gone: list[BoardState] = []  # what processes that are gone had counted
        self._watched = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._named: dict[str, NamedAdapter] = {}  # adapters, as all API processes know them
        self._claims: dict[str, list[tuple[Desk, int]]] = {}  # name -> who changes it, and who waits for that

    @property
    def desks(self) -> list[Desk]:
        return list(self._desks.values())

    def enter(self, line: wire.Line, begin: Callable[[str], wire.Begin]) -> Desk:
        """An API process that has just been started."""
        name = f"{next(self._names)}."
        desk = self._desks[name] = Desk(name, line)
        line.send(begin(name))
        for known, adapter in self._named.items():
            line.send(wire.Named(-1, known, adapter))
        for engine, ready in self._ready.items():
            line.send(wire.EngineReady(engine, ready, self._views()[engine]))
        return desk

    def leave(self, desk: Desk) -> None:
        """It is gone: nobody waits for its requests any more."""
        del self._desks[desk.name]
        desk.line.close()
        for name in list(self._claims):
            self._yield(desk, name)
        for asked in desk.asked.values():
            asked.set()
        if desk.counts.boards:
            self._gone = add_states(self._gone, desk.counts.boards, OF_ENGINES) if self._gone else desk.counts.boards
        if self.engines is not None:
            self.engines.abort(desk.requests)
            self._watch()

    async def tell(self) -> None:
        """How the engines are, now and then and whenever that changes."""
        told, age = None, TELL_EVERY
        while True:
            views = self._views()
            states = [(view.state, view.pid) for view in views]
            if states != told or age >= TELL_EVERY:
                told, age = states, 0.0
                for desk in self.desks:
                    desk.line.send(wire.EnginesSeen(views))
            await asyncio.sleep(TELL_EVERY / 5)
            age += TELL_EVERY / 5

    # ---- what engines say ------------------------------------------------------------------------------------------------

    def on_ready(self, ready: ipc.Ready, engine: int = 0) -> None:
        self._ready[engine] = ready
        for adapter in self._named.values():
            if adapter.pinned and self.engines is not None:
                self.engines.engines[engine].pin_again(adapter.ref)
        view = self._views()[engine]
        for desk in self.desks:
            desk.line.send(wire.EngineReady(engine, ready, view))

    def on_deltas(self, deltas: Sequence[TokenDelta], engine: int = 0) -> None:
        shares: dict[str, list[TokenDelta]] = {}
        for delta in deltas:
            shares.setdefault(_owner(delta.request_id), []).append(delta)
        for name, share in shares.items():
            desk = self._desks.get(name)
            if desk is not None:
                desk.requests.difference_update(one.request_id for one in share if one.finish_reason is not None)
                desk.line.send(wire.Deltas(engine, share))

    def on_step(self, report: ipc.StepReport, engine: int = 0) -> None:
        """The engines' clients keep what is told."""

    def on_seen(self, sight: Sight, engine: int = 0) -> None:
        for desk in self.desks:
            if desk.watches:
                desk.line.send(wire.Shown(engine, sight))

    def on_refused(self, engine_id: str, error: QuireError) -> None:
        desk = self._desks.get(_owner(engine_id))
        if desk is not None:
            desk.requests.discard(engine_id)
            parameter = error.parameter if isinstance(error, RequestError) else None
            desk.line.send(ipc.Refused(engine_id, type(error).__name__, str(error), parameter))

    # ---- what API processes say ------------------------------------------------------------------------------------------

    async def hear(self, desk: Desk, frame: bytes) -> None:
        engines = self.engines
        assert engines is not None
        desk.silent = 0.0
        match wire.decode_up(frame):
            case ipc.Add() as command:
                self._add(desk, engines, command)
            case ipc.Abort(ids):
                desk.requests.difference_update(ids)
                engines.abort(ids)
            case ipc.Watch(on):
                desk.watches = on
                self._watch()
            case ipc.CallMethod(number, method, args):
                self._start(self._call(desk, number, engines.call(method, *args)))
                await asyncio.sleep(0)  # it is sent before what comes next
            case wire.LoadOn(number, engine, ref, pinned):
                self._start(self._call(desk, number, engines.engines[engine].load_adapter(ref, pinned)))
                await asyncio.sleep(0)
            case wire.TellEngine(engine, method, args):
                engines.engines[engine].tell(method, *args)
            case wire.Claim(number, name):
                waiting = self._claims.setdefault(name, [])
                waiting.append((desk, number))
                if len(waiting) == 1:
                    desk.line.send(ipc.Reply(number, None))
            case wire.Yield(name):
                self._yield(desk, name)
            case wire.Name(number, name, adapter):
                self._start(self._tell_name(desk, number, name, adapter))
                await asyncio.sleep(0)
            case wire.Noted(number):
                if number in desk.asked:
                    desk.asked[number].set()
            case wire.Counts() as counts:
                desk.counts = counts
                if counts.id in desk.asked:
                    desk.asked[counts.id].set()
            case wire.Gather(number):
                self._start(self._gather(desk, number))
            case wire.Open():
                desk.serving = True

    def _add(self, desk: Desk, engines: Engines, command: ipc.Add) -> None:
        requests = command.restored()
        desk.requests.update(request.id for request in requests)
        try:
            engines.add(requests)
        except Exception as error:
            refusal = error if isinstance(error, QuireError) else QuireError(f"{type(error).__name__}: {error}")
            for request in requests:
                self.on_refused(request.id, refusal)

    async def _call(self, desk: Desk, number: int, work: Any) -> None:
        try:
            reply = ipc.Reply(number, await work)
        except RequestError as error:
            reply = ipc.Reply(number, None, str(error), type(error).__name__, error.parameter)
        except QuireError as error:
            reply = ipc.Reply(number, None, str(error))
        desk.line.send(reply)

    async def _gather(self, asking: Desk, number: int) -> None:
        others = [desk for desk in self.desks if desk is not asking and desk.serving]
        await self._ask(others, wire.TellCounts)
        boards = [desk.counts.boards for desk in others if desk.name in self._desks and desk.counts.boards]
        if self._gone:
            boards.append(self._gone)
        there = [desk.counts for desk in others if desk.name in self._desks]
        waiting, running = (tuple({name for counts in there for name in counts.adapters[i]}) for i in (0, 1))
        asking.line.send(wire.Gathered(number, sum(desk.counts.open for desk in others), boards, (waiting, running)))

    async def _tell_name(self, asking: Desk, number: int, name: str, adapter: NamedAdapter | None) -> None:
        """Whoever is only starting hears it before it serves."""
        self._named.pop(name, None)
        if adapter is not None:
            self._named[name] = adapter
        others = [desk for desk in self.desks if desk is not asking]
        for desk in others:
            if not desk.serving:
                desk.line.send(wire.Named(-1, name, adapter))
        await self._ask([desk for desk in others if desk.serving], lambda question: wire.Named(question, name, adapter))
        asking.line.send(ipc.Reply(number, None))

    async def _ask(self, desks: Sequence[Desk], question: Callable[[int], Any]) -> None:
        """Waits until they have answered, within reason."""
        number = next(self._questions)
        for desk in desks:
            desk.asked[number] = asyncio.Event()
            desk.line.send(question(number))
        waiting = [asyncio.ensure_future(desk.asked[number].wait()) for desk in desks]
        if waiting:
            await asyncio.wait(waiting, timeout=GATHERING)
        for desk, task in zip(desks, waiting, strict=True):
            task.cancel()
            del desk.asked[number]

    def _yield(self, desk: Desk, name: str) -> None:
        """If it was about to change it, the next may. A process claims a name once at a time."""
        before = self._claims.pop(name, [])
        if waiting := [one for one in before if one[0] is not desk]:
            self._claims[name] = waiting
            if waiting[0] is not before[0]:
                waiting[0][0].line.send(ipc.Reply(waiting[0][1], None))

    # ---- inside ----------------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        wanted = any(desk.watches for desk in self.desks)
        if wanted != self._watched and self.engines is not None:
            self._watched = wanted
            self.engines.watch(wanted)

    def _start(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _views(self) -> list[wire.EngineSeen]:
        return [] if self.engines is None else [_view(one, i) for i, one in enumerate(self.engines.engines)]


def _owner(engine_id: str) -> str:
    return engine_id[: engine_id.index(".") + 1]


def _view(one: Any, number: int) -> wire.EngineSeen:
    assert isinstance(one, EngineClient)
    stats = None if one.stats is None else msgspec.structs.replace(one.stats, engine=number)
    error = None if one.supervisor.error is None else str(one.supervisor.error)
    return wire.EngineSeen(
        one.state, one.heartbeat_age, one.busy_for, one.restarts, one.replayed, one.last_loss, one.pid, one.pages, stats, error
    )
