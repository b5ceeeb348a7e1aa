"""Weights in huge pages. A step on a CPU reads all weights from end to end, and with pages of 4 KiB it looks up an address for
every 4 KiB: few rows take 6 to 9 % less time in pages of 2 MiB.

Once weights are loaded, whatever the process holds is gathered where it lies, in the background, a huge page at a time. Only
memory that is there already is: the process does not grow. Linux can do so since 6.1. Elsewhere, and where pages have other
sizes or the system has no huge ones to give, nothing happens.
"""

import ctypes
import logging
import mmap
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import numpy as np

logger = logging.getLogger(__name__)

HUGE, PAGE = 2 << 20, 4096
COLLAPSE = 25  # of madvise
PRESENT = np.uint64(1 << 63)  # in an entry of /proc/self/pagemap
WORTHWHILE = 32 << 20
FILLED = 0.95  # of a huge page's small ones have to be there
SETTINGS = Path("/sys/kernel/mm/transparent_hugepage")


def gather_in_background(nbytes: int) -> None:
    """After so many bytes of weights were loaded."""
    if nbytes >= WORTHWHILE and sys.platform == "linux" and allowed():
        Thread(target=gather, name="quire-huge-pages", daemon=True).start()


def allowed() -> bool:
    """Does this system have such pages, and lend them?"""
    try:
        size, lent = int((SETTINGS / "hpage_pmd_size").read_text()), "[never]" not in (SETTINGS / "enabled").read_text()
    except OSError:
        return False
    return lent and (size, mmap.PAGESIZE) == (HUGE, PAGE)


def gather() -> int:
    """How many huge pages it has made of the process's own memory, or found."""
    madvise, count = ctypes.CDLL(None).madvise, 0
    try:
        for address in find_filled():
            if madvise(ctypes.c_void_p(address), ctypes.c_size_t(HUGE), COLLAPSE) != 0:
                break
            count += 1
    except OSError as reason:
        logger.debug("huge pages: %s", reason)
    logger.debug("%d MiB lie in huge pages", count * HUGE >> 20)
    return count


def find_filled() -> list[int]:
    """Addresses of the places for huge pages whose small pages are there, nearly all of them."""
    found = []
    with Path("/proc/self/pagemap").open("rb") as pagemap:
        for start, end in private_memory():
            pagemap.seek(start // PAGE * 8)
            entries = np.frombuffer(pagemap.read((end - start) // PAGE * 8), np.uint64)
            filled = ((entries & PRESENT) != 0).reshape(-1, HUGE // PAGE).mean(axis=1) >= FILLED
            found += (start + np.flatnonzero(filled) * HUGE).tolist()
    return found


def private_memory() -> Iterator[tuple[int, int]]:
    """Where the process's own writable memory has whole places for huge pages."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, access, _, _, inode, *name = line.split(maxsplit=5)
        start, end = (int(address, 16) for address in span.split("-"))
        start, end = -(-start // HUGE) * HUGE, end // HUGE * HUGE
        if access == "rw-p" and inode == "0" and name in ([], ["[heap]"]) and start < end:
            yield start, end
