"""Endpoints of other packages: FastAPI routers of the entry point group `quire.endpoints`.

They are part of the app, so API keys, limits, request ids, metrics and the error format hold for them as for Quire's own.
"""

import asyncio
import functools
import itertools
import logging
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.routing import APIRoute
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.async_llm import AsyncLLM
from quire.config.plugins import ENDPOINTS, PlugIn, load_all, refuse
from quire.serve.batches.throttle import OnlineRequests
from quire.serve.body import UnlessGone, read_body
from quire.serve.errors import request_id_of
from quire.serve.server import server_of
from quire.types.errors import ConfigError

logger = logging.getLogger(__name__)
_serials = itertools.count()


class EndpointServer:
    """The server as an endpoint of another package may use it: `server: Annotated[EndpointServer, Depends(EndpointServer)]`."""

    def __init__(self, request: Request) -> None:
        self._request, self._server = request, server_of(request)

    @property
    def llm(self) -> AsyncLLM:
        """The engine: `generate`, `encode`, `tokenizer`, `render_chat` and the rest of AsyncLLM's methods."""
        return self._server.llm

    @property
    def names(self) -> tuple[str, ...]:
        """The model's names in requests."""
        return self._server.names

    @property
    def tenant(self) -> str | None:
        """What stands for the request's API key if the server has several: pass it to the engine as `cache_tenant`."""
        tenant: str | None = getattr(self._request.state, "tenant", None)
        return tenant

    def new_id(self) -> str:
        """Return a request id for the engine, unique and recognizable in the log."""
        return f"{request_id_of(self._request.scope)}-{next(_serials):x}"


@functools.cache
def _load() -> tuple[Sequence[tuple[PlugIn, APIRouter]], Sequence[str]]:
    """Return the routers of plug-ins, and the errors of those that failed."""
    found: list[tuple[PlugIn, APIRouter]] = []

    def use(plugin: PlugIn, loaded: Any) -> None:
        router = loaded if isinstance(loaded, APIRouter) or not callable(loaded) else plugin.run(loaded)
        if not isinstance(router, APIRouter):
            raise ConfigError(f"it must be a FastAPI APIRouter or a function that returns one; got {type(router).__name__}")
        if odd := next((route for route in router.routes if not isinstance(route, APIRoute)), None):
            raise ConfigError(f"its routes must be HTTP endpoints of the router itself; got {type(odd).__name__}")
        found.append((plugin, router))

    return found, load_all(ENDPOINTS, use)


def check_endpoints(require_plugins: bool) -> None:
    """Load the plug-ins. require_plugins: raise PlugInError if one of them failed."""
    refuse(_load()[1], require_plugins)


def add_endpoints(app: FastAPI, taken: Sequence[BaseRoute], require_plugins: bool) -> list[APIRoute]:
    """Add the endpoints of plug-ins and return their routes. A router with a path that exists is left out.

    taken: Quire's own routes
    """
    added: list[APIRoute] = []
    for plugin, router in _load()[0]:
        try:
            with plugin.blamed():
                _check_paths(router, [*taken, *added])
        except ConfigError as error:
            logger.warning("%s; it is skipped", error)
            refuse([str(error)], require_plugins)
            continue
        app.include_router(router)
        added += [route for route in router.routes if isinstance(route, APIRoute)]
    return added


def _check_paths(router: APIRouter, taken: Sequence[BaseRoute]) -> None:
    for route in router.routes:
        assert isinstance(route, APIRoute)
        for other in taken:
            if isinstance(other, Route) and (other.path_regex.match(route.path) or route.path_regex.match(other.path)):
                raise ConfigError(f"its path {route.path} is one of {other.path}, which exists already. Choose another path")


class GuardedEndpoints:
    """Reads the bodies of requests within the server's limits, and ends the work when a client disconnects."""

    def __init__(self, app: ASGIApp, online: OnlineRequests, body_bytes: int) -> None:
        self._app, self._online, self._body_bytes = app, online, body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        unread = [await read_body(Request(scope, receive), self._body_bytes)]

        async def replay() -> Message:
            if unread:
                return {"type": "http.request", "body": unread.pop(), "more_body": False}
            await asyncio.get_running_loop().create_future()  # cancelled when the client disconnects
            raise AssertionError

        with self._online.counted(scope):
            async with UnlessGone(receive):
                await self._app(scope, replay, send)
