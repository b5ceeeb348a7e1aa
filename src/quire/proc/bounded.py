"""Bounds of processor time and memory around one job of a worker process.

What goes beyond them is refused with an error; what no exception can interrupt is killed a little later.
"""

import contextlib
import ctypes
import resource
import signal
import sys
from pathlib import Path
from types import FrameType

import msgspec

from quire.types.errors import InvalidParameter

MB = 1 << 20
GRACE_S = 2  # seconds of processor time until what cannot be interrupted is killed
HARD_CPU = resource.getrlimit(resource.RLIMIT_CPU)[1]
HARD_SPACE = resource.getrlimit(resource.RLIMIT_AS)[1]


class Bounds(msgspec.Struct, frozen=True):
    seconds: float  # of processor time
    memory: int  # bytes, besides what the process has
    what: str
    parameter: str | None


class Overdue(BaseException):
    """Not an Exception: nothing that a job runs may catch it."""


class Bounded:
    """Refuse what goes beyond the bounds of a job; kill what no exception can reach a little later."""

    _memory: tuple[str, int | None] = ("", None)  # for whom the bound is set: jobs of one kind need not measure again

    def __init__(self, bounds: Bounds, seconds: float | None = None) -> None:
        """seconds: of processor time, if this job may have fewer than others of its kind"""
        few = bounds.seconds if seconds is None else min(seconds, bounds.seconds)
        self._bounds = msgspec.structs.replace(bounds, seconds=few)

    def __enter__(self) -> None:
        bounds = self._bounds
        used = resource.getrusage(resource.RUSAGE_SELF)
        most = int(used.ru_utime + used.ru_stime + bounds.seconds) + GRACE_S
        resource.setrlimit(resource.RLIMIT_CPU, (most, HARD_CPU))
        if Bounded._memory[0] != bounds.what:
            space = _space()
            Bounded._memory = bounds.what, None if space is None else space + bounds.memory
        _limit_memory(Bounded._memory[1])
        signal.signal(signal.SIGPROF, _overdue)
        signal.setitimer(signal.ITIMER_PROF, bounds.seconds, 0.25)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_CPU, (HARD_CPU, HARD_CPU))
        _limit_memory(None)
        bounds = self._bounds
        match error:
            case Overdue():
                raise InvalidParameter(too_slow(bounds.what, bounds.seconds), bounds.parameter) from None
            case MemoryError():
                reason = f"{bounds.what} needs too much memory: more than {bounds.memory // MB} MB"
                raise InvalidParameter(reason, bounds.parameter) from None
            case RecursionError():
                reason = f"{bounds.what} goes too deep: too many values inside of others"
                raise InvalidParameter(reason, bounds.parameter) from None


def too_slow(what: str, seconds: float) -> str:
    return f"{what} takes too long: more than {seconds:g} s of processor time"


def peak_bytes() -> int:
    """Return the most bytes that this process has held. What Linux says for `ru_maxrss` includes what its parent held when it
    was started."""
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("VmHWM:")).split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def held_bytes() -> int | None:
    """Return the bytes of memory that this process holds now, if the system reports it."""
    return _statm(1)


def trim_heap() -> None:
    """Return freed memory of the heap to the system, if the C library can."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _overdue(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
    raise Overdue


def _limit_memory(most: int | None) -> None:
    if most is None or (HARD_SPACE != resource.RLIM_INFINITY and most > HARD_SPACE):
        most = HARD_SPACE
    with contextlib.suppress(ValueError, OSError):  # not every system has this bound
        resource.setrlimit(resource.RLIMIT_AS, (most, HARD_SPACE))


def _space() -> int | None:
    """Return the bytes of this process's address space, if the system reports it."""
    return _statm(0)


def _statm(field: int) -> int | None:
    try:
        return int(Path("/proc/self/statm").read_text().split()[field]) * resource.getpagesize()
    except OSError:
        return None
