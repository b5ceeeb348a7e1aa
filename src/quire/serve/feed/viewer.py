"""One viewer's end of the feed: events wait here, a few at most, and leave as fast as the viewer reads."""

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.serve.disconnect import ClientGone, UnlessGone

MOST_WAITING = 32  # events
MOST_BYTES = 2**20  # of them
HEARTBEAT = 10.0  # seconds without an event
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"),
]  # fmt: skip

_encoder = msgspec.json.Encoder()


def encode(kind: str, event: dict[str, Any]) -> bytes:
    """All but its number: that is each viewer's own."""
    return b"event: " + kind.encode() + b"\ndata: " + _encoder.encode(event) + b"\n\n"


class Viewer:
    """`snapshot` makes what a viewer that has lost events goes on from."""

    def __init__(self, tenant: str | None, snapshot: Callable[[], bytes]) -> None:
        self.tenant = tenant
        self._snapshot = snapshot
        self._waiting: deque[bytes] = deque()
        self._bytes = self._lost = self._number = 0
        self._over, self._last = False, b""
        self._news = asyncio.Event()

    def push(self, *events: bytes) -> None:
        size = sum(map(len, events))
        full = len(self._waiting) + len(events) > MOST_WAITING or self._bytes + size > MOST_BYTES
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
        """After what waits, the viewer is told this and no more."""
        if not self._over:
            self._over, self._last = True, last
            self._news.set()

    async def take(self) -> bytes:
        """What there is to send now; nothing when it is over."""
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
    """Events until the viewer goes, or the server. `left` is called then."""

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
