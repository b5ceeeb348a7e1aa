"""The API as one ASGI app. What stands around it (keys, health, metrics, drain) is in `front.py`."""

import logging
from functools import partial
from typing import Any

from fastapi import FastAPI
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import quire
from quire.async_llm import AsyncLLM
from quire.config.server_args import ServerArgs
from quire.obs.metrics import Metrics
from quire.serve import adapters, anthropic, chat, completions, developer, models, responses, tokenize
from quire.serve.body import ClientGone, JSONRoute
from quire.serve.errors import CLIENT_GONE, HttpError, error_response, install_error_handlers
from quire.serve.limits import LIMITS, ServerLimits
from quire.serve.middleware import choose_id
from quire.serve.no_route import absent_router, install_no_route_handlers
from quire.serve.server import Server

logger = logging.getLogger(__name__)


def build_app(llm: AsyncLLM, settings: ServerArgs, limits: ServerLimits = LIMITS, metrics: Metrics | None = None) -> FastAPI:
    app = Api(
        title="Quire",
        version=quire.__version__,
        description="An OpenAI-compatible server with vLLM's extensions.",
        docs_url=None,  # FastAPI's pages load their scripts from elsewhere; ours is in `about`
        redoc_url=None,
        openapi_url=None if settings.disable_fastapi_docs else "/openapi.json",
    )
    app.state.server = server = Server(llm, settings, limits, metrics)
    _ = server.formats  # chosen, and logged, now
    bounded = partial(Boundary, limits=limits)
    routers = [protocol.router for protocol in (completions, chat, responses, anthropic, models, tokenize)]
    routers += [completions.invocations_router, responses.stored_router, absent_router]
    routers.append(adapters.router if llm.adapters.enabled and adapters.updates_allowed(settings) else adapters.closed_router)
    if developer.developing():
        routers.append(developer.router)
    if settings.enable_tokenizer_info_endpoint:
        routers.append(tokenize.info_router)
    routes = [*app.routes, *(route for router in routers for route in router.routes)]
    for router in routers:
        app.include_router(router)
    for route in routes:
        if isinstance(route, JSONRoute):
            app.shortcuts[route.path] = (route, bounded(route.answer))
    install_error_handlers(app)
    install_no_route_handlers(app, routes)
    app.add_middleware(bounded)
    return app


class Api(FastAPI):
    """JSON endpoints are called from here: FastAPI's way to them takes longer than they do. All else goes that way."""

    def __init__(self, **about: Any) -> None:
        super().__init__(**about)
        self.shortcuts: dict[str, tuple[JSONRoute, ASGIApp]] = {}  # by path, for POST

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        shortcut = self.shortcuts.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if shortcut is None:
            return await super().__call__(scope, receive, send)
        route, answer = shortcut
        scope["app"], scope["route"], scope["endpoint"] = self, route, route.endpoint
        return await answer(scope, receive, send)


class Boundary:
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

        async def tell(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message["headers"] = [*message["headers"], *state.get("told", ())]
            await send(message)

        try:
            if sum(len(name) + len(value) for name, value in scope["headers"]) > self._limits.header_bytes:
                raise HttpError(431, f"the headers may have at most {self._limits.header_bytes} bytes")
            await self._app(scope, receive, tell)
        except ClientGone:
            if not started:  # nobody reads it, but it is counted
                await Response(status_code=CLIENT_GONE)(scope, receive, tell)
        except Exception as error:
            if started:
                raise  # half an answer is out: the connection must break
            await error_response(error, scope)(scope, receive, tell)
