"""Several engine processes as one engine core that its caller steps: data parallelism for `LLM`.

    caller's thread    add, abort, step                ┆    its own thread    an event loop that runs the router
                       step ◄── queue of deltas ◄──────┆───── on_deltas ◄───── EngineRouter ═ engine processes

A lost engine is restarted here, too, and its requests go on. Does not import torch.
"""

import asyncio
import queue
import threading
import weakref
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import Any

from quire.config.config import Config
from quire.engine import ipc
from quire.engine.assemble import make_grammars
from quire.engine.child import COMMAND
from quire.engine.client import EngineClient, as_started, engine_args
from quire.engine.layouts import whole_layout
from quire.engine.router import EngineRouter
from quire.engine.timeline import Stopwatch
from quire.features.lora.client import load_everywhere
from quire.features.structured.constraints import GrammarLanes
from quire.sched.limits import RequestLimits
from quire.types.adapter import AdapterRef
from quire.types.engine_snapshot import EngineSnapshot
from quire.types.errors import EngineDead, QuireError, RequestError
from quire.types.outputs import TokenDelta
from quire.types.request import EngineRequest
from quire.types.stats import NOTHING, Stats, together
from quire.types.structured import StructuredOutputsParams

TURN = 0.1  # seconds that a step waits for news; Ctrl-C comes between two steps
FAREWELL = 5.0  # seconds for engines to end by themselves


class _Inbox:
    """What engines said, until the caller takes it. It knows nothing of who that is, so that whoever is forgotten can go."""

    def __init__(self) -> None:
        self.news: queue.SimpleQueue[tuple[int, Sequence[TokenDelta]]] = queue.SimpleQueue()
        self.ready: dict[int, ipc.Ready] = {}
        self.engines: list[EngineClient] = []
        self.pinned: dict[str, AdapterRef] = {}  # adapters, by version

    def on_ready(self, ready: ipc.Ready, engine: int = 0) -> None:
        self.ready[engine] = ready
        for ref in self.pinned.values():
            self.engines[engine].pin_again(ref)

    def on_deltas(self, deltas: Sequence[TokenDelta], engine: int = 0) -> None:
        self.news.put((engine, deltas))

    def on_step(self, report: ipc.StepReport, engine: int = 0) -> None:
        """The clients keep what is asked for."""

    def on_snapshot(self, snapshot: EngineSnapshot, engine: int = 0) -> None:
        """Nobody watches."""

    def on_refused(self, engine_id: str, error: QuireError) -> None:
        self.news.put((0, [TokenDelta(engine_id, [], "error", error=str(error))]))


class _Grammars:
    """Grammars are followed by the engines; whether one can be compiled is asked before anything runs."""

    def __init__(self, lanes: GrammarLanes) -> None:
        self._lanes = lanes
        self.stop = lanes.stop

    def check(self, params: StructuredOutputsParams) -> None:
        self._lanes.check(params)


class Replicas:
    """What `LLMEngine` asks of an `EngineCore`. Construction returns when all engines are ready."""

    def __init__(self, config: Config, watch: Stopwatch, command: Sequence[str] = COMMAND) -> None:
        inbox = self._inbox = _Inbox()
        self._router = EngineRouter(engine_args(config), inbox, command, serving=False)
        inbox.engines = self._router.engines
        self._loop = asyncio.new_event_loop()
        ended = threading.Event()
        threading.Thread(target=_run, args=(self._loop, ended), name="quire-engines", daemon=True).start()
        self._finalizer = weakref.finalize(self, _end, self._loop, self._router, ended)
        self._running = asyncio.run_coroutine_threadsafe(self._router.run(), self._loop)
        try:
            asyncio.run_coroutine_threadsafe(self._router.wait_ready(), self._loop).result()
        except BaseException:
            self._finalizer()
            raise
        ready = list(inbox.ready.values())
        self.config = as_started(config, ready[0])
        self.pages, self.max_model_len = min(each.pages for each in ready), min(each.max_model_len for each in ready)
        self._limits = RequestLimits(
            whole_layout(self.config),
            self.pages,
            self.max_model_len,
            self.config.max_batched_tokens,
            config.chunk_cap,
            config.chunked,
        )
        self.constraints = _Grammars(make_grammars(config, 0))
        self._open: set[str] = set()
        self._fresh: list[EngineRequest] = []  # to be sent with the next step
        self.number = 0  # of the engine whose deltas the latest step returned
        watch.lap("engines")
        self.timeline = watch.read()

    @property
    def engines(self) -> list[EngineClient]:
        return self._router.engines

    @property
    def restarts(self) -> int:
        return self._router.restarts

    @property
    def replayed(self) -> int:
        return self._router.replayed

    @property
    def stats(self) -> Stats:
        return together([each.stats or NOTHING for each in self.engines])

    @property
    def has_unfinished(self) -> bool:
        return bool(self._open)

    def add(self, request: EngineRequest) -> None:
        """Raises RequestError for what could never run."""
        self._router.check()
        self._limits.admissible_length(request)
        self._open.add(request.id)
        self._fresh.append(request)

    def abort(self, ids: Iterable[str]) -> None:
        """No more is heard of these requests. Unknown ids are ignored."""
        gone = {name for name in ids if name in self._open}
        if gone:
            self._open -= gone
            self._fresh = [request for request in self._fresh if request.id not in gone]
            self._ask(self._router.abort, list(gone))

    def release(self, ids: Iterable[str]) -> None:
        names = list(ids)
        if names:
            self._call("release", names)

    def step(self) -> list[TokenDelta]:
        """What engines have said; waits a moment if they said nothing."""
        if self._fresh:
            fresh, self._fresh = self._fresh, []
            self._ask(self._router.add, fresh)
        if self._router.state == "dead" and self._inbox.news.empty():
            raise EngineDead("; ".join(str(each.supervisor.error) for each in self.engines))
        try:
            self.number, deltas = self._inbox.news.get(timeout=TURN)
        except queue.Empty:
            return []
        known = [delta for delta in deltas if delta.request_id in self._open]
        self._open -= {delta.request_id for delta in known if delta.finish_reason is not None}
        return known

    def reset_prefix_cache(self, preempt_running: bool = False) -> bool:
        return bool(self._call("reset_prefix_cache", preempt_running))

    def load_adapter(self, ref: AdapterRef, pinned: bool) -> None:
        """On every engine; raises why it cannot be."""
        loading = load_everywhere(self.engines, ref, pinned)
        try:
            asyncio.run_coroutine_threadsafe(loading, self._loop).result()
        except RequestError:
            self.retire_adapter(ref.version)
            raise
        if pinned:
            self._inbox.pinned[ref.version] = ref

    def retire_adapter(self, version: str) -> None:
        self._inbox.pinned.pop(version, None)
        self._call("retire_adapter", version)

    def stop(self) -> None:
        self._finalizer()
        self.constraints.stop()

    def _call(self, method: str, *args: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(self._router.call(method, *args), self._loop).result()

    def _ask(self, method: Any, *args: Any) -> None:
        """In the router's thread; returns when it is done."""
        done: Future[None] = Future()

        def run() -> None:
            try:
                done.set_result(method(*args))
            except BaseException as error:
                done.set_exception(error)

        self._loop.call_soon_threadsafe(run)
        done.result()


def _run(loop: asyncio.AbstractEventLoop, ended: threading.Event) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))  # a gather takes several turns to end
        loop.close()
    finally:
        ended.set()


def _end(loop: asyncio.AbstractEventLoop, router: EngineRouter, ended: threading.Event) -> None:
    """When nobody holds the engines any more, and at the latest when this process ends."""

    def stop() -> None:
        try:
            router.stop(FAREWELL)
        finally:
            loop.stop()

    loop.call_soon_threadsafe(stop)
    ended.wait(2 * FAREWELL)
