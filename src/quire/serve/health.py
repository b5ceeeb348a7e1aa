"""The state of a server, and the endpoints for operators.

    /livez     the API process answers, and the engine beats or is being restarted    503: restart this server
    /readyz    the model is loaded, the engine ready, the queue short, no drain        503: send traffic to another server
    /health    as vLLM's: 200 unless the engine is dead or not started yet             /ping is the same
    /metrics   Prometheus                                                              /version
    /load      the number of open requests, as {"server_load": n}, with --enable-server-load-tracking

These endpoints answer while the model loads and while the server drains. The first three need no key; without a key, their
answer has no reason in it.
"""

import asyncio
import contextlib
from dataclasses import dataclass, field

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from quire import __version__
from quire.async_llm import AsyncLLM
from quire.config.server_args import ServerArgs
from quire.obs.metrics import HttpMetrics, Metrics
from quire.serve.api_workers.client import RouterClient
from quire.serve.errors import error_body, json_response
from quire.types.errors import EngineDead


@dataclass(frozen=True)
class Service:
    """All that exists once the model is loaded."""

    llm: AsyncLLM
    app: ASGIApp
    metrics: Metrics
    http_metrics: HttpMetrics
    router: RouterClient | None = None  # the way to other API processes, if there are any


@dataclass
class ServerState:
    settings: ServerArgs
    service: Service | None = None
    draining: bool = False  # no new requests
    closing: bool = False  # the deadline has passed: what has not begun to answer is refused
    open: int = 0  # requests being answered
    _idle: asyncio.Event = field(default_factory=asyncio.Event)

    def enter(self) -> None:
        self.open += 1
        self._idle.clear()

    def leave(self) -> None:
        self.open -= 1
        if not self.open:
            self._idle.set()

    async def wait_idle(self, seconds: float) -> bool:
        """True once nothing is open, False if that takes too long."""
        if self.open:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), seconds)
        return not self.open


STALE_AFTER = 3.0  # seconds without a heartbeat; the engine beats several times a second, in long steps too


class Health:
    def __init__(self, state: ServerState) -> None:
        self._state = state

    @property
    def public(self) -> list[Route]:
        """What needs no API key."""
        open_to_all = [
            Route("/livez", self.livez),
            Route("/readyz", self.readyz),
            Route("/health", self.health),
            Route("/ping", self.health, methods=["GET", "POST"]),
        ]
        return [*open_to_all, Route("/metrics", self.metrics)] if self._state.settings.metrics_without_key else open_to_all

    @property
    def routes(self) -> list[Route]:
        routes = [*self.public, Route("/version", self.version), Route("/metrics", self.metrics)]
        return [*routes, Route("/load", self.load)] if self._state.settings.enable_server_load_tracking else routes

    async def livez(self, request: Request) -> Response:
        return _verdict(self.not_live(), request)

    async def readyz(self, request: Request) -> Response:
        return _verdict(self.not_ready(), request)

    async def health(self, _: Request) -> Response:
        service = self._state.service
        if service is None:
            return Response(status_code=503)
        try:
            await service.llm.check_health()
        except EngineDead:
            return Response(status_code=503)
        return Response(status_code=200)

    async def version(self, _: Request) -> Response:
        return json_response({"version": __version__})

    async def load(self, _: Request) -> Response:
        service = self._state.service
        others = 0 if service is None or service.router is None else (await service.router.gather()).open
        return json_response({"server_load": self._state.open + others})

    async def metrics(self, request: Request) -> Response:
        service = self._state.service
        if service is None:
            return json_response(error_body(503, "the model is still loading", kind="ServiceUnavailableError"), 503)
        accept = request.headers.get("accept", "")
        if service.router is None:
            content, content_type = service.metrics.render(service.llm, accept)
        else:
            found = await service.router.gather()
            content, content_type = service.metrics.render_total(
                service.llm, service.http_metrics.board, found.boards, accept, found.adapters
            )
        return Response(content, headers={"content-type": content_type})

    def not_live(self) -> str | None:
        """Why a restart of the whole server is due. A restart of the engine that is under way is not a reason."""
        if self._state.service is None:
            return None  # loading; a failure ends the process
        llm = self._state.service.llm
        if llm.state == "dead":
            return "the engine is dead"
        if llm.state == "ready" and llm.heartbeat_age > STALE_AFTER:
            return f"no heartbeat of the engine for {llm.heartbeat_age:.1f} s"
        return None

    def not_ready(self) -> str | None:
        state = self._state
        if state.draining:
            return "the server is shutting down"
        if state.service is None:
            return "the model is loading"
        if (reason := self.not_live()) is not None:
            return reason
        llm = state.service.llm
        if llm.state != "ready":
            return f"the engine is {llm.state}"
        waiting = llm.stats.waiting if llm.stats is not None else 0
        if waiting > state.settings.max_queue:
            return f"{waiting} requests wait; the limit is {state.settings.max_queue}"
        return None


def _verdict(reason: str | None, request: Request) -> Response:
    if reason is None:
        return json_response({"status": "ok"})
    detail = {"reason": reason} if request.state.trusted else {}
    return json_response({"status": "unavailable", **detail}, 503)
