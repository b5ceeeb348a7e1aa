"""A progress display: the current work, how much of it is done, and the elapsed time.

Code that takes long wraps its work in `doing`; commands and `LLM` open a display with `shown`. On a terminal the display is one
moving line on standard error, erased at the end; otherwise it writes a line every few seconds. Without a display nothing is
written.
"""

import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

LEVEL_VARIABLES = ("QUIRE_LOGGING_LEVEL", "VLLM_LOGGING_LEVEL")
QUIET = ("WARNING", "ERROR", "CRITICAL")  # levels without a display
REDRAW_S, LINE_INTERVAL_S = 0.1, 5.0  # on a terminal, and otherwise
SIGNS = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
ERASE = "\r\x1b[2K"

_lock = threading.RLock()
_works: list["WorkInProgress"] = []  # open `doing` blocks, innermost last
_display: "Display | None" = None


class WorkInProgress:
    """One piece of work: `done` of `total` bytes; total 0: unknown."""

    def __init__(self, what: str, total: int) -> None:
        self._what, self._total, self._done = what, total, 0

    def add(self, nbytes: int) -> None:
        with _lock:
            self._done += nbytes

    def reach(self, nbytes: int) -> None:
        with _lock:
            self._done = min(nbytes, self._total)

    def __str__(self) -> str:
        if not self._total:
            return self._what
        unit, size = ("GB", 1e9) if self._total >= 1e10 else ("MB", 1e6)
        share = 100 * self._done // self._total
        return f"{self._what}: {self._done / size:,.0f} of {self._total / size:,.0f} {unit} ({share} %)"


@contextmanager
def doing(what: str, total: int = 0) -> Iterator[WorkInProgress]:
    """Show `what` as the current work while the block runs. total: bytes, if known."""
    work = WorkInProgress(what, total)
    with _lock:
        _works.append(work)
    try:
        yield work
    finally:
        with _lock:
            _works.remove(work)


class Display(threading.Thread):
    """Draw the current work until `end`. moves: on a terminal, one line that is drawn again and again."""

    def __init__(self, write_line: Callable[[str], None] | None) -> None:
        super().__init__(name="quire-progress", daemon=True)
        self.stream = sys.stderr
        self.moves = write_line is None and _is_terminal(self.stream)
        self.began = time.monotonic()
        self._write_line = write_line or self._print
        self._over = threading.Event()
        self._paused = 0  # number of open `paused` blocks
        self._sign = 0
        self._drawn = False  # the display's line is on the terminal
        self._incomplete = False  # a line that other code writes has not ended

    def run(self) -> None:
        while not self._over.wait(REDRAW_S if self.moves else LINE_INTERVAL_S):
            with _lock:
                if _works and not self._paused and not self._incomplete:
                    self._draw() if self.moves else self._write_line(f"{_works[-1]} ({self.seconds:.0f} s)")

    def end(self) -> None:
        self._over.set()
        self.join()
        self.erase()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def erase(self) -> None:
        if self._drawn:
            self._write(ERASE)
            self._drawn = False

    def write_above(self, text: str) -> int:
        """Write text of other code above the display's line."""
        with _lock:
            self.erase()
            self._incomplete = not text.endswith("\n") if text else self._incomplete
            return self.stream.write(text)

    def pause(self, count: int) -> None:
        with _lock:
            self._paused += count
            self.erase()

    def _draw(self) -> None:
        self._sign = (self._sign + 1) % len(SIGNS)
        line = f"{SIGNS[self._sign]} {_works[-1]}, {self.seconds:.0f} s"
        width = shutil.get_terminal_size().columns - 1
        self._write(ERASE + line[:width])
        self._drawn = True

    def _print(self, line: str) -> None:
        self._write(f"{line}\n")

    def _write(self, text: str) -> None:
        with suppress(OSError, ValueError):  # closed, or its encoding lacks SIGNS
            self.stream.write(text)
            self.stream.flush()


class _Above:
    """Standard error while a display moves: text of other code is written above the display's line."""

    def __init__(self, display: Display) -> None:
        self._display = display

    def write(self, text: str) -> int:
        return self._display.write_above(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._display.stream, name)


@contextmanager
def shown(ready: str = "", write_line: Callable[[str], None] | None = None) -> Iterator[None]:
    """Open a display, unless one is open or the log level is WARNING or higher.

    ready: written at the end on a terminal, with the elapsed time
    write_line: called with each line in place of writing to standard error
    """
    global _display
    if _display is not None or is_quiet():
        yield
        return
    _display = display = Display(write_line)
    before = sys.stderr
    if display.moves:
        sys.stderr = _Above(display)
    display.start()
    try:
        yield
    finally:
        if display.moves:
            sys.stderr = before
        display.end()
        _display = None
    if ready and display.moves:
        print(f"{ready} after {display.seconds:.1f} s", file=before)


@contextmanager
def paused() -> Iterator[None]:
    """Pause the display while other code draws on the terminal."""
    display = _display
    if display is None:
        yield
        return
    display.pause(1)
    try:
        yield
    finally:
        display.pause(-1)


def is_quiet() -> bool:
    return next((text.upper() in QUIET for name in LEVEL_VARIABLES if (text := os.environ.get(name))), False)


def _is_terminal(stream: TextIO | None) -> bool:
    return stream is not None and stream.isatty() and os.environ.get("TERM") != "dumb"
