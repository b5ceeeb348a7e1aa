"""The API as one ASGI app, and the layers around it: each is an ASGI app that holds the next.

RequestIds ─► HostCheck ─► CORS ─► Meter ─► Guard ─► Operations ─► ReadyGate ─► the API (`build_app`), once it is loaded
                                            │          │
                                            └ /health  └ /, /metrics, /engine/events ...
"""

import asyncio
import logging
import re
import secrets
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.routing import BaseRoute, Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.utils import get_client_addr, get_path_with_query_string

import quire
from quire.async_llm import AsyncLLM
from quire.config.server_args import ServerArgs
from quire.features.pooling.host import supported_tasks
from quire.obs.metrics import Metrics
from quire.serve import adapters, anthropic, chat, completions, models, responses
from quire.serve.about import About
from quire.serve.auth import EVERY_HOST, Guard, HostCheck, Keys, glance
from quire.serve.batches.routes import batch_router, closed_batch_router, start_batches
from quire.serve.batches.throttle import OnlineRequests
from quire.serve.body import ClientGone, JSONRoute
from quire.serve.endpoints import GuardedEndpoints, add_endpoints
from quire.serve.engine_events import EngineEvents
from quire.serve.errors import (
    CLIENT_GONE,
    RETRY_AFTER,
    HttpError,
    error_body,
    error_response,
    install_error_handlers,
    json_response,
    shaped,
)
from quire.serve.health import Health, ServerState
from quire.serve.limits import LIMITS, ServerLimits
from quire.serve.ollama.routes import ollama_routers
from quire.serve.pooling.routes import answered, generation_refusals, pooling_routers
from quire.serve.server import AbortAnswers, Server
from quire.serve.token_routes import token_router
from quire.serve.vllm_routes import (
    absent_router,
    developer_router,
    developing,
    install_no_route_handlers,
    no_route,
    profile_router,
)
from quire.types.errors import PLUGIN_FAILURES

_SANE = re.compile(rb"[\x21-\x7e]{1,%d}" % LIMITS.identifier_characters)  # ids go into headers and logs


def choose_id(scope: Scope) -> str:
    chosen: bytes = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
    return chosen.decode() if _SANE.fullmatch(chosen) else secrets.token_hex(16)


class RequestIds:
    """Give every request an id, also those that are refused. Log every response with uvicorn's line if `logged`."""

    def __init__(self, app: ASGIApp, send_header: bool, logged: bool = False) -> None:
        self._app, self._send_header, self._logged = app, send_header, logged

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = choose_id(scope)
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_start(message: Message) -> None:
            if message["type"] == "http.response.start":
                if self._logged:  # after the current turn of the event loop: no response waits for it
                    asyncio.get_running_loop().call_soon(_log_access, scope, message["status"])
                if self._send_header:
                    message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
            await send(message)

        await self._app(scope, receive, send_start)


access_logger = logging.getLogger("uvicorn.access")


def build_middleware(state: ServerState, keys: Keys, loopback: bool = False) -> ASGIApp:
    """`loopback`: the server listens on loopback addresses only."""
    settings, health = state.settings, Health(state)
    about = About(state, keyed=len(keys) > 0)
    operations = operator_routes(state, health, about, several=len(keys) > 1)
    inner = Operations(ReadyGate(state), operations)
    layers: ASGIApp = Meter(Guard(inner, keys, [*health.public, *about.public]), state, operations)
    if settings.allowed_origins:
        layers = CORSMiddleware(
            layers,
            allow_origins=settings.allowed_origins,
            allow_methods=settings.allowed_methods,
            allow_headers=settings.allowed_headers,
            allow_credentials=settings.allow_credentials,
            expose_headers=["x-request-id"] if settings.enable_request_id_headers else [],
        )
    if settings.root_path:
        layers = Rooted(layers, settings.root_path)
    checked = settings.allowed_hosts or (loopback and not len(keys))
    if checked and EVERY_HOST not in settings.allowed_hosts:
        layers = HostCheck(layers, [settings.host, *settings.allowed_hosts])
    return RequestIds(layers, settings.enable_request_id_headers, logged=not settings.disable_uvicorn_access_log)


def operator_routes(state: ServerState, health: Health, about: About, several: bool) -> list[Route]:
    return [*health.routes, *about.routes, *EngineEvents(state, several=several).routes]


_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def _log_access(scope: Any, status: int) -> None:
    client, path = get_client_addr(scope), get_path_with_query_string(scope)
    access_logger.info('%s - "%s %s HTTP/%s" %d', client, scope["method"], path, scope["http_version"], status)


class Rooted:
    """Accept requests with or without the proxy's path prefix."""

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self._app, self._root_path = app, root_path.rstrip("/")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app({**scope, "root_path": self._root_path}, receive, send)


class Operations:
    """Routes that answer in every state of the server."""

    def __init__(self, app: ASGIApp, routes: Sequence[Route]) -> None:
        self._app, self._routes = app, routes
        self._glance = glance(routes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if _CONTROL.search(scope["path"]):  # the patterns of routes overlook a line end
            return await json_response(shaped(error_body(404, "there is no such path"), scope), 404)(scope, receive, send)
        for route in self._routes if self._glance(scope) else ():
            match, child = route.matches(scope)
            if match is Match.FULL:
                scope.update(child)
                return await route.handle(scope, receive, send)
            if match is Match.PARTIAL:
                return await error_response(no_route(scope, [route]), scope)(scope, receive, send)
        return await self._app(scope, receive, send)


class ReadyGate:
    """Pass requests on while the model is loaded and the server is not shutting down, and count open requests."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = self._state
        if state.draining:
            return await _refuse("the server is shutting down", scope, receive, send)
        if state.service is None:
            return await _refuse("the model is still loading", scope, receive, send)
        state.enter()
        try:
            return await state.service.app(scope, receive, _LastCall(state, scope, receive, send))
        finally:
            state.leave()


class _LastCall:
    """A response that begins only when the server has ended its request is replaced by a refusal."""

    def __init__(self, state: ServerState, scope: Scope, receive: Receive, send: Send) -> None:
        self._state, self._scope, self._receive, self._send = state, scope, receive, send
        self._refused = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start" and self._state.closing:
            self._refused = True
            await _refuse("the server shut down before this request was done", self._scope, self._receive, self._send)
        elif not self._refused:
            await self._send(message)


class Meter:
    """Count requests, their durations and their sizes by route, except the operators' endpoints."""

    def __init__(self, app: ASGIApp, state: ServerState, uncounted: Sequence[BaseRoute]) -> None:
        self._app, self._state = app, state
        self._uncounted = {getattr(route, "endpoint", None) for route in uncounted}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started, status, sent = time.monotonic(), 500, 0

        async def count(message: Message) -> None:
            nonlocal status, sent
            if message["type"] == "http.response.start":
                status = message["status"]
            else:
                sent += len(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, receive, count)
        finally:
            service = self._state.service
            if service is not None and scope.get("endpoint") not in self._uncounted:
                handler = str(getattr(scope.get("route"), "path", "none"))
                received = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
                seconds = time.monotonic() - started
                service.http_metrics.record(
                    scope["method"], handler, status, seconds, int(received) if received.isdigit() else 0, sent
                )


async def _refuse(why: str, scope: Scope, receive: Receive, send: Send) -> None:
    body = error_body(503, why, kind="ServiceUnavailableError")
    headers = {"Retry-After": str(RETRY_AFTER), "Connection": "close"}
    await json_response(shaped(body, scope), 503, headers)(scope, receive, send)


def build_app(
    llm: AsyncLLM,
    settings: ServerArgs,
    limits: ServerLimits = LIMITS,
    metrics: Metrics | None = None,
    abort_in_others: AbortAnswers | None = None,
) -> FastAPI:
    app = Api(
        title="Quire",
        version=quire.__version__,
        description="An OpenAI-compatible server with vLLM's extensions.",
        docs_url=None,  # FastAPI's pages load their scripts from other hosts; ours is in `about`
        redoc_url=None,
        openapi_url=None if settings.disable_fastapi_docs else "/openapi.json",
    )
    app.state.server = server = Server(llm, settings, limits, metrics, abort_in_others)
    _ = server.formats, server.io_processor  # chosen, and logged, now
    bounded = partial(ErrorBoundary, limits=limits)
    tasks = supported_tasks(llm.config)
    routers = [models.router, models.tokens_router, *pooling_routers(tasks), absent_router]
    if "generate" in tasks:
        routers += [protocol.router for protocol in (completions, chat, responses, anthropic)]
        routers += [completions.invocations_router, responses.stored_router]
    else:
        routers.append(generation_refusals())
    routers += ollama_routers(tasks)
    routers.append(adapters.router if llm.adapters.enabled and adapters.updates_allowed(settings) else adapters.closed_router)
    routers.append(closed_batch_router if settings.batch_dir is None else batch_router)
    if developing():
        routers += [developer_router, *([token_router] if "generate" in tasks else [])]
    if llm.config.args.profiler_config.get("profiler"):
        routers.append(profile_router)
    if settings.enable_tokenizer_info_endpoint:
        routers.append(models.info_router)
    routes = [*app.routes, *(route for router in routers for route in router.routes)]
    for router in routers:
        app.include_router(router)
    for route in routes:
        if isinstance(route, JSONRoute):
            app.shortcuts[route.path] = (route, bounded(route.answer))
    state = ServerState(settings)
    operations = operator_routes(state, Health(state), About(state, keyed=False), several=False)
    app.added = add_endpoints(app, [*routes, *operations], llm.config.args.require_plugins)
    app.guarded = bounded(GuardedEndpoints(app.dispatch, app.online, server.body_bytes))
    routes += app.added
    install_error_handlers(app)
    install_no_route_handlers(app, routes, answered(tasks))
    app.add_middleware(bounded)
    if settings.batch_dir is not None:
        start_batches(app, llm, settings, app.online)
    return app


class Api(FastAPI):
    """Call JSON endpoints directly, which is faster than FastAPI's own dispatch. All other requests use that dispatch."""

    def __init__(self, **about: Any) -> None:
        super().__init__(**about)
        self.shortcuts: dict[str, tuple[JSONRoute, ASGIApp]] = {}  # by path, for POST
        self.online = OnlineRequests()  # of the shortcuts and of plug-ins
        self.added: list[APIRoute] = []  # by plug-ins
        self.guarded: ASGIApp = self.dispatch  # answers them

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        shortcut = self.shortcuts.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if shortcut is None:
            added = scope["type"] == "http" and any(route.matches(scope)[0] is Match.FULL for route in self.added)
            return await (self.guarded if added else self.dispatch)(scope, receive, send)
        route, answer = shortcut
        scope["app"], scope["route"], scope["endpoint"] = self, route, route.endpoint
        with self.online.counted(scope):
            return await answer(scope, receive, send)

    async def dispatch(self, scope: Scope, receive: Receive, send: Send) -> None:
        await super().__call__(scope, receive, send)


class ErrorBoundary:
    """The outermost layer: every request has an id and small headers, and every failure an answer without a trace."""

    def __init__(self, app: ASGIApp, limits: ServerLimits) -> None:
        self._app, self._limits = app, limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        state = scope.setdefault("state", {})
        if "request_id" not in state:
            state["request_id"] = choose_id(scope)
        started = False

        async def send_start(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message["headers"] = [*message["headers"], *state.get("response_headers", ())]
            await send(message)

        try:
            if sum(len(name) + len(value) for name, value in scope["headers"]) > self._limits.header_bytes:
                raise HttpError(431, f"the headers may have at most {self._limits.header_bytes} bytes")
            await self._app(scope, receive, send_start)
        except ClientGone:
            if not started:  # for the metrics; the client has disconnected
                await Response(status_code=CLIENT_GONE)(scope, receive, send_start)
        except PLUGIN_FAILURES as error:
            if started and not isinstance(error, Exception):
                raise RuntimeError("a plug-in called sys.exit in a request") from error
            if started:
                raise  # a part of the answer was sent: the connection must break
            await error_response(error, scope)(scope, receive, send_start)
