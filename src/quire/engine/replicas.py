"""Several engine processes as one engine core that its caller steps: data parallelism for `LLM`.

    caller's thread    add, abort, step                ┆    own thread        an event loop that runs the router
                       step ◄── queue of deltas ◄──────┆───── on_deltas ◄───── EngineRouter ═ engine processes

A lost engine is restarted, and its requests continue. Does not import torch.
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

STEP_WAIT_S = 0.1  # seconds that a step waits for deltas; Ctrl-C comes between two steps
STOP_TIMEOUT_S = 5.0  # seconds for engines to end by themselves


class _Inbox:
    """Reports of engines until the caller takes them. It does not refer to the caller, so that a forgotten `LLM` is freed."""

    def __init__(self) -> None:
        self.deltas: queue.SimpleQueue[tuple[int, Sequence[TokenDelta]]] = queue.SimpleQueue()
        self.ready: dict[int, ipc.Ready] = {}
        self.engines: list[EngineClient] = []
        self.pinned: dict[str, AdapterRef] = {}  # adapters, by version

    def on_ready(self, ready: ipc.Ready, engine: int = 0) -> None:
        self.ready[engine] = ready
        for ref in self.pinned.values():
            self.engines[engine].pin_again(ref)

    def on_deltas(self, deltas: Sequence[TokenDelta], engine: int = 0) -> None:
        self.deltas.put((engine, deltas))

    def on_step(self, report: ipc.StepReport, engine: int = 0) -> None:
        """Do nothing: the clients have the stats."""

    def on_snapshot(self, snapshot: EngineSnapshot, engine: int = 0) -> None:
        """Do nothing: there are no viewers."""

    def on_refused(self, engine_id: str, error: QuireError) -> None:
        self.deltas.put((0, [TokenDelta(engine_id, [], "error", error=str(error))]))


class _Grammars:
    """Check grammars before anything runs; the engines follow them."""

    def __init__(self, lanes: GrammarLanes) -> None:
        self._lanes = lanes
        self.stop = lanes.stop

    def check(self, params: StructuredOutputsParams) -> None:
        self._lanes.check(params)


class Replicas:
    """The methods of `EngineCore` that `LLMEngine` uses, for several engines. Construction returns when all are ready."""

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
        """Add a request. Raises RequestError if it can never run."""
        self._router.check()
        self._limits.admissible_length(request)
        self._open.add(request.id)
        self._fresh.append(request)

    def abort(self, ids: Iterable[str]) -> None:
        """End requests: nothing more is reported of them. Unknown ids are ignored."""
        gone = {name for name in ids if name in self._open}
        if gone:
            self._open -= gone
            self._fresh = [request for request in self._fresh if request.id not in gone]
            self._run_in_loop(self._router.abort, list(gone))

    def release(self, ids: Iterable[str]) -> None:
        names = list(ids)
        if names:
            self._call("release", names)

    def step(self) -> list[TokenDelta]:
        """Return the next deltas of an engine; wait a moment if there are none."""
        if self._fresh:
            fresh, self._fresh = self._fresh, []
            self._run_in_loop(self._router.add, fresh)
        if self._router.state == "dead" and self._inbox.deltas.empty():
            raise EngineDead("; ".join(str(each.supervisor.error) for each in self.engines))
        try:
            self.number, deltas = self._inbox.deltas.get(timeout=STEP_WAIT_S)
        except queue.Empty:
            return []
        known = [delta for delta in deltas if delta.request_id in self._open]
        self._open -= {delta.request_id for delta in known if delta.finish_reason is not None}
        return known

    def reset_prefix_cache(self, preempt_running: bool = False) -> bool:
        return bool(self._call("reset_prefix_cache", preempt_running))

    def call_all(self, method: str, *args: Any) -> list[Any]:
        """Call a method on every rank of every engine; return the results in their order."""
        return list(self._call("call_all", method, *args))

    def load_adapter(self, ref: AdapterRef, pinned: bool) -> None:
        """Load an adapter in every engine; raise why it cannot be loaded."""
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

    def _run_in_loop(self, method: Any, *args: Any) -> None:
        """Call a method in the router's thread; return when it is done."""
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
    """End the engines when `LLM` is freed, and at the latest when this process ends."""

    def stop() -> None:
        try:
            router.stop(STOP_TIMEOUT_S)
        finally:
            loop.stop()

    loop.call_soon_threadsafe(stop)
    ended.wait(2 * STOP_TIMEOUT_S)
