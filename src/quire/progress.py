"""What a person sees while waiting: what is being done, how much of it, and for how long.

Whoever does something long says so (`doing`); whoever has a person waiting opens a display (`shown`). On a terminal that is one
moving line on standard error, erased at the end; elsewhere a line every few seconds. Without a display nothing is written.
What is done is not known here.
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
QUIET = ("WARNING", "ERROR", "CRITICAL")  # levels at which nothing moves
REDRAW, LINE_EVERY = 0.1, 5.0  # seconds: on a terminal, and elsewhere
SIGNS = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
ERASE = "\r\x1b[2K"

_lock = threading.RLock()
_works: list["WorkInProgress"] = []  # what is being done, the part after the whole
_display: "Display | None" = None


class WorkInProgress:
    """`done` of `total` bytes, if that is known."""

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
    """`total` bytes, if they can be counted."""
    work = WorkInProgress(what, total)
    with _lock:
        _works.append(work)
    try:
        yield work
    finally:
        with _lock:
            _works.remove(work)


class Display(threading.Thread):
    def __init__(self, tell: Callable[[str], None] | None) -> None:
        super().__init__(name="quire-progress", daemon=True)
        self.stream = sys.stderr
        self.moves = tell is None and _is_terminal(self.stream)
        self.began = time.monotonic()
        self._tell = tell or self._print
        self._over = threading.Event()
        self._aside = 0  # how many others write to the terminal now
        self._sign, self._drawn, self._amid = 0, False, False  # whether our line is there; whether another's is not complete

    def run(self) -> None:
        while not self._over.wait(REDRAW if self.moves else LINE_EVERY):
            with _lock:
                if _works and not self._aside and not self._amid:
                    self._draw() if self.moves else self._tell(f"{_works[-1]} ({self.seconds:.0f} s)")

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

    def let_write(self, text: str) -> int:
        """Above our line."""
        with _lock:
            self.erase()
            self._amid = not text.endswith("\n") if text else self._amid
            return self.stream.write(text)

    def put_aside(self, count: int) -> None:
        with _lock:
            self._aside += count
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
        with suppress(OSError, ValueError):  # closed, or of an encoding without our signs
            self.stream.write(text)
            self.stream.flush()


class _Above:
    """Standard error while a line moves: what others write comes above it."""

    def __init__(self, display: Display) -> None:
        self._display = display

    def write(self, text: str) -> int:
        return self._display.let_write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._display.stream, name)


@contextmanager
def shown(ready: str = "", tell: Callable[[str], None] | None = None) -> Iterator[None]:
    """Shows what is being done, unless somebody does already, or the log level asks for silence.

    `ready` is said at the end, where a line has moved. `tell` writes lines instead of standard error.
    """
    global _display
    if _display is not None or is_quiet():
        yield
        return
    _display = display = Display(tell)
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
def set_aside() -> Iterator[None]:
    """Somebody else writes to the terminal."""
    display = _display
    if display is None:
        yield
        return
    display.put_aside(1)
    try:
        yield
    finally:
        display.put_aside(-1)


def is_quiet() -> bool:
    return next((text.upper() in QUIET for name in LEVEL_VARIABLES if (text := os.environ.get(name))), False)


def _is_terminal(stream: TextIO | None) -> bool:
    return stream is not None and stream.isatty() and os.environ.get("TERM") != "dumb"
