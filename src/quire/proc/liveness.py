"""Whether a process lives: heartbeats that it sends, silence that its parent measures, and how often it may be restarted."""

import os
import threading
import time
from collections import deque
from collections.abc import Callable

HEARTBEAT_S = 0.25
MAX_BACKOFF_S = 5.0


class Heartbeat(threading.Thread):
    """Report every HEARTBEAT_S seconds for how long the process's loop has been in its present turn, until `end`.

    The process exits when its parent is gone. The loop writes `busy_since`: when its turn began, 0 while it waits.
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
    """Seconds since a process was heard. Time in which its parent did not look is not counted against the process."""

    def __init__(self, tick_s: float) -> None:
        """`tick_s`: how often the parent looks."""
        self._tick = tick_s
        self.begin()

    def begin(self) -> None:
        self.seconds, self._looked = 0.0, time.monotonic()

    def heard(self) -> None:
        self.seconds = 0.0

    def look(self) -> bool:
        """Count the time since the last look. False: that was a moment ago."""
        now = time.monotonic()
        if now - self._looked < self._tick / 2:
            return False
        self.seconds += min(now - self._looked, 2 * self._tick)
        self._looked = now
        return True


class RestartLimit:
    """At most `max_restarts` in `window_s` seconds. Starts that fail in a row wait longer and longer."""

    def __init__(self, max_restarts: int, window_s: float) -> None:
        self.max_restarts, self.window_s = max_restarts, window_s
        self.failed_starts = 0  # in a row
        self._restarted: deque[float] = deque()  # when, within the window

    def allow(self) -> bool:
        """Count one more restart, if it is allowed."""
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
