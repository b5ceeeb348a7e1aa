"""The HTTP server: listening sockets, and uvicorn with our connections. The launcher handles signals.

Sockets are bound before the model is loaded, so a port in use is an error at once.

With TLS, connections are accepted here: the event loop's own server accepts any number of connections and reports none of them
before its handshake is done. Here a connection counts against the limits from the moment it is accepted, can be closed to make
room, and has as long for its handshake as for the head of a request.
"""

import asyncio
import contextlib
import errno
import ipaddress
import logging
import socket
import ssl
import stat
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from quire.config.server_args import ServerArgs
from quire.serve.connection import ClientConnection
from quire.serve.limits import LIMITS, ConnectionLimits, ServerLimits, raise_descriptor_limit
from quire.types.errors import ConfigError

logger = logging.getLogger(__name__)

ACCEPT_PAUSE_S = 1.0  # after a failed accept: no descriptor is left


class Handshake:
    """A TLS handshake; counts against the limits until it becomes a connection."""

    body_size = body_age = unread = stalled = 0

    def __init__(self, peer: socket.socket, seconds: int) -> None:
        self._peer, self._left = peer, seconds

    def tick(self) -> None:
        self._left -= 1
        if self._left <= 0:
            self.make_room()

    def make_room(self) -> None:
        with contextlib.suppress(OSError):  # the peer has closed
            self._peer.shutdown(socket.SHUT_RDWR)

    def give_up_body(self) -> None:
        pass

    def close_unread(self) -> None:
        pass


class Handshakes:
    """Accepts from listening sockets until it is closed."""

    def __init__(self, limits: ConnectionLimits, context: ssl.SSLContext, connect: Callable[[], ClientConnection]) -> None:
        self._connection_limits, self._context, self._connect = limits, context, connect
        self._tasks: set[asyncio.Task[None]] = set()

    def listen(self, listener: socket.socket, backlog: int) -> None:
        listener.setblocking(False)
        listener.listen(backlog)
        self._start(self._accept(listener))

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    def _start(self, work: "asyncio._CoroutineLike[None]") -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                peer, _ = await loop.sock_accept(listener)
            except OSError as error:
                logger.warning("no connection can be accepted: %s", error)
                await asyncio.sleep(ACCEPT_PAUSE_S)
                continue
            handshake = Handshake(peer, self._connection_limits.limits.head_seconds)
            if self._connection_limits.enter(handshake):
                self._start(self._shake_hands(peer, handshake))
            else:
                peer.close()

    async def _shake_hands(self, peer: socket.socket, handshake: Handshake) -> None:
        def connect() -> ClientConnection:
            connection = self._connect()
            connection.arrived = lambda: self._connection_limits.leave(handshake)
            return connection

        try:
            await asyncio.get_running_loop().connect_accepted_socket(connect, peer, ssl=self._context)
        except (OSError, ssl.SSLError) as error:
            logger.debug("a TLS handshake failed: %s", error)
            peer.close()
        finally:
            self._connection_limits.leave(handshake)


RESPONSE_GRACE_S = 5.0  # for responses to be written after their requests were ended
TICKS = 10  # of uvicorn in a second


class HttpServer(uvicorn.Server):
    def __init__(self, settings: ServerArgs, app: ASGIApp, limits: ServerLimits = LIMITS) -> None:
        self.connection_limits = ConnectionLimits(limits, raise_descriptor_limit())
        self._handshakes: Handshakes | None = None
        super().__init__(_config(settings, app, self.connection_limits))

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        context = self.config.ssl
        if context is None or sockets is None:
            await super().startup(sockets)
            return
        await super().startup([])
        self._handshakes = Handshakes(self.connection_limits, context, self._connect)
        for listener in sockets:
            self._handshakes.listen(listener, self.config.backlog)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._handshakes is not None:
            self._handshakes.close()
        await super().shutdown(sockets)

    def _connect(self) -> ClientConnection:
        connect: Any = self.config.http_protocol_class
        made = connect(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)
        assert isinstance(made, ClientConnection)
        return made

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def on_tick(self, counter: int) -> bool:
        if counter % TICKS == 0:
            self.connection_limits.tick()
        return await super().on_tick(counter)


def _config(settings: ServerArgs, app: ASGIApp, connection_limits: ConnectionLimits) -> uvicorn.Config:
    config = uvicorn.Config(
        app,
        log_config=None,
        http=partial(ClientConnection, connection_limits=connection_limits, send_ids=settings.enable_request_id_headers),  # type: ignore[arg-type]
        lifespan="off",
        ws="none",
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=settings.timeout_keep_alive,
        timeout_graceful_shutdown=int(RESPONSE_GRACE_S),
        ssl_keyfile=settings.ssl_keyfile,
        ssl_certfile=settings.ssl_certfile,
        ssl_ca_certs=settings.ssl_ca_certs,
        ssl_cert_reqs=settings.ssl_cert_reqs,
        ssl_ciphers=settings.ssl_ciphers or "DEFAULT",
    )
    try:
        config.load()
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"the TLS certificate or its key cannot be used: {error}") from None
    return config


# ---- listening sockets

BACKLOG = 2048
_NO_SUCH_FAMILY = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)

Address = tuple[socket.AddressFamily, str]


def find_addresses(settings: ServerArgs) -> list[Address]:
    """Return the addresses of the host name; none for a Unix socket."""
    if settings.uds is not None:
        return []
    try:
        found = socket.getaddrinfo(settings.host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ConfigError(f"--host {settings.host}: {error.strerror or error}; give an address of this machine") from None
    return list(dict.fromkeys((family, str(address[0])) for family, _, _, _, address in found))


def reachable(addresses: list[Address]) -> bool:
    """Can other machines connect?"""
    return not all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for _, address in addresses)


def on_loopback(sockets: list[socket.socket]) -> bool:
    """Return whether all sockets listen on loopback addresses. Browsers cannot connect to a Unix socket, which is none."""
    internet = [each for each in sockets if each.family != socket.AF_UNIX]
    return bool(internet) and not reachable([(each.family, str(each.getsockname()[0])) for each in internet])


def listen(settings: ServerArgs, addresses: list[Address]) -> list[socket.socket]:
    if settings.uds is not None:
        return [_listen_unix(settings.uds)]
    sockets: list[socket.socket] = []
    port = settings.port
    try:
        for family, address in addresses:
            try:
                sockets.append(_listen_tcp(family, address, port))
            except OSError as error:
                if error.errno in _NO_SUCH_FAMILY and len(addresses) > 1:
                    continue  # such as an IPv6 address on a machine without IPv6
                raise ConfigError(_why(error, address, port)) from None
            port = sockets[-1].getsockname()[1]
        if not sockets:
            raise ConfigError(f"--host {settings.host} is not an address of this machine")
    except ConfigError:
        for opened in sockets:
            opened.close()
        raise
    return sockets


def url_of(settings: ServerArgs, sockets: list[socket.socket]) -> str:
    if settings.uds is not None:
        return f"unix:{settings.uds}"
    host, port = sockets[0].getsockname()[:2]
    scheme = "http" if settings.ssl_certfile is None else "https"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def page_of(settings: ServerArgs, sockets: list[socket.socket]) -> str | None:
    """Return the URL of the page for a browser on this machine; None if there is no page."""
    if settings.disable_page or settings.uds is not None:
        return None
    everywhere = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}
    url = url_of(settings, sockets)
    for address, loopback in everywhere.items():
        url = url.replace(f"//{address}:", f"//{loopback}:")
    return f"{url}/"


def _listen_tcp(family: socket.AddressFamily, address: str, port: int) -> socket.socket:
    opened = socket.socket(family, socket.SOCK_STREAM)
    try:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            opened.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        opened.bind((address, port))
        opened.listen(BACKLOG)
    except OSError:
        opened.close()
        raise
    return opened


def _why(error: OSError, address: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"port {port} of {address} is in use: stop what listens there, or choose another with --port (0 takes a free one)"
        )
    if error.errno == errno.EACCES:
        return f"port {port} of {address} is not for ordinary users: choose one above 1023 with --port"
    return f"cannot listen on {address}, port {port}: {error.strerror}"


def _listen_unix(path: str) -> socket.socket:
    """The directory and the umask decide who may connect. A socket without a listener is replaced."""
    _remove_stale(path)
    opened = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        opened.bind(path)
        opened.listen(BACKLOG)
    except OSError as error:
        opened.close()
        raise ConfigError(f"--uds {path}: {error.strerror or error}") from None
    return opened


def _remove_stale(path: str) -> None:
    try:
        mode = Path(path).stat().st_mode
    except OSError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"--uds {path}: there is a file of that name; choose another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            Path(path).unlink()
        except OSError as error:
            raise ConfigError(f"--uds {path}: {error.strerror}") from None
        else:
            raise ConfigError(f"--uds {path}: another server listens there; choose another path")
