"""Cut the rows of a batch into work items on the host, and find rows that share a prefix of their page tables."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int32]

MIN_SHARING_ROWS = 4  # fewer do not pay off


@dataclass(frozen=True, eq=False)
class SharedPrefix:
    order: Ints  # [N] rows, grouped by prefix; rows that share no prefix are left out
    common: Ints  # [N - 1] leading splits that row order[i] and row order[i + 1] have in common

    def among(self, chosen: npt.NDArray[np.bool_]) -> "SharedPrefix":
        """Return the same for the chosen rows ([R] bool) only."""
        at = np.flatnonzero(chosen[self.order])
        if len(at) < MIN_SHARING_ROWS:
            return NOTHING_SHARED
        return SharedPrefix(self.order[at], np.minimum.reduceat(self.common[: at[-1]], at[:-1]))


NOTHING_SHARED = SharedPrefix(np.empty(0, np.int32), np.empty(0, np.int32))
FindSharedPrefix = Callable[[int], SharedPrefix]  # keys per split -> rows of a batch with a common prefix


def nothing_shared(keys: int) -> SharedPrefix:  # noqa: ARG001
    return NOTHING_SHARED


def find_alike(pages: Ints, slot: Ints, full: Ints, page_size: int, keys: int) -> SharedPrefix:
    """Return the rows that share a prefix. pages [S, P]; row r is slot[r], its first full[r] pages may be shared; keys: per
    split."""
    splits = full * page_size // keys  # [R]
    row = np.flatnonzero(splits)
    if len(row) < MIN_SHARING_ROWS:
        return NOTHING_SHARED
    # Two rows with the same last page of a split almost always share all pages before it: sorting by last pages is enough.
    last = (np.arange(1, int(splits.max()) + 1) * keys - 1) // page_size
    row = row[_repeated(pages[slot[row], last[0]])]
    if len(row) < MIN_SHARING_ROWS:
        return NOTHING_SHARED
    last = last[: int(splits[row].max())]
    order = row[np.lexsort(pages[slot[row][:, None], last[::-1]].T)]
    table = pages[slot[order], : int(last[-1]) + 1]
    same = table[1:] == table[:-1]
    common = np.where(same.all(1), same.shape[1], same.argmin(1))
    most = full[order]
    common = np.minimum(common, np.minimum(most[1:], most[:-1])) * page_size // keys
    return SharedPrefix(order.astype(np.int32), common.astype(np.int32))


def _repeated(values: Ints) -> npt.NDArray[np.intp]:
    """Return the indices of values that occur at least MIN_SHARING_ROWS times."""
    order = np.argsort(values, kind="stable")
    ranked = values[order]
    starts = np.flatnonzero(np.concatenate(([True], ranked[1:] != ranked[:-1])))
    counts = np.diff(np.append(starts, len(ranked)))
    if counts.max() < MIN_SHARING_ROWS:
        return np.empty(0, np.intp)
    return order[np.repeat(counts >= MIN_SHARING_ROWS, counts)]


Longs = npt.NDArray[np.int64]

SPLIT = 256  # keys per split; the same for every batch, so that a row's result does not depend on the batch


@dataclass(eq=False)
class Cuts:
    """The work of one-token rows. Shared, so it must not be modified."""

    rows: int
    splits: Ints  # [splits, 4]: row, split, index among the parts or -1, key length
    merges: Ints  # [merges, 3]: row, first part, parts
    shared: Ints  # [shared, 3]: split, first member, members
    members: Ints  # [members, 2]: row, its first part
    parts: int
    layout: "SplitLayout | None" = None  # the same without key lengths, if other steps share it


@dataclass(frozen=True, eq=False)
class SplitLayout:
    """What does not change until a row grows into its next split."""

    made: Cuts  # without key lengths
    owner: Longs  # [splits] index of each split's row
    size: int  # keys per split
    window: int | None
    last: bytes  # [rows] int32 last split of each row
    lowest: bytes  # the same of first splits, with a window

    def lengths(self, length: Ints) -> Ints | None:
        """Return the key lengths [splits] for rows with these keys [rows]; None: the layout differs."""
        if _last_splits(length, self.size) != self.last or _first_splits(length, self.window, self.size) != self.lowest:
            return None
        return length[self.owner]


NO_CUTS = Cuts(
    0, np.empty((0, 4), np.int32), np.empty((0, 3), np.int32), np.empty((0, 3), np.int32), np.empty((0, 2), np.int32), 0
)


def cut_tiles(row: Ints, count: Ints, length: Ints, tokens: int, place: Ints) -> Ints:
    """Return tiles [tiles, 3]: row, first token, place. Tiles with the most keys come first, to balance the launch."""
    each = -(-count // tokens)
    tiles = np.empty((int(each.sum()), 3), np.int32)
    if len(row) == 1:
        tiles[:, 0], tiles[:, 2] = row, place
        tiles[:, 1] = np.arange(len(tiles) - 1, -1, -1) * tokens
        return tiles
    tiles[:, 0], tiles[:, 2] = row.repeat(each), place.repeat(each)
    tiles[:, 1] = _ragged_arange(each) * tokens
    return tiles[np.argsort((count - length).repeat(each) - tiles[:, 1], kind="stable")]


def first_key(count: Ints, length: Ints, window: int | None) -> Ints:
    """Return the first key [rows] that rows with these tokens and keys see."""
    return np.zeros_like(length) if window is None else np.maximum(length - count - window + 1, 0)


def cut_copies(row: Ints, first: Ints, length: Ints, block: int) -> tuple[Ints, Ints, int]:
    """Lay the keys of some rows out one after the other, in blocks that begin at multiples of `block` keys.

    Return copies [copies, 3]: row, first key, index; [rows] index of each row's key 0; total size.
    """
    first = first // block * block
    each = -(-(length - first) // block)
    place = (np.cumsum(each, dtype=np.int32) - each) * block
    inside = _ragged_arange(each) * block
    copies = np.stack((np.repeat(row, each), np.repeat(first, each) + inside, np.repeat(place, each) + inside), axis=1)
    return copies, place - first, int(each.sum()) * block


def cut_rows(
    row: Ints, length: Ints, window: int | None, alike: SharedPrefix, most_members: int, split: int | None = None
) -> Cuts:
    """Return the work of one-token rows (ascending). `alike` counts in splits; rows with a window share nothing. split: keys
    per split; None: SPLIT.
    """
    if not len(row):
        return NO_CUTS
    size = split or SPLIT
    last, lowest = _last_splits(length, size), _first_splits(length, window, size)
    layout = _cut_splits(row.tobytes(), size, window, last, lowest, alike if window is None else NOTHING_SHARED, most_members)
    made, splits = layout.made, layout.made.splits.copy()
    splits[:, 3] = length[layout.owner]
    return Cuts(made.rows, splits, made.merges, made.shared, made.members, made.parts, layout)


def _last_splits(length: Ints, size: int) -> bytes:
    return ((length - 1) // size).tobytes()


def _first_splits(length: Ints, window: int | None, size: int) -> bytes:
    return b"" if window is None else (np.maximum(length - window, 0) // size).tobytes()


@lru_cache(maxsize=16)  # rows have the same splits for many steps: only the last ones grow
def _cut_splits(
    rows: bytes, size: int, window: int | None, last: bytes, lowest: bytes, alike: SharedPrefix, most_members: int
) -> SplitLayout:
    """Return the layout of rows with known last splits and, with a window, first splits."""
    row, each = np.frombuffer(rows, np.int32), 1 + np.frombuffer(last, np.int32)
    splits = np.zeros((len(row), 4), np.int32)  # first the first own split of each row
    splits[:, 0] = row
    if lowest:
        splits[:, 1] = np.frombuffer(lowest, np.int32)
        each -= splits[:, 1]
    several = each > 1
    parts = each * several
    first = parts.cumsum(dtype=np.int32) - parts
    splits[:, 2] = np.where(several, first, -1)
    merges = np.stack((row, first, parts), axis=1)[several]
    shared, members = NO_CUTS.shared, NO_CUTS.members
    if len(alike.order) and several.any():
        shared, depth = _cut_shared(alike, most_members)
        if len(shared):
            place = np.searchsorted(row, alike.order)
            members = np.stack((alike.order, first[place]), axis=1)
            splits[place, 1:3] += depth[:, None]
            each[place] -= depth
    splits = splits.repeat(each, axis=0)
    splits[:, 1:3] += _ragged_arange(each)[:, None]
    owner = np.arange(len(row)).repeat(each)
    made = Cuts(len(row), splits, merges, shared, members, int(parts.sum()))
    return SplitLayout(made, owner, size, window, last, lowest)


@lru_cache(maxsize=8)  # rows share a prefix for many steps
def _cut_shared(alike: SharedPrefix, most_members: int) -> tuple[Ints, Ints]:
    """Return shared [shared, 3], and how many leading splits of each row of the order [N] are shared."""
    count = len(alike.order)
    linked = np.zeros(
        (int(alike.common.max()), count + 1), np.int8
    )  # [splits, :]: a row and the one before it share this split
    linked[:, 1:count] = alike.common > np.arange(len(linked))[:, None]
    edge = np.diff(linked)
    split, begin = np.nonzero(edge == 1)
    size = np.nonzero(edge == -1)[1] - begin + 1
    enough = size >= MIN_SHARING_ROWS
    split, begin, size = split[enough], begin[enough], size[enough]
    change = np.bincount(begin, minlength=count + 1) - np.bincount(begin + size, minlength=count + 1)
    chunks = -(-size // most_members)
    step = -(-size // chunks)  # members per chunk, as even as possible
    index = np.repeat(np.arange(len(split)), chunks)
    offset = _ragged_arange(chunks) * step[index]
    shared = np.stack((split[index], begin[index] + offset, np.minimum(step[index], size[index] - offset)), axis=1)
    return shared.astype(np.int32), np.cumsum(change)[:count].astype(np.int32)


def _ragged_arange(lengths: Ints) -> Ints:
    """Return 0, 1, ... for each of the lengths: [3, 2] -> [0, 1, 2, 0, 1]."""
    ends = lengths.cumsum(dtype=np.int32)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total, dtype=np.int32) - (ends - lengths).repeat(lengths)
