"""Cut the rows of a batch into work items on the host, and find rows that share a prefix of their page tables."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

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


Longs = npt.NDArray[np.int64]

SPLIT = 256  # keys of one split; the same for every batch, so that a row's result is its own


@dataclass(eq=False)
class Cuts:
    """Rows of one token. Nobody changes them."""

    rows: int
    splits: Ints  # [splits, 4]: row, split, place among the parts or -1, key length
    merges: Ints  # [merges, 3]: row, first part, parts
    shared: Ints  # [shared, 3]: split, first member, members
    members: Ints  # [members, 2]: row, its first part
    parts: int
    form: "Form | None" = None  # the same without key lengths, if other steps have it, too


@dataclass(frozen=True, eq=False)
class Form:
    """What is the same as long as no row grows into its next split."""

    made: Cuts  # with no key lengths
    owner: Longs  # [splits] the place of each one's row
    size: int  # keys of a split
    window: int | None
    last: bytes  # [rows] int32, of each its last split
    lowest: bytes  # and with a window its first

    def lengths(self, length: Ints) -> Ints | None:
        """[splits] key lengths, where rows have so many keys [rows]; None = these are cut otherwise."""
        if _last_splits(length, self.size) != self.last or _first_splits(length, self.window, self.size) != self.lowest:
            return None
        return length[self.owner]


NO_CUTS = Cuts(
    0, np.empty((0, 4), np.int32), np.empty((0, 3), np.int32), np.empty((0, 3), np.int32), np.empty((0, 2), np.int32), 0
)


def cut_tiles(row: Ints, count: Ints, length: Ints, tokens: int, place: Ints) -> Ints:
    """[tiles, 3] row, first token, place: those that see most come first, so that none of them is left over at the end."""
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
    """[rows] that rows of so many tokens see with a window."""
    return np.zeros_like(length) if window is None else np.maximum(length - count - window + 1, 0)


def cut_copies(row: Ints, first: Ints, length: Ints, block: int) -> tuple[Ints, Ints, int]:
    """The keys of some rows one after the other, in blocks: [copies, 3] row, first key, place; [rows] the place of its key 0,
    were it there; size. A tile's blocks begin at any key of a row whose first is not 0: they may end in one block more."""
    each = -(-(length - first) // block) + (first > 0)
    place = (np.cumsum(each, dtype=np.int32) - each) * block
    inside = _ragged_arange(each) * block
    copies = np.stack((np.repeat(row, each), np.repeat(first, each) + inside, np.repeat(place, each) + inside), axis=1)
    return copies, place - first, int(each.sum()) * block


def cut_rows(
    row: Ints, length: Ints, window: int | None, alike: SharedPrefix, most_members: int, split: int | None = None
) -> Cuts:
    """Rows (rising) of one token. `alike` counts in splits; rows with a window read on their own. `split`: keys of one, if not
    SPLIT."""
    if not len(row):
        return NO_CUTS
    size = split or SPLIT
    last, lowest = _last_splits(length, size), _first_splits(length, window, size)
    form = _cut_splits(row.tobytes(), size, window, last, lowest, alike if window is None else NOTHING_SHARED, most_members)
    made, splits = form.made, form.made.splits.copy()
    splits[:, 3] = length[form.owner]
    return Cuts(made.rows, splits, made.merges, made.shared, made.members, made.parts, form)


def _last_splits(length: Ints, size: int) -> bytes:
    return ((length - 1) // size).tobytes()


def _first_splits(length: Ints, window: int | None, size: int) -> bytes:
    return b"" if window is None else (np.maximum(length - window, 0) // size).tobytes()


@lru_cache(maxsize=16)  # rows have the same splits for many steps: only their last ones grow
def _cut_splits(
    rows: bytes, size: int, window: int | None, last: bytes, lowest: bytes, alike: SharedPrefix, most_members: int
) -> Form:
    """Of rows whose last splits are known, and, with a window, their first ones."""
    row, each = np.frombuffer(rows, np.int32), 1 + np.frombuffer(last, np.int32)
    splits = np.zeros((len(row), 4), np.int32)  # of each row the first that is its own
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
    return Form(made, owner, size, window, last, lowest)


@lru_cache(maxsize=8)  # rows stay together for many steps
def _cut_shared(alike: SharedPrefix, most_members: int) -> tuple[Ints, Ints]:
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
    ends = lengths.cumsum(dtype=np.int32)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total, dtype=np.int32) - (ends - lengths).repeat(lengths)
