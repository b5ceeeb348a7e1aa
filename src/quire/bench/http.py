"""HTTP/1.1 responses from bytes as they come: status, headers, and a body by length, in chunks, or until the end.

Knows no sockets and no clock: whoever feeds it says when the bytes came.
"""

from collections.abc import Callable, Mapping
from typing import Protocol

MAX_HEAD = 64 * 1024


class BadResponse(ConnectionError):
    """What came is not HTTP/1.1, or ended before it was whole."""


class Receiver(Protocol):
    """Takes one response. `now` is when the bytes came from the network."""

    def head(self, status: int, headers: Mapping[str, str]) -> None: ...

    def body(self, data: bytes, now: float) -> None: ...


class ResponseParser:
    """One response. `feed` until it returns True; `close` when the connection ends."""

    def __init__(self, receiver: Receiver) -> None:
        self.receiver = receiver
        self.complete = False
        self.keep_alive = False
        self._step: Callable[[float], bool] = self._head
        self._left: int | None = None  # bytes of body or chunk still to come; None is until the connection ends
        self._chunked = False
        self._buffer = b""
        self._at = 0

    def feed(self, data: bytes, now: float) -> bool:
        self._buffer = self._buffer[self._at :] + data
        self._at = 0
        while not self.complete and self._step(now):
            pass
        return self.complete

    def close(self) -> None:
        if self._left is None and self._step == self._content:
            self.complete = True
        if not self.complete:
            raise BadResponse("the connection was closed in the middle of the answer" if self._started else "no answer came")

    @property
    def _started(self) -> bool:
        return self._step != self._head

    def _line(self) -> bytes | None:
        end = self._buffer.find(b"\r\n", self._at)
        if end < 0:
            if len(self._buffer) - self._at > MAX_HEAD:
                raise BadResponse("a line of the answer has no end")
            return None
        line = self._buffer[self._at : end]
        self._at = end + 2
        return line

    def _head(self, _: float) -> bool:
        end = self._buffer.find(b"\r\n\r\n", self._at)
        if end < 0:
            if len(self._buffer) > MAX_HEAD:
                raise BadResponse(f"the answer's headers are longer than {MAX_HEAD} bytes")
            return False
        first, *rest = self._buffer[self._at : end].decode("latin-1").split("\r\n")
        self._at = end + 4
        version, _space, status_text = first.partition(" ")
        code = status_text[:3]
        if not version.startswith("HTTP/1.") or not code.isdigit():
            raise BadResponse(f"this is not an HTTP/1.1 answer: {first[:80]!r}")
        status = int(code)
        if status < 200:  # interim, another head follows
            return True
        headers = {name.strip().lower(): value.strip() for name, _colon, value in (line.partition(":") for line in rest)}
        self._measure(version, status, headers)
        self.receiver.head(status, headers)
        return True

    def _measure(self, version: str, status: int, headers: Mapping[str, str]) -> None:
        """How long the body is, and whether the connection outlives it."""
        connection = headers.get("connection", "").lower()
        self.keep_alive = "close" not in connection and (version != "HTTP/1.0" or "keep-alive" in connection)
        self._step = self._content
        if status in (204, 304):
            self.complete = True
        elif headers.get("transfer-encoding", "").lower().endswith("chunked"):
            self._chunked = True
            self._step = self._chunk_size
        elif "content-length" in headers:
            length = headers["content-length"]
            if not length.isdigit():
                raise BadResponse(f"content-length is not a number: {length[:40]!r}")
            self._left = int(length)
            self.complete = self._left == 0
        else:
            self.keep_alive = False

    def _content(self, now: float) -> bool:
        end = len(self._buffer) if self._left is None else min(len(self._buffer), self._at + self._left)
        if end == self._at:
            return False
        data = self._buffer[self._at : end]
        self._at = end
        if self._left is not None:
            self._left -= len(data)
            if self._left == 0:
                if self._chunked:
                    self._step = self._chunk_end
                else:
                    self.complete = True
        self.receiver.body(data, now)
        return True

    def _chunk_size(self, _: float) -> bool:
        line = self._line()
        if line is None:
            return False
        try:
            self._left = int(line.partition(b";")[0], 16)
        except ValueError:
            raise BadResponse(f"a chunk's size is not a number: {line[:40]!r}") from None
        self._step = self._content if self._left else self._trailer
        return True

    def _chunk_end(self, _: float) -> bool:
        line = self._line()
        if line is None:
            return False
        if line:
            raise BadResponse("a chunk is longer than its size says")
        self._step = self._chunk_size
        return True

    def _trailer(self, _: float) -> bool:
        line = self._line()
        if line is None:
            return False
        self.complete = not line
        return True
