"""How many lines of batches may be in flight: all that fit while the server is idle, few while it has other requests.

After the last other request the number doubles every second: lines of a short pause would delay the next request.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from starlette.types import Scope

from quire.serve.batches.calls import is_batch_line

BUSY_SHARE = 16  # of the lines in flight: one in this number remains while there are other requests
QUIET_S = 1.0  # after the last other request, until more lines begin, and until their number doubles
TRICKLE_S = 60.0  # between two lines that begin beside other requests, if no line may be in flight with them
MAX_DOUBLINGS = 30
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
    def quiet_s(self) -> float:
        """Return the seconds since the last request; 0 while one is open."""
        return 0.0 if self.open else time.monotonic() - self._ended_at


class FixedPermits:
    """As many lines at a time as given."""

    def __init__(self, most: int) -> None:
        self._free = asyncio.Semaphore(most)

    async def acquire(self) -> None:
        await self._free.acquire()

    def release(self) -> None:
        self._free.release()


def busy_lines(most: int, device: str) -> int:
    """Return the lines in flight while there are other requests. On a CPU every row of a step delays all of its rows."""
    return 0 if device == "cpu" else max(1, most // BUSY_SHARE)


class YieldingPermits:
    """At most `most` lines in flight, and `least` while there are other requests. Batches get permits in turn."""

    def __init__(self, most: int, least: int, quiet_s: Callable[[], float]) -> None:
        """
        least: 0: one line begins every TRICKLE_S seconds, so that a batch ends under any traffic
        quiet_s: returns the seconds since the last other request
        """
        self._most, self._least, self._quiet_s = most, least, quiet_s
        self._in_flight = 0
        self._begun_at = time.monotonic()  # the latest line
        self._turns: deque[asyncio.Future[None]] = deque()

    async def acquire(self) -> None:
        if not self._turns and self._in_flight < self._room():
            self._begin()
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
                self._turns.remove(turn)
            raise

    def release(self) -> None:
        self._in_flight -= 1
        self._grant()

    def _grant(self) -> None:
        room = self._room()
        while self._turns and self._in_flight < room:
            turn = self._turns.popleft()
            if not turn.done():
                self._begin()
                turn.set_result(None)

    def _begin(self) -> None:
        self._in_flight += 1
        self._begun_at = time.monotonic()

    def _room(self) -> int:
        quiet = int(self._quiet_s() / QUIET_S)
        if quiet or self._least:
            return min(self._most, max(1, self._least) << min(quiet, MAX_DOUBLINGS))
        return 1 if time.monotonic() - self._begun_at >= TRICKLE_S else 0
