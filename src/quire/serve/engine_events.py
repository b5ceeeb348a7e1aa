"""`GET /engine/events`: live events of the engine (docs/events.md), without text of requests.

The engine collects events only while there are viewers. Each event is encoded once for all viewers of a tenant.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from quire.serve import engine_views as views
from quire.serve.body import ClientGone, UnlessGone
from quire.serve.engine_views import RequestTraces
from quire.serve.errors import RETRY_AFTER, error_body, json_response
from quire.serve.health import ServerState, Service
from quire.serve.limits import LIMITS, ServerLimits
from quire.types.engine_snapshot import SNAPSHOT_INTERVAL_S, EngineSnapshot
from quire.types.stats import Arrived, OutputNews, Stats

MAX_WAITING = 32  # events
MAX_BYTES = 2**20  # of them
HEARTBEAT = 10.0  # seconds without an event
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"),
]  # fmt: skip

_encoder = msgspec.json.Encoder()


def encode(kind: str, event: dict[str, Any]) -> bytes:
    """Encode an event without its number, which differs between viewers."""
    return b"event: " + kind.encode() + b"\ndata: " + _encoder.encode(event) + b"\n\n"


class Viewer:
    """A viewer's queue of events. `snapshot` returns the state from which a viewer that has lost events continues."""

    def __init__(self, tenant: str | None, snapshot: Callable[[], bytes]) -> None:
        self.tenant = tenant
        self._snapshot = snapshot
        self._waiting: deque[bytes] = deque()
        self._bytes = self._lost = self._number = 0
        self._over, self._last = False, b""
        self._news = asyncio.Event()

    def push(self, *events: bytes) -> None:
        size = sum(map(len, events))
        full = len(self._waiting) + len(events) > MAX_WAITING or self._bytes + size > MAX_BYTES
        if self._waiting and (self._lost or full):
            self._lost += len(self._waiting)
            self._waiting.clear()
            self._bytes = 0
        if self._lost:
            self._lost += len(events)
        else:
            self._waiting += events
            self._bytes += size
        self._news.set()

    def end(self, last: bytes) -> None:
        """Send `last` after the waiting events, then end the stream."""
        if not self._over:
            self._over, self._last = True, last
            self._news.set()

    async def take(self) -> bytes:
        """Return the bytes to send now; empty at the end of the stream."""
        if not self._waiting and not self._lost and not self._over:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), HEARTBEAT)
        self._news.clear()
        if self._lost:
            lost, self._lost = self._lost, 0
            return self._numbered([encode("gap", {"lost": lost}), self._snapshot()])
        if not self._waiting and self._over:
            last, self._last = self._last, b""
            return self._numbered([last]) if last else b""
        if not self._waiting:
            return b": alive\n\n"
        events, self._waiting, self._bytes = self._waiting, deque(), 0
        return self._numbered(events)

    def _numbered(self, events: "deque[bytes] | list[bytes]") -> bytes:
        first = self._number + 1
        self._number += len(events)
        return b"".join(b"id: %d\n%b" % (first + i, event) for i, event in enumerate(events))


class ViewerStream(Response):
    """Events until the viewer disconnects or the server ends; then `left` is called."""

    def __init__(self, viewer: Viewer, left: Callable[[Viewer], None]) -> None:  # there is no body, so nothing is rendered
        self._viewer, self._left = viewer, left

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        try:
            async with UnlessGone(receive):
                await send({"type": "http.response.start", "status": 200, "headers": [*_HEADERS]})
                while data := await self._viewer.take():
                    await send({"type": "http.response.body", "body": data, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except ClientGone:
            pass
        finally:
            self._left(self._viewer)


logger = logging.getLogger(__name__)

BYE = {"reason": "the server is shutting down"}


class EngineEvents:
    """The endpoint. several: the server has more than one key, and a viewer sees only the requests of its own key."""

    def __init__(self, state: ServerState, several: bool, limits: ServerLimits = LIMITS) -> None:
        self._state, self._several, self._limits = state, several, limits
        self._viewers: set[Viewer] = set()
        self._watch: _Watching | None = None

    @property
    def routes(self) -> list[Route]:
        return [] if self._state.settings.disable_page else [Route("/engine/events", self.events, methods=["GET"])]

    async def events(self, request: Request) -> Response:
        service = self._state.service
        if service is None or self._state.draining:
            return _unavailable("the model is still loading" if service is None else "the server is shutting down")
        if request.method == "HEAD":
            return Response(media_type="text/event-stream")
        tenant = (getattr(request.state, "tenant", None) or "") if self._several else None
        own, left = sum(viewer.tenant == tenant for viewer in self._viewers), self._limits.viewers - len(self._viewers)
        if left <= (own if self._several else 0):
            return _unavailable(f"there are too many viewers: {len(self._viewers)}, of at most {self._limits.viewers}")
        if self._watch is None:
            self._watch = _Watching(service, self._state, self._viewers)
        watch = self._watch
        viewer = Viewer(tenant, lambda: watch.snapshot(tenant))
        viewer.push(encode("hello", views.hello(service.llm, self._several)), watch.snapshot(tenant))
        self._viewers.add(viewer)
        return ViewerStream(viewer, self._leave)

    def _leave(self, viewer: Viewer) -> None:
        self._viewers.discard(viewer)
        if not self._viewers and self._watch is not None:
            self._watch.stop()
            self._watch = None


class _Watching:
    """From the first viewer to the last: an observer of the engine and of its answers."""

    def __init__(self, service: Service, state: ServerState, viewers: set[Viewer]) -> None:
        self._llm, self._state, self._viewers = service.llm, state, viewers
        self._traces = RequestTraces(self._llm.owner)
        self._pages = views.PoolView([each.pages for each in self._llm.engines])
        self._stats = views.StatsView(service.metrics)
        self._latest: dict[int, EngineSnapshot] = {}  # by engine
        self._sent_engine, self._sent_stats = self._engine_facts(), dict[str, Any]()
        self._llm.observers.append(self)
        self._llm.watch(self._see)
        self._ticking = asyncio.get_running_loop().create_task(self._tick(), name="quire-feed")

    def stop(self) -> None:
        self._ticking.cancel()
        self._llm.watch(None)
        self._llm.observers.remove(self)

    def snapshot(self, tenant: str | None) -> bytes:
        engines = [
            {"engine": self._engine(number), "step": self._step(self._latest.get(number), tenant)}
            for number in range(len(self._llm.engines))
        ]
        others = {
            "engine": engines[0]["engine"],
            "others": engines[1:],
            "pages": self._pages.whole(tenant),
            "stats": self._stats_now(measure=False),
        }
        return encode("snapshot", views.snapshot(self._traces, tenant, engines[0]["step"], others))

    def _engine(self, number: int) -> views.Event:
        return views.engine(self._llm.engines[number], number, self._state.draining)

    def _step(self, seen: EngineSnapshot | None, tenant: str | None) -> views.Event | None:
        if seen is None:
            return None
        everywhere = [key for each in self._latest.values() for key in each.keys]
        return views.step(seen, self._llm, self._traces, tenant, everywhere)

    # ---- events ----------------------------------------------------------------------------------------------------------

    def _see(self, seen: EngineSnapshot) -> None:
        self._latest[seen.engine] = seen
        self._traces.see(seen.requests, seen.engine)
        self._pages.see(seen)
        changed_traces = self._traces.take()
        for tenant, viewers in self._by_tenant():
            events = [("requests", views.requests(changed_traces, tenant))]
            if seen.steps or not seen.keys:
                events.append(("step", self._step(seen, tenant)))
            events.append(("pages", self._pages.as_event(tenant, seen)))
            _push(viewers, *(encode(kind, event) for kind, event in events if event is not None))

    def on_arrival(self, request: Arrived) -> None:
        """Unused: the engine reports arrivals in snapshots."""

    def on_outputs(self, news: OutputNews) -> None:
        for request in news.finished:
            self._traces.end(request)

    def on_step(self, stats: Stats, tokens_in_step: int, now: float) -> None:
        """Unused: snapshots have more, and are less frequent."""

    # ---- polling ---------------------------------------------------------------------------------------------------------

    async def _tick(self) -> None:
        """Poll what has no event of its own: engine states, the end of the server, statistics."""
        due = time.monotonic()
        while True:
            await asyncio.sleep(SNAPSHOT_INTERVAL_S)
            try:
                self._poll_engine()
                if time.monotonic() >= due:
                    due += views.STATS_EVERY
                    self._traces.tidy(time.monotonic())
                    self._send_stats()
            except Exception:
                logger.exception("the feed of the engine's events failed")
            if self._state.draining and (self._state.closing or not self._state.open):
                for viewer in self._viewers:
                    viewer.end(encode("bye", BYE))
                return

    def _poll_engine(self) -> None:
        facts = self._engine_facts()
        if facts == self._sent_engine:
            return
        now, events = time.monotonic(), []
        for number, (old, new) in enumerate(zip(self._sent_engine, facts, strict=True)):
            (_, was, before), (_, state, restarts) = old, new
            if was == "ready" and (state != "ready" or restarts != before):
                self._traces.lose(now, number)
            if state == "ready" and (was != "ready" or restarts != before):
                self._traces.regain(now, number)
                self._pages.begin(number, self._llm.engines[number].pages)
                self._latest.pop(number, None)
            if old != new:
                events.append(encode("engine", self._engine(number)))
        self._sent_engine = facts
        changed_traces = self._traces.take()
        for tenant, viewers in self._by_tenant():
            changed = views.requests(changed_traces, tenant)
            _push(viewers, *events, *([] if changed is None else [encode("requests", changed)]))

    def _send_stats(self) -> None:
        stats = self._stats_now(measure=True)
        if {**stats, "t": 0} != {**self._sent_stats, "t": 0}:
            self._sent_stats = stats
            _push(self._viewers, encode("stats", stats))

    def _stats_now(self, measure: bool) -> views.Event:
        compiling = sum(seen.compiling for seen in self._latest.values())
        return self._stats.as_event(self._llm, compiling, len(self._viewers), measure)

    def _engine_facts(self) -> list[tuple[bool, str, int]]:
        return [(self._state.draining, each.state, each.restarts) for each in self._llm.engines]

    def _by_tenant(self) -> "list[tuple[str | None, list[Viewer]]]":
        groups: dict[str | None, list[Viewer]] = {}
        for viewer in self._viewers:
            groups.setdefault(viewer.tenant, []).append(viewer)
        return list(groups.items())


def _push(viewers: "set[Viewer] | list[Viewer]", *events: bytes) -> None:
    if events:
        for viewer in viewers:
            viewer.push(*events)


def _unavailable(why: str) -> Response:
    body = error_body(503, why, kind="ServiceUnavailableError")
    return json_response(body, 503, {"Retry-After": str(RETRY_AFTER)})
