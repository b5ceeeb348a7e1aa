"""Liveness of processes: heartbeats that they send, silence that their parent measures, and the restart limit."""

import os
import threading
import time
from collections import deque
from collections.abc import Callable

HEARTBEAT_S = 0.25
MAX_BACKOFF_S = 5.0


class Heartbeat(threading.Thread):
    """Send a heartbeat every HEARTBEAT_S seconds until `end`: for how long the process's loop has been in its current turn.

    The process exits when its parent is gone. The loop sets `busy_since`: the start of its turn, 0 while it waits.
    """

    def __init__(self, send: Callable[[float], None], parent: int) -> None:
        super().__init__(name="quire-heartbeat", daemon=True)
        self.busy_since = 0.0
        self._send, self._parent = send, parent
        self._over = threading.Event()

    def run(self) -> None:
        while not self._over.wait(HEARTBEAT_S):
            if os.getppid() != self._parent:
                os._exit(1)
            since = self.busy_since
            self._send(time.monotonic() - since if since else 0.0)

    def end(self) -> None:
        self._over.set()
        self.join()


class Silence:
    """Seconds without a message of a process, as far as its parent was able to receive one: a parent that was suspended or busy
    itself does not count that time against the process."""

    def __init__(self, tick_s: float) -> None:
        """tick_s: interval at which the parent calls `update`"""
        self._tick = tick_s
        self.begin()

    def begin(self) -> None:
        self.seconds, self._updated = 0.0, time.monotonic()

    def reset(self) -> None:
        self.seconds = 0.0

    def update(self) -> bool:
        """Count the time since the last update. Return False, and count nothing, if that is less than half a tick."""
        now = time.monotonic()
        if now - self._updated < self._tick / 2:
            return False
        self.seconds += min(now - self._updated, 2 * self._tick)
        self._updated = now
        return True


class RestartLimit:
    """At most `max_restarts` in `window_s` seconds. Each failed start in a row doubles the pause before the next."""

    def __init__(self, max_restarts: int, window_s: float) -> None:
        self.max_restarts, self.window_s = max_restarts, window_s
        self.failed_starts = 0  # in a row
        self._restarted: deque[float] = deque()  # times within the window

    def allow(self) -> bool:
        """Count a restart and return True, if the limit allows one more."""
        now = time.monotonic()
        while self._restarted and now - self._restarted[0] > self.window_s:
            self._restarted.popleft()
        if len(self._restarted) >= self.max_restarts:
            return False
        self._restarted.append(now)
        return True

    @property
    def backoff_s(self) -> float:
        """Seconds to wait before the next start."""
        return min(MAX_BACKOFF_S, 0.1 * 2 ** min(self.failed_starts, 10)) if self.failed_starts else 0.0
