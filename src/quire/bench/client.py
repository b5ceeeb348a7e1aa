"""An HTTP/1.1 load client for thousands of streams on one core: asyncio transports, keep-alive, parsed as bytes arrive.

The time of a token is taken when its bytes are read from the socket, not when a task is scheduled. httpx needs about twenty
times the processor time per request.
"""

import asyncio
import contextlib
import json
import resource
import socket
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import urlsplit

from quire.types.errors import ConfigError, EngineError

MAX_HEAD_BYTES = 64 * 1024


class BadResponse(ConnectionError):
    """The answer is not HTTP/1.1, or ended before it was complete."""


class Receiver(Protocol):
    """Receives one response. `now` is the time at which the bytes came from the network."""

    def head(self, status: int, headers: Mapping[str, str]) -> None: ...

    def body(self, data: bytes, now: float) -> None: ...


class ResponseParser:
    """Parses one response. Call `feed` until it returns True, and `close` when the connection ends."""

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
            if len(self._buffer) - self._at > MAX_HEAD_BYTES:
                raise BadResponse("a line of the answer has no end")
            return None
        line = self._buffer[self._at : end]
        self._at = end + 2
        return line

    def _head(self, _: float) -> bool:
        end = self._buffer.find(b"\r\n\r\n", self._at)
        if end < 0:
            if len(self._buffer) > MAX_HEAD_BYTES:
                raise BadResponse(f"the answer's headers are longer than {MAX_HEAD_BYTES} bytes")
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
        """Determine the length of the body, and whether the connection stays open after it."""
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
            raise BadResponse("a chunk is longer than its size")
        self._step = self._chunk_size
        return True

    def _trailer(self, _: float) -> bool:
        line = self._line()
        if line is None:
            return False
        self.complete = not line
        return True


class EventReader:
    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, data: bytes) -> list[bytes]:
        """Return the data of every event that `data` completes."""
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        events: list[bytes] = []
        for line in lines:
            if line.startswith(b"data:"):
                self._data.append(line[5:].strip())
            elif self._data and line in (b"", b"\r"):
                events.append(self._data[0] if len(self._data) == 1 else b"\n".join(self._data))
                self._data = []
        return events


CONNECT_TIMEOUT_S = 30.0
MAX_BODY_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True)
class Origin:
    """The address of a server: `https://host:port/base`."""

    secure: bool
    host: str
    port: int
    base: str = ""

    @classmethod
    def parse(cls, url: str) -> "Origin":
        wrong = f"--base-url {url!r} is not like http://127.0.0.1:8000 or https://host/path"
        try:
            parts = urlsplit(url if "//" in url else f"http://{url}")
            port = parts.port
        except ValueError:
            raise ConfigError(wrong) from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(wrong)
        if "@" in parts.netloc:
            raise ConfigError("--base-url must not have a name or password, which would be saved; use --api-key or --header")
        secure = parts.scheme == "https"
        return cls(secure, parts.hostname, port or (443 if secure else 80), parts.path.rstrip("/"))

    def path(self, endpoint: str) -> str:
        """Return the path of an endpoint. `/v1` appears once, even if the base URL ends with it (as for OpenAI clients)."""
        return self.root(endpoint) if endpoint.startswith("/v1/") else self.base + endpoint

    def root(self, endpoint: str) -> str:
        """Return the path of an endpoint outside of `/v1`."""
        return self.base.removesuffix("/v1") + endpoint

    def __str__(self) -> str:
        name = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.secure else 'http'}://{name}:{self.port}{self.base}"


class LoadConnection(asyncio.Protocol):
    """A connection that carries one exchange after another."""

    def __init__(self) -> None:
        self.open = False
        self.answered = False  # a byte of the current answer has come
        self._parser: ResponseParser | None = None
        self._finished: asyncio.Future[None] | None = None
        self._transport: asyncio.Transport

    async def exchange(self, request: bytes, receiver: Receiver) -> None:
        self.answered = False
        if not self.open:
            raise BadResponse("the server closed the connection")
        self._parser = ResponseParser(receiver)
        self._finished = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            await self._finished
        except BaseException:
            self.close()
            raise
        finally:
            self._parser = self._finished = None

    def close(self) -> None:
        self.open = False
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.open = True

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        self.answered = True
        if self._parser is None:  # a server must not send on an idle connection
            self.close()
            return
        try:
            if self._parser.feed(data, now):
                if not self._parser.keep_alive:
                    self.close()
                self._end(None)
        except Exception as error:
            self._end(error)

    def connection_lost(self, error: Exception | None) -> None:
        self.open = False
        if self._parser is None:
            return
        try:
            self._parser.close()
        except BadResponse as cut:
            self._end(error or cut)
        else:
            self._end(None)

    def _end(self, error: Exception | None) -> None:
        if self._finished is not None and not self._finished.done():
            if error is None:
                self._finished.set_result(None)
            else:
                self._finished.set_exception(error)


@dataclass
class WholeAnswer:
    """A complete response, for small queries. It is its own receiver."""

    status: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)
    content: bytes = b""

    def head(self, status: int, headers: Mapping[str, str]) -> None:
        self.status, self.headers = status, headers

    def body(self, data: bytes, now: float) -> None:  # noqa: ARG002
        self.content += data
        if len(self.content) > MAX_BODY_BYTES:
            raise BadResponse(f"the answer is longer than {MAX_BODY_BYTES} bytes")

    def json(self) -> Any:
        """Return the content, or None if it is not JSON."""
        try:
            return json.loads(self.content)
        except ValueError:
            return None


class Client:
    """Connections to one server, one for each concurrent exchange."""

    def __init__(
        self, origin: Origin, headers: Mapping[str, str], *, insecure: bool = False, timeout: float | None = None
    ) -> None:
        self.origin = origin
        self.timeout = timeout
        self._tls = _tls(insecure) if origin.secure else None
        named = {"host": _host(origin), "accept": "*/*", "content-type": "application/json", **headers}
        for name, value in named.items():
            if not name.isascii() or any(sign in name + value for sign in "\r\n\0"):
                raise ConfigError(f"header {name!r} has characters that a header cannot have")
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in named.items()).encode("utf-8")
        self._address: tuple[str, int] | None = None
        self._idle: list[LoadConnection] = []
        self._all: set[LoadConnection] = set()

    async def reach(self) -> None:
        """Find an address that answers; the name is looked up once, not for every request."""
        loop = asyncio.get_running_loop()
        origin = self.origin
        try:
            found = await loop.getaddrinfo(origin.host, origin.port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise EngineError(f"cannot find the server {origin.host}: {reason(error)}") from None
        failure: Exception | None = None
        for *_, address in found:
            self._address = (str(address[0]), int(address[1]))
            try:
                self._idle.append(await self._connect())
                return
            except (OSError, TimeoutError) as error:
                failure = failure or error
        raise EngineError(f"no server answers at {origin}: {reason(failure)}")

    async def exchange(self, method: str, path: str, body: bytes, receiver: Receiver, request_id: str = "") -> None:
        """Send a request and receive its answer. Raise OSError or TimeoutError if there is none, or an incomplete one."""
        request = self.render(method, path, body, request_id)
        async with asyncio.timeout(self.timeout):
            while True:
                reused = self._idle.pop() if self._idle else None
                connection = reused or await self._connect()
                try:
                    await connection.exchange(request, receiver)
                except OSError:
                    if reused and not connection.answered:  # the server closed it while it was idle
                        continue
                    raise
                finally:
                    self._release(connection)
                return

    async def ask(self, method: str, endpoint: str, question: Any = None) -> WholeAnswer:
        answer = WholeAnswer()
        body = b"" if question is None else json.dumps(question).encode()
        await self.exchange(method, self.origin.root(endpoint), body, answer)
        return answer

    def render(self, method: str, path: str, body: bytes, request_id: str = "") -> bytes:
        named = f"x-request-id: {request_id}\r\n" if request_id else ""
        start = f"{method} {path} HTTP/1.1\r\n{named}content-length: {len(body)}\r\n".encode()
        return b"".join((start, self._headers, b"\r\n", body))

    async def close(self) -> None:
        for connection in self._all:
            connection.close()
        self._all.clear()
        self._idle.clear()
        await asyncio.sleep(0)  # lets the transports close

    async def _connect(self) -> LoadConnection:
        if self._address is None:
            await self.reach()
            return self._idle.pop()
        server_name = self.origin.host if self._tls else None
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            _, connection = await asyncio.get_running_loop().create_connection(
                LoadConnection, *self._address, ssl=self._tls, server_hostname=server_name
            )
        self._all.add(connection)
        return connection

    def _release(self, connection: LoadConnection) -> None:
        if connection.open:
            self._idle.append(connection)
        else:
            self._all.discard(connection)


def allow_open_files(count: int) -> None:
    """Raise this process's limit towards `count` open files, as far as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < target:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))


def reason(error: BaseException | None) -> str:
    """Describe an exception for a reader."""
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, ConnectionRefusedError):
        return "connection refused"
    if isinstance(error, ConnectionResetError):
        return "the connection was reset"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__


def _tls(insecure: bool) -> ssl.SSLContext:
    context = ssl.create_default_context()
    if insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def _host(origin: Origin) -> str:
    name = f"[{origin.host}]" if ":" in origin.host else origin.host
    return name if origin.port == (443 if origin.secure else 80) else f"{name}:{origin.port}"
