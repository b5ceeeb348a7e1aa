"""Connections with TLS from the moment they are accepted: those whose handshake is not done count as all others do, make room
as those do that only wait, and have no longer for it than for the head of a request.

A loop's own servers take any number of them, and tell nobody of one until its handshake is done.
"""

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Callable

from quire.serve.connection import ClientConnection
from quire.serve.crowd import Crowd

logger = logging.getLogger(__name__)

PAUSE = 1.0  # seconds, when the system has no descriptor left


class Handshake:
    """A member of the crowd until its connection is one."""

    body_size = body_age = unread = stalled = 0

    def __init__(self, peer: socket.socket, seconds: int) -> None:
        self._peer, self._left = peer, seconds

    def look(self) -> None:
        self._left -= 1
        if self._left <= 0:
            self.make_room()

    def make_room(self) -> None:
        with contextlib.suppress(OSError):  # it is gone
            self._peer.shutdown(socket.SHUT_RDWR)

    def give_up_body(self) -> None:
        pass

    def close_unread(self) -> None:
        pass


class Handshakes:
    """Accepts from listening sockets until it is closed."""

    def __init__(self, crowd: Crowd, context: ssl.SSLContext, connect: Callable[[], ClientConnection]) -> None:
        self._crowd, self._context, self._connect = crowd, context, connect
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
                await asyncio.sleep(PAUSE)
                continue
            handshake = Handshake(peer, self._crowd.limits.head_seconds)
            if self._crowd.enter(handshake):
                self._start(self._shake_hands(peer, handshake))
            else:
                peer.close()

    async def _shake_hands(self, peer: socket.socket, handshake: Handshake) -> None:
        def connect() -> ClientConnection:
            connection = self._connect()
            connection.arrived = lambda: self._crowd.leave(handshake)
            return connection

        try:
            await asyncio.get_running_loop().connect_accepted_socket(connect, peer, ssl=self._context)
        except (OSError, ssl.SSLError) as error:
            logger.debug("a TLS handshake failed: %s", error)
            peer.close()
        finally:
            self._crowd.leave(handshake)
