"""One HTTP connection, within limits: every byte is counted before it is parsed, and each step of the client has a deadline.

uvicorn's protocol does the work. It has no bounds of its own: an endless header is stored and copied again with every packet,
what follows a request is parsed and queued without end, and silent clients stay connected.

    idle ──► head ──► body ──► answer ──► idle ...        in each, `tick` counts the seconds that the client has to do its part
                └───────┴────────► over                   refused: what still comes is thrown away until the client has read it

Large input is parsed in parts, and the event loop runs other work in between.
"""

import asyncio
import logging
import secrets
from collections.abc import Callable
from typing import Any

import httptools
import msgspec
from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from quire.serve.errors import RETRY_AFTER, error_body
from quire.serve.limits import UNREAD_BYTES, ConnectionLimits

logger = logging.getLogger(__name__)

PARSE_BYTES = 64 * 2**10  # bytes that are parsed at a time
MAX_DISCARDED_BYTES = 2**20  # that a client may still send after a refusal: if it were cut off, it would not read the refusal
_BODY_HEADERS = (b"content-length", b"transfer-encoding")


class _Refused(Exception):
    """Raised in the parser's callbacks, to make it stop."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


class _Flow(FlowControl):
    """Reading may also be held back by ourselves, while there is something left to parse."""

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__(transport)
        self._held = False

    def pause_reading(self) -> None:
        if not self.read_paused:
            self.read_paused = True
            self._apply(was=self._held)

    def resume_reading(self) -> None:
        if self.read_paused:
            self.read_paused = False
            self._apply(was=True)

    def hold(self, held: bool) -> None:
        was = self._held or self.read_paused
        self._held = held
        self._apply(was)

    def _apply(self, was: bool) -> None:
        now = self._held or self.read_paused
        if now == was or self._transport.is_closing():
            return
        if now:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()


class ClientConnection(HttpToolsProtocol):
    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        connection_limits: ConnectionLimits,
        send_ids: bool = True,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.access_log = False  # `RequestIds` writes it
        self.body_size = self.body_age = 0
        self._connection_limits, self._limits = connection_limits, connection_limits.limits
        self.arrived: Callable[[], None] | None = None  # called when the connection is made, before it counts
        self._sends_ids = send_ids  # refusals have one, as all answers then
        self._flow: _Flow | None = None
        self._rest = b""  # read, and not parsed yet
        self._over = False  # what comes is thrown away
        self._answered: RequestResponseCycle | None = None  # the request whose answer is due; `cycle` is the latest one
        self._in_head = True
        self._head = 0  # bytes of the head so far
        self._fields = self._field_bytes = 0  # headers so far
        self._framing = 0  # bytes since the body's latest
        self._thrown = 0  # bytes received after the refusal
        self._due: bytes | None = None  # a refusal that follows the answers to what came before
        self._age = 0  # seconds
        self._progress = 0  # bytes of the body in that time
        self.unread = self.stalled = 0
        self._unsent = 0  # bytes in the transport's buffer, a second ago

    # ---- the transport's side ---------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = self._flow = _Flow(transport)
        if self.arrived is not None:
            self.arrived()
        if not self._connection_limits.enter(self):
            self._over = True
            transport.write(self._refusal(503, "there are too many connections", RETRY_AFTER))
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connection_limits.leave(self)
        self._over, self._rest, self._due = True, b"", None
        self.pipeline.clear()
        if self._answered is not None and not self._answered.response_complete:
            self._answered.disconnected = True
            self._answered.message_event.set()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()

    def data_received(self, data: bytes) -> None:
        if self._over:
            self._throw_away(len(data), MAX_DISCARDED_BYTES)
        elif self._rest:
            self._rest += data
        elif len(data) <= PARSE_BYTES and not self.pipeline:
            self._feed(data)
        else:
            self._rest = data
            assert self._flow is not None
            self._flow.hold(True)
            self._go_on()

    def shutdown(self) -> None:
        if self._answered is None or self._answered.response_complete:
            self.transport.close()
        else:
            self._answered.keep_alive = False
            self.pipeline.clear()

    def _go_on(self) -> None:
        """Parses the next part of what was read, unless requests are waiting that came before."""
        if not self._rest or self.pipeline:
            return
        part, self._rest = self._rest[:PARSE_BYTES], self._rest[PARSE_BYTES:]
        self._feed(part)
        if self._rest:
            self.loop.call_soon(self._go_on)
        elif self._flow is not None:
            self._flow.hold(False)

    def _feed(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        if self._in_head:
            self._age = 0 if not self._head else self._age
            self._head += len(data)
        else:
            self._framing += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._end_after_answer()  # other protocols are not supported: what follows would be one
        except httptools.HttpParserError as error:
            why = error.__context__
            if isinstance(why, _Refused):
                self._refuse(why.status, why.message)
            else:
                self._refuse(400, "this is not a valid HTTP request")
        else:
            self._check_size()

    def _check_size(self) -> None:
        most = self._limits.header_bytes
        if self._in_head and self._head > most:
            self._refuse(431, f"the head of a request may have at most {most} bytes")
        elif not self._in_head and self._framing > most:
            self._refuse(431, f"a body may have at most {most} bytes of trailers, or of framing around each chunk")

    # ---- the parser's side ------------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if len(self.pipeline) >= self._limits.pipelined:
            raise _Refused(400, f"at most {self._limits.pipelined} requests may wait for the answer to another one")
        self._fields = self._field_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > self._limits.url_bytes:
            raise _Refused(414, f"the URL may have at most {self._limits.url_bytes} bytes")

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_head:
            return  # a trailer; the request has been handed on without it
        self._fields += 1
        self._field_bytes += len(name) + len(value)
        if self._fields > self._limits.headers:
            raise _Refused(431, f"a request may have at most {self._limits.headers} headers")
        if self._field_bytes > self._limits.header_bytes:
            raise _Refused(431, f"the headers may have at most {self._limits.header_bytes} bytes")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._check_kind()
        self._in_head, self._head, self._framing, self._age, self._progress = False, 0, 0, 0, 0
        self._connection_limits.busy(self)
        super().on_headers_complete()
        if not self.pipeline:
            self._answered = self.cycle
        if self.parser.should_upgrade():
            self.cycle.keep_alive = False
        self._connection_limits.begin_body(self)

    def _check_kind(self) -> None:
        if self.parser.get_http_version() not in ("1.0", "1.1"):
            raise _Refused(505, "only HTTP 1.1 and 1.0 are supported")
        if self.parser.should_upgrade() and any(name in _BODY_HEADERS for name, _ in self.headers):
            raise _Refused(
                400, "upgrades to another protocol are not supported: send the request without Upgrade"
            )  # its body is not parsed

    def on_body(self, body: bytes) -> None:
        self._framing = 0
        if self.cycle.response_complete:
            self._throw_away(len(body), 2 * self._limits.body_bytes)
            return
        self._progress += len(body)
        super().on_body(body)
        self._connection_limits.add_body(self, len(body))

    def on_message_complete(self) -> None:
        self._in_head, self._head, self._thrown, self._age = True, 0, 0, 0
        self._connection_limits.end_body(self)
        super().on_message_complete()
        if self.cycle.response_complete:
            self.cycle.more_body = False
            self._connection_limits.idle(self)

    def on_response_complete(self) -> None:
        self._answered = self.pipeline[-1][0] if self.pipeline else self._answered
        super().on_response_complete()
        self._connection_limits.end_body(self)
        self._age = 0
        if self._over:
            if self._due is not None and self._answered is not None and self._answered.response_complete:
                self._write_refusal(self._due)
            return
        if self._rest:
            self.loop.call_soon(self._go_on)
        elif self._in_head and self._answered is not None and self._answered.response_complete:
            self._connection_limits.idle(self)

    def _unsupported_upgrade_warning(self) -> None:
        pass

    # ---- patience ---------------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        limits, cycle = self._limits, self._answered
        if self.flow.write_paused:
            self._count_unread()
        else:
            self.unread = self.stalled = 0
        answering = cycle is not None and not cycle.response_complete
        if self._over:
            self._age += not answering
            if self._age > limits.linger_seconds:
                self.transport.abort()
        elif self._in_head:
            waiting = self._head > 0 or cycle is None  # between two requests uvicorn's own timer runs
            self._age += waiting and not answering
            if self._age > limits.head_seconds:
                self._time_out("the head of the request did not come")
        elif self.cycle.response_complete:
            self._age += 1
            if self._age > limits.linger_seconds:
                self.transport.abort()
        elif not self.flow.read_paused:
            self._age += 1
            if self._age > limits.body_seconds and self._progress < limits.body_progress:
                self._time_out("the body of the request did not come, or too slowly")
            elif self._age > limits.body_seconds:
                self._age = self._progress = 0

    def _count_unread(self) -> None:
        unsent = self.transport.get_write_buffer_size()
        self.stalled = self.stalled + 1 if unsent == self._unsent else 0
        self._unsent = unsent
        state = {} if self._answered is None else self._answered.scope.get("state", {})
        waiting = state.get(UNREAD_BYTES)
        self.unread = unsent + (0 if waiting is None else waiting())
        if self.stalled > self._limits.read_seconds:
            self.transport.abort()

    def close_unread(self) -> None:
        self.unread = 0
        self.transport.abort()

    def _time_out(self, why: str) -> None:
        if self._in_head and not self._head:
            self.transport.abort()  # nothing was received
        else:
            self._refuse(408, why)

    def make_room(self) -> None:
        self._connection_limits.busy(self)
        self.transport.abort()

    def give_up_body(self) -> None:
        self._refuse(503, "too many bodies of requests are unfinished", RETRY_AFTER)

    # ---- refusals ---------------------------------------------------------------------------------------------------------

    def _discard_input(self) -> None:
        self._over, self._rest, self._age, self._thrown = True, b"", 0, 0
        self._connection_limits.busy(self)
        self._connection_limits.end_body(self)
        if self._flow is not None:
            self._flow.hold(False)
            self._flow.resume_reading()

    def _end_after_answer(self) -> None:
        """Stop reading. The answer that is due is sent."""
        self.pipeline.clear()
        self._discard_input()
        if self._answered is None:
            return
        self._answered.keep_alive = False
        if self._answered.response_complete:
            self.transport.close()

    def _refuse(self, status: int, message: str, retry_after: int | None = None) -> None:
        if self._over:
            return
        logger.debug("%s: %d, %s", self.client, status, message)
        answered, sending = self._answered, not self._in_head
        unfinished = sending and answered is self.cycle and answered is not None
        if answered is not None and not answered.response_complete:
            if not unfinished:  # what came before is answered first
                if sending:
                    self.pipeline.popleft()  # the one that did not come whole
                self._due = self._refusal(status, message, retry_after)
                self._discard_input()
                return
            if answered.response_started:
                self._end_after_answer()
                return
        was_answered = unfinished and answered is not None and answered.response_complete
        self._answered = None
        self._end_after_answer()
        if unfinished and answered is not None:
            answered.disconnected = True
            answered.message_event.set()
        self._write_refusal(b"" if was_answered else self._refusal(status, message, retry_after))

    def _write_refusal(self, refusal: bytes) -> None:
        self._due = None
        if self.transport.is_closing():
            return
        self.transport.write(refusal)
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._connection_limits.idle(self)

    def _throw_away(self, size: int, most: int) -> None:
        self._thrown += size
        if self._thrown > most:
            self.transport.abort()

    def _refusal(self, status: int, message: str, retry_after: int | None) -> bytes:
        body = msgspec.json.encode(error_body(status, message))
        head = [
            "content-type: application/json",
            f"content-length: {len(body)}",
            *([f"x-request-id: {secrets.token_hex(16)}"] if self._sends_ids else []),
            *([] if retry_after is None else [f"retry-after: {retry_after}"]),
            "connection: close",
        ]
        return STATUS_LINE[status] + "\r\n".join([*head, "", ""]).encode() + body
