"""Messages between two processes over a stream socket: bytes with their length in front. What they say is not known here."""

import select
import socket
import struct
import threading
import time

_LENGTH = struct.Struct("<I")
_PIECE = 1 << 16


class Frames:
    """One end of a stream socket, read in whole frames."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self._piece = memoryview(bytearray(_PIECE))
        self._buffer = bytearray()

    def send(self, data: bytes) -> None:
        self.socket.sendall(_LENGTH.pack(len(data)) + data)

    def receive(self) -> bool:
        """Takes in what is there, waiting for the first byte as long as the socket does. False: the other end is closed."""
        count = self.socket.recv_into(self._piece)
        self._buffer += self._piece[:count]
        return count > 0

    def next(self) -> bytes | None:
        """The next whole frame of what was taken in."""
        if len(self._buffer) < _LENGTH.size:
            return None
        end = _LENGTH.size + int(_LENGTH.unpack_from(self._buffer)[0])
        if len(self._buffer) < end:
            return None
        frame = bytes(self._buffer[_LENGTH.size : end])
        del self._buffer[:end]
        return frame


class Mailbox:
    """One end of a stream socket whose owner never waits to send. Any thread may send, one receives.

    What the other side has no room for is kept, however much that is, and leaves with the next message, with `flush` or during
    `wait`. What is sent to nobody is lost.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.closed = False  # the other end is: nothing comes any more
        self._socket, self._frames = connection, Frames(connection)
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self._kept = bytearray()
        self._lock = threading.Lock()  # of what is kept

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def full(self) -> bool:
        """Is something kept? Then `flush` when the socket can be written."""
        return bool(self._kept)

    def send(self, data: bytes) -> None:
        with self._lock:
            self._kept += _LENGTH.pack(len(data))
            self._kept += data
            self._push()

    def flush(self) -> None:
        with self._lock:
            self._push()

    def receive(self) -> bytes | None:
        """The next message, None if there is none now."""
        while (frame := self._frames.next()) is None:
            try:
                self.closed = not self._frames.receive()
            except BlockingIOError:
                return None
            except OSError:
                self.closed = True
            if self.closed:
                return None
        return frame

    def wait(self, milliseconds: int) -> bool:
        """Until there is something to receive, at most so long."""
        if self.closed:  # poll would not wait
            time.sleep(milliseconds / 1000)
            return False
        deadline = time.monotonic() + milliseconds / 1000
        while True:
            self._poll.modify(self._socket, select.POLLIN | select.POLLOUT if self._kept else select.POLLIN)
            events = self._poll.poll(milliseconds)
            if not events or events[0][1] != select.POLLOUT:
                return bool(events)
            self.flush()
            milliseconds = max(0, int(1000 * (deadline - time.monotonic())))

    def drain(self, seconds: float) -> None:
        """Until nothing is kept, at most so long."""
        deadline = time.monotonic() + seconds
        room = select.poll()
        room.register(self._socket, select.POLLOUT)
        while self._kept and (left := deadline - time.monotonic()) > 0:
            room.poll(1000 * left)
            self.flush()

    def close(self) -> None:
        self._socket.close()

    def _push(self) -> None:
        try:
            while self._kept:
                del self._kept[: self._socket.send(self._kept)]
        except BlockingIOError:
            pass
        except OSError:  # nobody is there
            self._kept.clear()
