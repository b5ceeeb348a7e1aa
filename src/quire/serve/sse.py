"""Server-sent events: an async generator of JSON objects becomes a stream, written as one of two protocols does (`Wire`).

A stream starts only with its first event, or after `PATIENCE` seconds without one: what goes wrong before that is an
ordinary HTTP error. What goes wrong later is an event of its own.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.serve.disconnect import client_gone, stop, unless_gone
from quire.serve.errors import anthropic_error, describe, request_id_of
from quire.serve.protocol.errors import ErrorBody

PATIENCE = 1.0  # seconds; a refusal takes milliseconds, a full queue may take minutes

_encoder = msgspec.json.Encoder()
Events = AsyncGenerator[Any, None]


# characters JSON may hold as they are, but at which some clients end a line
_LINE_ENDS = tuple((mark.encode(), f"\\u{ord(mark):04x}".encode()) for mark in "\u0085\u2028\u2029")


def encode_event(event: Any) -> bytes:
    data = _encoder.encode(event)
    for mark, escaped in _LINE_ENDS:
        if mark in data:
            data = data.replace(mark, escaped)
    return b"data: " + data + b"\n\n"


def encode_named(event: Any) -> bytes:
    """With its type as the event's name in front."""
    return f"event: {event['type']}\n".encode() + encode_event(event)


@dataclass(frozen=True)
class Wire:
    """How events are written, how a failure in the middle of them is, and what ends a stream."""

    encode: Callable[[Any], bytes]
    failure: Callable[[ErrorBody, str], Any]
    end: bytes


OPENAI = Wire(encode_event, lambda body, _: body, b"data: [DONE]\n\n")
NAMED = Wire(encode_named, lambda body, _: {**body["error"], "type": "error"}, b"")  # OpenAI's newer way
ANTHROPIC = Wire(encode_named, anthropic_error, b"")


async def open_stream(events: Events, receive: Receive, wire: Wire = OPENAI) -> "EventStream":
    """A response for these events. Raises what they raise before the first one, and ClientGone."""
    first = asyncio.ensure_future(anext(events, None))
    try:
        await unless_gone(receive, _ready(first))
    except BaseException:
        await stop(first)
        await events.aclose()
        raise
    return EventStream(first, events, wire)


async def _ready(first: "asyncio.Future[Any]") -> None:
    done, _ = await asyncio.wait({first}, timeout=PATIENCE)
    for future in done:
        future.result()


class EventStream(Response):
    media_type = "text/event-stream"

    def __init__(self, first: "asyncio.Task[Any]", events: Events, wire: Wire) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._first = first
        self._events = events
        self._wire = wire

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Ends with the last event, or as soon as the client hangs up; the generator is closed either way."""
        sending = asyncio.create_task(self._send(request_id_of(scope), send))
        watching = asyncio.create_task(client_gone(receive))
        try:
            await asyncio.wait({sending, watching}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            await stop(sending, watching, self._first)
            await self._events.aclose()

    async def _send(self, request_id: str, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        wire = self._wire
        try:
            event = await self._first
            while event is not None:
                await send({"type": "http.response.body", "body": wire.encode(event), "more_body": True})
                event = await anext(self._events, None)
        except Exception as error:
            failure = wire.failure(describe(error, request_id), request_id)
            await send({"type": "http.response.body", "body": wire.encode(failure), "more_body": True})
        await send({"type": "http.response.body", "body": wire.end, "more_body": False})
