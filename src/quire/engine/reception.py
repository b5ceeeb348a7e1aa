"""Where nodes connect, and strangers: all are heard at once, in the thread that asks, until they have said who they are.

    accept ─► says hello in time, and knows the key ──► let in: the connection, and what it said
          └─► says something else, or nothing ────────► closed

So many may be silent at a time: when one more comes, the one that was silent for longest is closed, and may come again.
"""

import hmac
import logging
import select
import socket
import time

from quire.engine.handshake import HELLO, KEY, LENGTH, LONGEST, HungUp, Said, parse, probe, say
from quire.types.errors import EngineError

MOST = 64  # that have not said who they are
LINES = 32  # of the log about those who are no nodes, in a MINUTE
MINUTE = 60.0

logger = logging.getLogger(__name__)


class Complaints:
    """A stranger is a line in the log; of many the first, and later how many more there were."""

    def __init__(self) -> None:
        self._since, self._told, self._more = time.monotonic(), 0, 0

    def tell(self, message: str, *values: object, level: int = logging.WARNING) -> None:
        now = time.monotonic()
        if now - self._since > MINUTE:
            if self._more:
                logger.warning("%d more messages like those before about others who connected as nodes", self._more)
            self._since, self._told, self._more = now, 0, 0
        self._told += 1
        if self._told <= LINES:
            logger.log(level, message, *values)
        else:
            self._more += 1


class Reception:
    """The listener stays its owner's; connections are the reception's until they are let in."""

    def __init__(self, listener: socket.socket, key: str) -> None:
        listener.setblocking(False)
        self._listener, self._key = listener, key.encode()
        self._silent: dict[int, _Newcomer] = {}  # by descriptor, oldest first
        self.complaints = Complaints()

    def next(self, seconds: float) -> tuple[socket.socket, Said] | None:
        """The next one who is let in, and what it said; None: nobody in that time. OSError: nobody can connect now."""
        deadline = time.monotonic() + seconds
        while True:
            now = time.monotonic()
            for newcomer in [one for one in self._silent.values() if one.until < now]:
                self._drop(newcomer, "it said nothing in time")
            until = min([deadline, *(one.until for one in self._silent.values())])
            ready = self._poll(max(0.0, until - now))
            for descriptor in [one for one in self._silent if one in ready]:
                if (said := self._hear(self._silent[descriptor])) is not None:
                    return self._silent.pop(descriptor).let_in(), said
            if self._listener.fileno() in ready:
                self._accept()
            if time.monotonic() >= deadline:
                return None

    def close(self) -> None:
        for newcomer in self._silent.values():
            newcomer.connection.close()
        self._silent.clear()

    def _poll(self, seconds: float) -> set[int]:
        waiting = select.poll()  # it has no descriptor of its own: there may be none left
        for descriptor in (self._listener.fileno(), *self._silent):
            waiting.register(descriptor, select.POLLIN)
        return {descriptor for descriptor, _ in waiting.poll(1000 * seconds)}

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):  # it has gone again
            return
        self._silent[connection.fileno()] = _Newcomer(connection)
        if len(self._silent) > MOST:
            self._drop(next(iter(self._silent.values())), f"it said nothing, as {MOST} others who came behind it")

    def _hear(self, newcomer: "_Newcomer") -> Said | None:
        """None: not yet, or it is gone."""
        try:
            said = newcomer.hear()
            if said is None or hmac.compare_digest(str(said.get("key", "")).encode(errors="replace"), self._key):
                return said
            self.complaints.tell("a node is refused: its key (%s) is another one", KEY)
            say(newcomer.connection, {"refused": f"the key ({KEY}) is another one"})
        except (EngineError, OSError) as error:
            self._drop(newcomer, str(error))
        else:
            del self._silent[newcomer.connection.fileno()]
            newcomer.connection.close()
        return None

    def _drop(self, newcomer: "_Newcomer", why: str) -> None:
        self.complaints.tell("one who connected as a node is not one: %s", why)
        del self._silent[newcomer.connection.fileno()]
        newcomer.connection.close()


class _Newcomer:
    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.connection, self.until = connection, time.monotonic() + HELLO
        self._data, self._wanted = bytearray(), LENGTH.size

    def hear(self) -> Said | None:
        """Its hello, once that is whole. Bytes behind it stay where they are: they are for whoever gets the connection next."""
        while len(self._data) < self._wanted:
            try:
                piece = self.connection.recv(self._wanted - len(self._data))
            except BlockingIOError:
                return None
            if not piece:
                raise HungUp("another node has hung up")
            self._data += piece
            if len(self._data) == LENGTH.size:
                (size,) = LENGTH.unpack(self._data)
                if size > LONGEST:
                    raise EngineError("another node said what no node says")
                self._wanted += size
        return parse(self._data[LENGTH.size :])

    def let_in(self) -> socket.socket:
        self.connection.setblocking(True)
        probe(self.connection)
        return self.connection
