"""How many lines of batches may be in flight: all that fit while the server is idle, few while it has other requests."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from starlette.types import Scope

from quire.serve.batches.calls import is_batch_line

BUSY_SHARE = 16  # of the lines in flight: one in this number remains while there are other requests
QUIET_S = 1.0  # after the last other request, until the server counts as idle
POLL_S = 0.05
IDLE_SHARE = 3 / 4  # of the slots: the others stay free for a request that comes


class OnlineRequests:
    """Counts the open requests of this API process that are not lines of a batch."""

    def __init__(self) -> None:
        self.open = 0
        self._ended_at = 0.0  # in seconds of time.monotonic()

    @contextmanager
    def counted(self, scope: Scope) -> Iterator[None]:
        """Count a request while its response is made and sent, unless it is a line of a batch."""
        if is_batch_line(scope):
            yield
            return
        self.open += 1
        try:
            yield
        finally:
            self.open -= 1
            self._ended_at = time.monotonic()

    @property
    def recent(self) -> bool:
        return self.open > 0 or time.monotonic() - self._ended_at < QUIET_S


class FixedPermits:
    """As many lines at a time as given."""

    def __init__(self, most: int) -> None:
        self._free = asyncio.Semaphore(most)

    async def acquire(self) -> None:
        await self._free.acquire()

    def release(self) -> None:
        self._free.release()


class YieldingPermits:
    """At most `most` lines in flight, and few of them while `busy` returns True. Batches get permits in turn."""

    def __init__(self, most: int, busy: Callable[[], bool]) -> None:
        self._most, self._least, self._busy = most, max(1, most // BUSY_SHARE), busy
        self._in_flight = 0
        self._turns: deque[asyncio.Future[None]] = deque()

    async def acquire(self) -> None:
        if not self._turns and self._in_flight < self._room():
            self._in_flight += 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._turns.append(turn)
        try:
            while not turn.done():
                await asyncio.wait([turn], timeout=POLL_S)  # the server may have become idle
                self._grant()
        except asyncio.CancelledError:
            if turn.done():
                self.release()
            else:
                turn.cancel()
            raise

    def release(self) -> None:
        self._in_flight -= 1
        self._grant()

    def _grant(self) -> None:
        room = self._room()
        while self._turns and self._in_flight < room:
            turn = self._turns.popleft()
            if not turn.done():
                self._in_flight += 1
                turn.set_result(None)

    def _room(self) -> int:
        return self._least if self._busy() else self._most
