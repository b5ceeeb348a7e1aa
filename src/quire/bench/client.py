"""An HTTP/1.1 client for very many streams on one core: plain asyncio transports, kept alive, parsed as bytes come.

The time of a token is taken when its bytes leave the socket, not when some task gets its turn.
"""

import asyncio
import contextlib
import json
import resource
import socket
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from quire.bench.http import BadResponse, Receiver, ResponseParser
from quire.types.errors import ConfigError, EngineError

CONNECT_TIMEOUT = 30.0
MAX_BODY = 64 * 1024 * 1024


@dataclass(frozen=True)
class Origin:
    """Where a server is: `https://host:port/base`."""

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
            raise ConfigError("--base-url holds a name or password, which would be saved; use --api-key or --header")
        secure = parts.scheme == "https"
        return cls(secure, parts.hostname, port or (443 if secure else 80), parts.path.rstrip("/"))

    def path(self, endpoint: str) -> str:
        """`/v1` is said once, whether the base URL ends with it (as OpenAI clients write it) or not."""
        return self.root(endpoint) if endpoint.startswith("/v1/") else self.base + endpoint

    def root(self, endpoint: str) -> str:
        """An endpoint that stands beside `/v1`."""
        return self.base.removesuffix("/v1") + endpoint

    def __str__(self) -> str:
        name = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.secure else 'http'}://{name}:{self.port}{self.base}"


class LoadConnection(asyncio.Protocol):
    """A socket that carries one exchange after another."""

    def __init__(self) -> None:
        self.open = False
        self.heard = False  # has any byte of the present answer come
        self._parser: ResponseParser | None = None
        self._finished: asyncio.Future[None] | None = None
        self._transport: asyncio.Transport

    async def exchange(self, request: bytes, receiver: Receiver) -> None:
        self.heard = False
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
        self.heard = True
        if self._parser is None:  # an idle connection has nothing to say
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
    """A whole response, for small questions. It is its own receiver."""

    status: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)
    content: bytes = b""

    def head(self, status: int, headers: Mapping[str, str]) -> None:
        self.status, self.headers = status, headers

    def body(self, data: bytes, now: float) -> None:  # noqa: ARG002
        self.content += data
        if len(self.content) > MAX_BODY:
            raise BadResponse(f"the answer is longer than {MAX_BODY} bytes")

    def json(self) -> Any:
        """What was said, or None where it is not JSON."""
        try:
            return json.loads(self.content)
        except ValueError:
            return None


class Client:
    """Connections to one server. As many are open as there are exchanges at once."""

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
        """Finds an address that answers; names are looked up once, not once a request."""
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
        """Ends when the answer has ended. Raises OSError or TimeoutError when there is none, or not a whole one."""
        request = self.render(method, path, body, request_id)
        async with asyncio.timeout(self.timeout):
            while True:
                kept = self._idle.pop() if self._idle else None
                connection = kept or await self._connect()
                try:
                    await connection.exchange(request, receiver)
                except OSError:
                    if kept and not connection.heard:  # closed by the server while nobody used it
                        continue
                    raise
                finally:
                    self._keep(connection)
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
        await asyncio.sleep(0)  # lets the transports say goodbye

    async def _connect(self) -> LoadConnection:
        if self._address is None:
            await self.reach()
            return self._idle.pop()
        server_name = self.origin.host if self._tls else None
        async with asyncio.timeout(CONNECT_TIMEOUT):
            _, connection = await asyncio.get_running_loop().create_connection(
                LoadConnection, *self._address, ssl=self._tls, server_hostname=server_name
            )
        self._all.add(connection)
        return connection

    def _keep(self, connection: LoadConnection) -> None:
        if connection.open:
            self._idle.append(connection)
        else:
            self._all.discard(connection)


def allow_open_files(count: int) -> None:
    """Raises this process's limit towards `count` open files, as far as the system lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def reason(error: BaseException | None) -> str:
    """An exception in words for people."""
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
