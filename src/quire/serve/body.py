"""Reading a request's JSON body within limits, and ending its work when the client disconnects.

Bytes are counted as they arrive, and the depth is checked before anything walks the value.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from types import TracebackType
from typing import Any

import msgspec
from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.serve.batches.calls import is_batch_line
from quire.serve.errors import HttpError
from quire.serve.limits import LIMITS, ServerLimits
from quire.text.workers.wire import Parse, not_json, too_deep, too_many


class ClientGone(Exception):
    """The client disconnected; its work was cancelled."""


class UnlessGone:
    """Cancel the work inside when the client disconnects, and raise ClientGone. The body must have been read."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._watch: asyncio.Task[None] | None = None
        self._gone = False

    async def __aenter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._start = asyncio.get_running_loop().call_soon(self._begin)  # when there is a moment to wait in

    def _begin(self) -> None:
        self._watch = asyncio.create_task(_client_gone(self._receive))
        self._watch.add_done_callback(self._end)

    def _end(self, watch: "asyncio.Task[None]") -> None:
        if not watch.cancelled():
            self._gone = True
            self._task.cancel()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._start.cancel()
        if self._watch is not None:
            self._watch.remove_done_callback(self._end)
            self._watch.cancel()
        if self._gone and not self._task.uncancel() and kind is asyncio.CancelledError:
            raise ClientGone from None


async def _client_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def stop(*tasks: "asyncio.Task[Any]") -> None:
    """Cancel the tasks and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


SHORT = 1 << 16  # bytes that are parsed on the event loop


@dataclass
class Unparsed:
    """Large bodies of all clients that wait to be parsed."""

    bytes: int = 0


class _Headers(Headers):
    """Headers that are found by name in a table: endpoints look for many, most of which are not there."""

    def __init__(self, scope: Scope) -> None:
        super().__init__(scope=scope)
        self._first = dict(reversed(self.raw))  # of several with one name, the first

    def get(self, key: str, default: Any = None) -> Any:
        value = self._first.get(key.lower().encode("latin-1"))
        return default if value is None else value.decode("latin-1")

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and self.get(key) is not None


class _Request(Request):
    @cached_property
    def headers(self) -> Headers:
        return _Headers(self.scope)


class JSONRoute(APIRoute):
    """A route whose endpoint takes a JSON body and the request. FastAPI routes and documents it; the call is made here."""

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer the request; the work ends when the client disconnects."""
        request = _Request(scope, receive)
        _check_content_type(request)
        body = self._checked(await self._parsed(await read_body(request, request.app.state.server.body_bytes), request))
        endpoint: Callable[[Any, Request], Awaitable[Response]] = self.endpoint
        async with nullcontext() if is_batch_line(scope) else UnlessGone(receive):
            response = await endpoint(body, request)
            await response(scope, receive, send)

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Any]]:
        async def handle(_: Request) -> ASGIApp:  # what it returns is called as a response is
            return self.answer

        return handle

    async def _parsed(self, raw: bytes, request: Request) -> Any:
        if len(raw) <= SHORT:
            return parse_json(raw)
        server = request.app.state.server
        limits: ServerLimits = server.limits
        bounds = Parse(limits.json_depth, limits.json_containers, limits.json_values, limits.json_integers)
        unparsed: Unparsed = server.unparsed
        if unparsed.bytes + len(raw) > limits.unparsed_bytes:
            raise HttpError(503, "too many large request bodies wait to be read; try again in a few seconds")
        unparsed.bytes += len(raw)
        try:
            return await server.llm.offload.parse(raw, bounds)
        finally:
            unparsed.bytes -= len(raw)

    def _checked(self, body: Any) -> Any:
        assert self.body_field is not None
        value, errors = self.body_field.validate(body, {}, loc=("body",))
        if errors:
            raise RequestValidationError(errors, body=body)
        return value


async def read_body(request: Request, most: int) -> bytes:
    """Return the body. most: bytes it may have"""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > most:
        raise _too_large(most)
    chunks, size, more = list[bytes](), 0, True
    while more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > most:
            raise _too_large(most)
        chunks.append(chunk)
        more = message.get("more_body", False)
    return b"".join(chunks)


def parse_json(raw: bytes, limits: ServerLimits = LIMITS) -> Any:
    """A short body."""
    try:
        value = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise HttpError(400, not_json(error), "body") from None
    except RecursionError:
        raise HttpError(400, too_deep(limits.json_depth), "body") from None
    # brackets inside of strings count as well, so a small count needs no check
    if raw.count(b"[") + raw.count(b"{") > min(limits.json_depth, limits.json_containers):
        _check_shape(value, limits)
    return value


def _check_shape(value: Any, limits: ServerLimits) -> None:
    """Level by level, so that depth costs no stack."""
    level, containers = [value], 1
    for _ in range(limits.json_depth):
        below: list[Any] = []
        for container in level:
            items = container.values() if isinstance(container, dict) else container
            below += [item for item in items if isinstance(item, (list, dict))]
        containers += len(below)
        if containers > limits.json_containers:
            raise HttpError(400, too_many(limits.json_containers), "body")
        if not below:
            return
        level = below
    raise HttpError(400, too_deep(limits.json_depth), "body")


def _too_large(most: int) -> HttpError:
    return HttpError(413, f"the request body may have at most {most} bytes")


def _check_content_type(request: Request) -> None:
    kind = request.headers.get("content-type", "").split(";", 1)[0].strip().lower()
    if kind != "application/json":
        raise HttpError(400, f"the content type must be application/json, got {kind or 'none'!r}", "content-type")
    coding = request.headers.get("content-encoding", "").strip().lower()
    if coding not in ("", "identity"):
        raise HttpError(415, f"the encoding {coding!r} of bodies is not supported; send them unencoded", "content-encoding")
