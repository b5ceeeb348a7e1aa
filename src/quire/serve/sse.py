"""Streams: an async generator of JSON objects becomes server-sent events or lines of JSON, as one protocol has them (`Wire`).

A stream starts only with its first event, or after `HEADERS_TIMEOUT_S` without one: a failure before that is an ordinary
HTTP error, a later failure is an event. A request with a grammar may be refused after any time, so its stream
starts with its first event only.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from quire.serve.errors import ErrorBody, anthropic_error, describe, ollama_error, request_id_of
from quire.text.pacing import json_chunks

HEADERS_TIMEOUT_S = 1.0  # errors are found within milliseconds, a full queue may take minutes

_encoder = msgspec.json.Encoder()
Events = AsyncGenerator[Any, None]

_HEADERS = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]

# characters JSON may hold as they are, but at which some clients end a line
_LINE_ENDS = tuple((mark.encode(), f"\\u{ord(mark):04x}".encode()) for mark in "\u0085\u2028\u2029")


def encode_event(event: Any) -> bytes:
    return b"data: " + _without_line_ends(_encoder.encode(event)) + b"\n\n"


def _without_line_ends(data: bytes) -> bytes:
    for mark, escaped in _LINE_ENDS:
        if mark in data:
            data = data.replace(mark, escaped)
    return data


class Large(dict[str, Any]):
    """An event that may be large or contain lazy lists: it is encoded in chunks."""


async def _large(event: Large, wire: "Wire") -> list[bytes]:
    chunks = [_without_line_ends(chunk) for chunk in await json_chunks(dict(event))]
    return [wire.before + chunks[0], *chunks[1:], wire.after]


def encode_named(event: Any) -> bytes:
    """With its type as the event's name in front."""
    return f"event: {event['type']}\n".encode() + encode_event(event)


def encode_line(event: Any) -> bytes:
    """As a line of JSON."""
    return _without_line_ends(_encoder.encode(event)) + b"\n"


@dataclass(frozen=True)
class Wire:
    """How a protocol encodes events and failures, and ends a stream."""

    encode: Callable[[Any], bytes]
    failure: Callable[[ErrorBody, str], Any]
    end: bytes
    media_type: bytes = b"text/event-stream; charset=utf-8"
    before: bytes = b"data: "  # and `after`: around the JSON of a large event
    after: bytes = b"\n\n"


OPENAI = Wire(encode_event, lambda body, _: body, b"data: [DONE]\n\n")
NAMED = Wire(encode_named, lambda body, _: {**body["error"], "type": "error"}, b"")  # OpenAI's newer way
ANTHROPIC = Wire(encode_named, anthropic_error, b"")
OLLAMA = Wire(encode_line, lambda body, _: ollama_error(body), b"", b"application/x-ndjson", b"", b"\n")


class EventStream(Response):
    """A response for these events. Raises what they raise before its headers are sent.

    refusable: the request may be refused at any time before its first event, so the headers wait for that event.
    """

    def __init__(self, events: Events, wire: Wire = OPENAI, refusable: bool = False) -> None:  # there is no body to render
        self._events = events
        self._wire = wire
        self._refusable = refusable

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        wire = self._wire
        timeout = None if self._refusable else HEADERS_TIMEOUT_S
        headers = [(b"content-type", wire.media_type), *_HEADERS]
        head = _Head(send, {"type": "http.response.start", "status": 200, "headers": headers}, timeout)
        try:
            async with aclosing(self._events) as events:
                async for event in events:
                    for data in await _large(event, wire) if isinstance(event, Large) else (wire.encode(event),):
                        await head.send()
                        await send({"type": "http.response.body", "body": data, "more_body": True})
        except Exception as error:
            if not head.begun:
                raise
            request_id = request_id_of(scope)
            failure = wire.failure(describe(error, request_id), request_id)
            await head.send()
            await send({"type": "http.response.body", "body": wire.encode(failure), "more_body": True})
        finally:
            head.hold()
        await head.send()
        await send({"type": "http.response.body", "body": wire.end, "more_body": False})


class _Head:
    """The start of a response: sent before the first event, or after `timeout` seconds."""

    def __init__(self, send: Send, message: Message, timeout: float | None) -> None:
        self._send, self._message = send, message
        self._timer = None if timeout is None else asyncio.get_running_loop().call_later(timeout, self._begin)
        self._late: asyncio.Future[None] | None = None
        self.begun = False

    def _begin(self) -> None:
        self.begun = True
        self._late = asyncio.ensure_future(self._send(self._message))

    def hold(self) -> None:
        """Cancel the timer: only `send` sends it now."""
        if self._timer is not None:
            self._timer.cancel()

    async def send(self) -> None:
        if not self.begun:
            self.begun = True
            self.hold()
            await self._send(self._message)
        elif self._late is not None:
            late, self._late = self._late, None
            await late
