"""Rows whose page tables begin alike: they can read those pages together.

    row 4   [ 7 8 9 2 | 3 1 5 6 | 20 ...        order   4  0  9  2  5
    row 0   [ 7 8 9 2 | 3 1 5 6 | 31 ...        common    2  1  0  0      pieces that neighbours have in common
    row 9   [ 7 8 9 2 | 4 ...

This file knows page numbers on the host. It does not know what is done with what it finds.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int32]

FEWEST = 4  # rows; fewer do not pay


@dataclass(frozen=True, eq=False)
class SharedPrefix:
    order: Ints  # [N] rows, those that begin alike next to each other; rows that are like no other are left out
    common: Ints  # [N - 1] leading pieces that row order[i] and row order[i + 1] have in common

    def among(self, chosen: npt.NDArray[np.bool_]) -> "SharedPrefix":
        """Of the rows that are chosen ([R] bool) alone."""
        at = np.flatnonzero(chosen[self.order])
        if len(at) < FEWEST:
            return NOTHING_SHARED
        return SharedPrefix(self.order[at], np.minimum.reduceat(self.common[: at[-1]], at[:-1]))


NOTHING_SHARED = SharedPrefix(np.empty(0, np.int32), np.empty(0, np.int32))
FindSharedPrefix = Callable[[int], SharedPrefix]  # keys of one piece -> which rows of a batch begin alike


def nothing_shared(keys: int) -> SharedPrefix:  # noqa: ARG001
    return NOTHING_SHARED


def find_alike(pages: Ints, slot: Ints, full: Ints, page_size: int, keys: int) -> SharedPrefix:
    """pages [S, P]; row r is slot[r], and its first full[r] pages may be shared. A piece is `keys` tokens."""
    pieces = full * page_size // keys  # [R]
    row = np.flatnonzero(pieces)
    if len(row) < FEWEST:
        return NOTHING_SHARED
    # Two rows that share a piece share its last page, and hardly ever without sharing the pages before: that orders them.
    last = (np.arange(1, int(pieces.max()) + 1) * keys - 1) // page_size
    row = row[_repeated(pages[slot[row], last[0]])]
    if len(row) < FEWEST:
        return NOTHING_SHARED
    last = last[: int(pieces[row].max())]
    order = row[np.lexsort(pages[slot[row][:, None], last[::-1]].T)]
    table = pages[slot[order], : int(last[-1]) + 1]
    same = table[1:] == table[:-1]
    common = np.where(same.all(1), same.shape[1], same.argmin(1))
    most = full[order]
    common = np.minimum(common, np.minimum(most[1:], most[:-1])) * page_size // keys
    return SharedPrefix(order.astype(np.int32), common.astype(np.int32))


def _repeated(values: Ints) -> npt.NDArray[np.intp]:
    """Where the values stand that occur at least FEWEST times."""
    order = np.argsort(values, kind="stable")
    ranked = values[order]
    starts = np.flatnonzero(np.concatenate(([True], ranked[1:] != ranked[:-1])))
    counts = np.diff(np.append(starts, len(ranked)))
    if counts.max() < FEWEST:
        return np.empty(0, np.intp)
    return order[np.repeat(counts >= FEWEST, counts)]
