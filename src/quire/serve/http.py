"""The HTTP server: uvicorn with our connections. Signals are handled by the launcher.

With TLS, connections are accepted here: the event loop's own server accepts any number of connections and reports none of them
before its handshake is done. Here a connection counts against the limits from the moment it is accepted, can be closed to make
room, and has as long for its handshake as for the head of a request.
"""

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from quire.config.server_args import ServerArgs
from quire.serve.connection import ClientConnection
from quire.serve.limits import LIMITS, ConnectionLimits, ServerLimits, raise_descriptor_limit
from quire.serve.sockets import BACKLOG
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
