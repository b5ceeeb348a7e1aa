"""How long a test waits for what must come. Machines may be busy: a limit is there so that a test ends, not to measure."""

import os
import time

PATIENCE = 240.0  # seconds: many times what the longest wait takes on a machine with four times as much to do as cores


def crowd() -> float:
    """How many times as long as alone something takes here now: others may want the same cores."""
    wall, own = time.monotonic(), time.thread_time()
    while time.thread_time() - own < 0.05:
        pass
    return max(1.0, (time.monotonic() - wall) / 0.05, os.getloadavg()[0] / (os.cpu_count() or 1))
