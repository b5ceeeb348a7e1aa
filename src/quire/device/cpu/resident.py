"""What the process holds of the machine's memory on a CPU, and what of it goes back when it has served its turn. The C library,
MKL and the loader of programs would keep it."""

import ctypes
import gc
import mmap
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch

LARGE_STEP, SMALLER = 96, 8  # tokens of a step worth noticing, and how many times smaller the next is
TORCH = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
MAPPING = re.compile(r"(?P<start>[0-9a-f]+)-(?P<end>[0-9a-f]+) (?P<access>\S{4}) \S+ \S+ (?P<inode>\d+)")


def give_back_memory() -> None:
    """After loading: what was freed, which is as much as the weights, and the code that only a start runs."""
    gc.collect()
    _trim()
    let_go_of_code()


def _trim() -> None:
    """Freed memory, and what MKL keeps for its next product."""
    with suppress(OSError, AttributeError):  # no MKL, or none that says so
        ctypes.CDLL(str(TORCH)).mkl_serv_free_buffers()
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def let_go_of_code() -> None:
    """The pages of the libraries' code leave the process. The system still has them, and maps those that are run again: about
    half of what importing and loading has touched is not."""
    if sys.platform == "linux":
        madvise = ctypes.CDLL(None).madvise
        with suppress(OSError):
            for start, end in find_code(Path("/proc/self/smaps").read_text()):
                madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_DONTNEED)


def find_code(smaps: str) -> Iterator[tuple[int, int]]:
    """Where files are mapped to be run, and as they are: pages that somebody has changed would be lost."""
    span = None
    for line in smaps.splitlines():
        mapping = MAPPING.match(line)
        if mapping is not None:
            runs = mapping["access"] == "r-xp" and mapping["inode"] != "0"
            span = (int(mapping["start"], 16), int(mapping["end"], 16)) if runs else None
        elif span is not None and line.split() == ["Anonymous:", "0", "kB"]:
            yield span


class AllocatorTrim:
    """What large steps took goes back to the system when small ones follow: with the second, for the results of a large one are
    there until the first is done."""

    def __init__(self) -> None:
        self._high = self._latest = 0  # tokens of the largest step since the last time, and of the latest

    def note(self, tokens: int) -> None:
        if self._high >= max(LARGE_STEP, SMALLER * max(tokens, self._latest)):
            _trim()
            self._high = 0
        self._high, self._latest = max(self._high, tokens), tokens
