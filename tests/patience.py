"""How long a test waits for what must come. Machines may be busy: a limit is there so that a test ends, not to measure."""

import time
from collections.abc import Callable

PATIENCE = 240.0  # seconds: many times what the longest wait takes on a machine with four times as much to do as cores


def wait_for(condition: Callable[[], object], seconds: float = PATIENCE) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.005)
