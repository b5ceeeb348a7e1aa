"""Messages between two processes over a stream socket: bytes with their length in front. What they say is not known here."""

import select
import socket
import struct
import threading
import time

_LENGTH = struct.Struct("<I")
_PIECE = 1 << 16
MOST = (1 << 32) - 1  # bytes of a frame: what its length can say


class FrameTooLong(ConnectionError):
    """What was announced is no message of ours: nothing of it is kept."""


class Frames:
    """One end of a stream socket, read in whole frames. `most`: bytes that one may have; who may be a stranger gets few."""

    def __init__(self, connection: socket.socket, most: int = MOST) -> None:
        self.socket, self.most = connection, most
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
        """The next whole frame of what was taken in. FrameTooLong: it will have more than the most, and that is the end."""
        if len(self._buffer) < _LENGTH.size:
            return None
        size = int(_LENGTH.unpack_from(self._buffer)[0])
        if size > self.most:
            self._buffer.clear()
            raise FrameTooLong(f"it announced a message of {size:,} bytes, and {self.most:,} are the most")
        end = _LENGTH.size + size
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

    def __init__(self, connection: socket.socket, most: int = MOST) -> None:
        """`most`: bytes of a message that comes."""
        connection.setblocking(False)
        self.closed = False  # the other end is: nothing comes any more
        self.fault = ""  # why we read no more, if that is it
        self._socket, self._frames = connection, Frames(connection, most)
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

    def allow(self, most: int) -> None:
        """From now on a message may have so many bytes."""
        self._frames.most = most

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
        while not self.fault:
            try:
                if (frame := self._frames.next()) is not None:
                    return frame
                self.closed = not self._frames.receive()
            except BlockingIOError:
                return None
            except FrameTooLong as error:
                self.closed, self.fault = True, str(error)
            except OSError:
                self.closed = True
            if self.closed:
                return None
        return None

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
