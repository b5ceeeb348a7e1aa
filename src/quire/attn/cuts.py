"""How the rows of a batch are cut into pieces of work, as numbers on the host.

Rows of several tokens are cut into tiles of queries; the keys of long ones may be copied to one place before. Rows of one token
are cut into splits of keys. A split's result is a part; parts lie row after row, and are merged. Where rows begin with the same
pages, one shared split makes the parts of many rows:

    rows        0: 600 keys     1: 700 keys, 512 of them on the pages of row 0     2: 20 keys
    shared      split 0 and split 1, each with the members 0 and 1
    splits      row 0 split 2 -> part 2       row 1 split 2 -> part 5       row 2 split 0 -> the result itself
    merges      row 0: parts 0 to 2           row 1: parts 3 to 5

It does not know devices or kernels.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from quire.attn.alike import FEWEST, Alike, Ints

SPLIT = 256  # keys of one split; the same for every batch, so that a row's result is its own


@dataclass(frozen=True)
class Cuts:
    """Rows of one token."""

    rows: int
    splits: Ints  # [splits, 4]: row, split, place among the parts or -1, key length
    merges: Ints  # [merges, 3]: row, first part, parts
    shared: Ints  # [shared, 3]: split, first member, members
    members: Ints  # [members, 2]: row, its first part
    parts: int


def cut_tiles(row: Ints, count: Ints, length: Ints, tokens: int, place: Ints) -> Ints:
    """[tiles, 3] row, first token, place: those that see most come first, so that none of them is left over at the end."""
    each = -(-count // tokens)
    first = _ragged_arange(each) * tokens
    seen = np.repeat(length - count, each) + first
    return np.stack((np.repeat(row, each), first, np.repeat(place, each)), axis=1)[np.argsort(-seen, kind="stable")]


def cut_copies(row: Ints, length: Ints, block: int) -> tuple[Ints, Ints, int]:
    """The keys of some rows one after the other, in blocks: [copies, 3] row, first key, place; [rows] its place; size."""
    each = -(-length // block)
    place = (np.cumsum(each, dtype=np.int32) - each) * block
    first = _ragged_arange(each) * block
    return np.stack((np.repeat(row, each), first, np.repeat(place, each) + first), axis=1), place, int(each.sum()) * block


def cut_rows(row: Ints, length: Ints, window: int | None, alike: Alike, most_members: int) -> Cuts:
    """Rows (rising) of one token. `alike` counts in splits; rows with a window read on their own."""
    lowest = np.zeros_like(length) if window is None else np.maximum(length - window, 0) // SPLIT
    each = (length - 1) // SPLIT - lowest + 1
    parts = np.where(each > 1, each, 0)
    first = np.cumsum(parts, dtype=np.int32) - parts
    shared, members = np.empty((0, 3), np.int32), np.empty((0, 2), np.int32)
    done = np.zeros_like(each)
    if len(alike.order) and window is None:
        shared, depth = _cut_shared(alike, most_members)
        if len(shared):
            place = np.searchsorted(row, alike.order)
            done[place] = depth
            members = np.stack((alike.order, first[place]), axis=1)
    own = each - done
    splits = np.stack((row, lowest + done, np.where(parts > 0, first + done, -1), length), axis=1).repeat(own, axis=0)
    within = _ragged_arange(own)
    splits[:, 1] += within
    splits[:, 2] += within
    merging = np.flatnonzero(parts)
    merges = np.stack((row[merging], first[merging], parts[merging]), axis=1)
    return Cuts(len(row), splits, merges, shared, members, int(parts.sum()))


@lru_cache(maxsize=8)  # rows stay together for many steps
def _cut_shared(alike: Alike, most_members: int) -> tuple[Ints, Ints]:
    """[shared, 3], and for each row of the order [N] how many of its leading splits are shared."""
    count = len(alike.order)
    linked = np.zeros(
        (int(alike.common.max()), count + 1), np.int8
    )  # [splits, :]: a row and the one before it share this split
    linked[:, 1:count] = alike.common > np.arange(len(linked))[:, None]
    edge = np.diff(linked)
    split, begin = np.nonzero(edge == 1)
    size = np.nonzero(edge == -1)[1] - begin + 1
    enough = size >= FEWEST
    split, begin, size = split[enough], begin[enough], size[enough]
    change = np.bincount(begin, minlength=count + 1) - np.bincount(begin + size, minlength=count + 1)
    pieces = -(-size // most_members)
    step = -(-size // pieces)  # members of each piece: as even as can be
    index = np.repeat(np.arange(len(split)), pieces)
    offset = _ragged_arange(pieces) * step[index]
    shared = np.stack((split[index], begin[index] + offset, np.minimum(step[index], size[index] - offset)), axis=1)
    return shared.astype(np.int32), np.cumsum(change)[:count].astype(np.int32)


def _ragged_arange(lengths: Ints) -> Ints:
    """[3, 2] -> [0, 1, 2, 0, 1]."""
    ends = np.cumsum(lengths, dtype=np.int32)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total, dtype=np.int32) - np.repeat(ends - lengths, lengths)
