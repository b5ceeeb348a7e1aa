"""Where the seconds of a start went: consecutive laps without gaps, which add up to the wall clock.

A stopwatch is read as a timeline, which can be logged, measured and sent to another process: all processes of a machine have
the same clock. The content of a lap is not known here.
"""

import os
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

UNNAMED = 0.02  # share of the total from which unnamed time is shown
OTHER = "other"
STAT = Path("/proc/self/stat")
_imported = time.monotonic()
_first = True  # no engine has been started in this process


class Timeline(msgspec.Struct, frozen=True, array_like=True):
    """`parts` are seconds by name, in order; they add up to `total`, except for less than UNNAMED of it."""

    parts: list[tuple[str, float]]
    total: float
    began: float  # time.monotonic()

    @classmethod
    def of(cls, parts: Sequence[tuple[str, float]], began: float, ended: float) -> "Timeline":
        """Merge parts of equal names; unnamed time becomes a part if it is long enough."""
        merged: dict[str, float] = {}
        for name, seconds in parts:
            merged[name] = merged.get(name, 0.0) + seconds
        total = ended - began
        rest = total - sum(merged.values())
        if rest > UNNAMED * total:
            merged[OTHER] = merged.get(OTHER, 0.0) + rest
        return cls(list(merged.items()), total, began)

    def within(self, began: float, before: str, after: str, ended: float) -> "Timeline":
        """Return the timeline of a longer period, with names for the time before and after this one."""
        end = self.began + self.total
        return Timeline.of([(before, max(0.0, self.began - began)), *self.parts, (after, max(0.0, ended - end))], began, ended)

    def __str__(self) -> str:
        """Return the parts of at least 5 ms."""
        parts = [f"{name} {seconds:.2f}" for name, seconds in self.parts if seconds >= 0.005]
        return f"{self.total:.2f} s = {' + '.join(parts)}"


class Stopwatch:
    """Laps without gaps. `since`: when the first lap began, by time.monotonic(); now by default."""

    def __init__(self, since: float | None = None) -> None:
        self._began = self._last = time.monotonic() if since is None else since
        self._laps: list[tuple[str, float]] = []

    @classmethod
    def of_engine(cls, before: str) -> "Stopwatch":
        """Return the stopwatch of an engine that starts now. The first lap of a process's first engine is the life of the
        process so far.
        """
        global _first
        if not _first:
            return cls()
        _first = False
        watch = cls(process_start())
        watch.lap(before)
        return watch

    def lap(self, name: str) -> None:
        """Name the time since the previous lap."""
        now = time.monotonic()
        self._laps.append((name, now - self._last))
        self._last = now

    def read(self) -> Timeline:
        return Timeline.of(self._laps, self._began, time.monotonic())


def _on_fork() -> None:
    """Note that this process was forked from one that had imported everything."""
    global _imported
    _imported = time.monotonic()


os.register_at_fork(after_in_child=_on_fork)


def process_start() -> float:
    """Return when this process began, by time.monotonic(); if unknown, when this file was imported."""
    try:
        ticks = int(STAT.read_text().rpartition(")")[2].split()[19])  # field 22, counted after the name in parentheses
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return _imported
    return min(_imported, time.monotonic() - age)
