"""Length-prefixed frames over a stream socket between two processes. `messages.py` gives them types."""

import asyncio
import select
import socket
import struct
import threading
import time
from collections.abc import Awaitable, Callable

_LENGTH = struct.Struct("<I")
_READ_BYTES = 1 << 16
MAX_FRAME_BYTES = (1 << 32) - 1  # what the length prefix can express


class FrameTooLong(ConnectionError):
    """The peer announced a frame above the limit. None of it is stored."""


class Frames:
    """One end of a stream socket, read in whole frames. `max_bytes`: of a received frame; small for untrusted peers."""

    def __init__(self, connection: socket.socket, max_bytes: int = MAX_FRAME_BYTES) -> None:
        self.socket, self.max_bytes = connection, max_bytes
        self._chunk = memoryview(bytearray(_READ_BYTES))
        self._buffer = bytearray()

    def send(self, data: bytes) -> None:
        self.socket.sendall(_LENGTH.pack(len(data)) + data)

    def receive(self) -> bool:
        """Read available bytes, waiting for the first as long as the socket does. False: the peer has closed."""
        count = self.socket.recv_into(self._chunk)
        self._buffer += self._chunk[:count]
        return count > 0

    async def fill(self) -> bool:
        """Receive as `receive` does, on an event loop: the socket does not block."""
        count = await asyncio.get_running_loop().sock_recv_into(self.socket, self._chunk)
        self._buffer += self._chunk[:count]
        return count > 0

    def next(self) -> bytes | None:
        """Return the next whole frame among the bytes read, None if there is none. FrameTooLong ends the connection."""
        if len(self._buffer) < _LENGTH.size:
            return None
        size = int(_LENGTH.unpack_from(self._buffer)[0])
        if size > self.max_bytes:
            self._buffer.clear()
            raise FrameTooLong(f"it announced a message of {size:,} bytes, and {self.max_bytes:,} are the most")
        end = _LENGTH.size + size
        if len(self._buffer) < end:
            return None
        frame = bytes(self._buffer[_LENGTH.size : end])
        del self._buffer[:end]
        return frame

    def wait(self) -> bytes | None:
        """Return the next frame, None if the peer has closed."""
        while (frame := self.next()) is None:
            if not self.receive():
                return None
        return frame


class Channel:
    """One end of a stream socket whose owner never blocks to send. Any thread may send, one receives.

    Bytes that the peer has no room for are buffered without limit, and leave with the next message, with `flush` or during
    `wait`. Messages to a closed peer are dropped.
    """

    def __init__(self, connection: socket.socket, max_bytes: int = MAX_FRAME_BYTES) -> None:
        """`max_bytes`: of a received message."""
        connection.setblocking(False)
        self.closed = False  # by the peer: no message will arrive
        self.fault = ""  # why this end stopped reading, if it did
        self._socket, self._frames = connection, Frames(connection, max_bytes)
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self._unsent = bytearray()
        self._lock = threading.Lock()  # of the unsent bytes

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def full(self) -> bool:
        """Whether bytes are unsent: call `flush` when the socket is writable."""
        return bool(self._unsent)

    def allow(self, max_bytes: int) -> None:
        """Set the limit of a received message."""
        self._frames.max_bytes = max_bytes

    def send(self, data: bytes) -> None:
        with self._lock:
            self._unsent += _LENGTH.pack(len(data))
            self._unsent += data
            self._push()

    def flush(self) -> None:
        with self._lock:
            self._push()

    def receive(self) -> bytes | None:
        """Return the next message, None if there is none now."""
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
        """Wait until there is something to receive, at most this long."""
        if self.closed:  # poll would return at once
            time.sleep(milliseconds / 1000)
            return False
        deadline = time.monotonic() + milliseconds / 1000
        while True:
            self._poll.modify(self._socket, select.POLLIN | select.POLLOUT if self._unsent else select.POLLIN)
            events = self._poll.poll(milliseconds)
            if not events or events[0][1] != select.POLLOUT:
                return bool(events)
            self.flush()
            milliseconds = max(0, int(1000 * (deadline - time.monotonic())))

    def drain(self, seconds: float) -> None:
        """Wait until nothing is unsent, at most this long."""
        deadline = time.monotonic() + seconds
        writable = select.poll()
        writable.register(self._socket, select.POLLOUT)
        while self._unsent and (left := deadline - time.monotonic()) > 0:
            writable.poll(1000 * left)
            self.flush()

    def close(self) -> None:
        self._socket.close()

    def _push(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError:  # the peer is gone
            self._unsent.clear()


class AsyncChannel:
    """One end of a channel on an event loop. Sending never blocks."""

    def __init__(self, connection: socket.socket, max_bytes: int = MAX_FRAME_BYTES) -> None:
        self._channel = Channel(connection, max_bytes)
        self._closed = False

    def send(self, frame: bytes) -> None:
        """Frames to a closed peer are dropped."""
        if not self._closed:
            self._channel.send(frame)
            if self._channel.full:
                self._flush()

    async def listen(self, on_frame: Callable[[bytes], Awaitable[None]]) -> None:
        """Pass each frame on until the peer is gone."""
        loop, wake = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._channel.fileno(), wake.set)
        self._flush()
        try:
            while True:
                wake.clear()
                while not self._closed and (frame := self._channel.receive()) is not None:
                    await on_frame(frame)
                if self._closed or self._channel.closed:
                    return
                await wake.wait()
        finally:
            self._forget()

    def receive(self) -> bytes:
        """Block for the next frame, before there is an event loop. EOFError: the peer has closed."""
        while (frame := self._channel.receive()) is None:
            if self._channel.closed:
                raise EOFError
            self._channel.wait(1000)
        return frame

    def close(self) -> None:
        if not self._closed:
            self._forget()
            self._closed = True
            self._channel.drain(0.0)
            self._channel.close()

    def _forget(self) -> None:
        if not self._closed:
            try:
                loop = asyncio.get_running_loop()
            except RuntimeError:
                return
            loop.remove_reader(self._channel.fileno())
            loop.remove_writer(self._channel.fileno())

    def _flush(self) -> None:
        loop = asyncio.get_running_loop()
        self._channel.flush()
        if self._channel.full:
            loop.add_writer(self._channel.fileno(), self._flush)
        else:
            loop.remove_writer(self._channel.fileno())
