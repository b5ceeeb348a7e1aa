"""Around a loop of steps: Ctrl-C comes between two of them, and garbage collection has little to search."""

import gc
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_put_aside = False  # the program has frozen objects


@contextmanager
def interrupts_between_steps() -> Iterator[Callable[[], None]]:
    """Yield a check to call between steps. It raises KeyboardInterrupt if Ctrl-C came, so that the engine stays clean. Ctrl-C
    after the last check raises it at the end. A second Ctrl-C does not wait.

    Outside the main thread signals do not arrive, and where the program handles SIGINT itself, it keeps doing so.
    """
    previous = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or previous is not signal.default_int_handler:
        yield lambda: None
        return
    asked = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            signal.default_int_handler(number, frame)
        asked = True

    def check() -> None:
        if asked:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, note)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, previous)
    check()


@contextmanager
def little_garbage_collection() -> Iterator[None]:
    """Exclude existing objects from garbage collection, which would stop steps for a tenth of a second.

    If the program has frozen objects itself, nothing changes. This is checked only until it is true, as the check counts the
    objects one by one.
    """
    global _put_aside
    _put_aside = _put_aside or gc.get_freeze_count() > 0
    if _put_aside:
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
