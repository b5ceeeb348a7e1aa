"""The sizes graphs are recorded for: how many rows, and room for how many pieces of attention work.

Few, so that traffic that wanders over rows and lengths has soon met them all; and near enough to each other that what is left
over costs little. Pure arithmetic: nothing here knows the device.
"""

from collections.abc import Collection
from dataclasses import dataclass

from quire.attn.backend import Room

MOST_ROWS = 512
ROW_BUCKETS = (1, 2, 4, 8, 16, 32, 64, *range(96, 257, 32), *range(320, MOST_ROWS + 1, 64))
LEAST_SPLITS = 64
COARSE_SPLITS = 1024  # beyond, by so many more: splits that are left over are no longer free
SHARED_BUCKETS = (0, 64, 256, 1024, 4096)  # pieces that several rows share
MOST_ROOM = Room(8192, SHARED_BUCKETS[-1])
USUAL_PIECES = (4, 2, 8)  # of a row: the lengths that idle time is spent on, most usual first
BORROWED = 2  # times as large another bucket may be, in rows and in splits; shared pieces: the next size up


@dataclass(frozen=True)
class Bucket:
    rows: int
    room: Room


def row_bucket(rows: int, max_rows: int) -> int | None:
    """The least number of rows a graph is made for that takes these; None = there are too many."""
    return min((min(size, max_rows) for size in ROW_BUCKETS if size >= rows), default=None)


def room_bucket(need: Room, rows: int) -> Room | None:
    """The least room that takes so much beyond one split for each of `rows`; None = there is none so large."""
    splits = need.splits + rows
    if splits > MOST_ROOM.splits or need.shared > MOST_ROOM.shared:
        return None
    size = 1 << (splits - 1).bit_length() if splits <= COARSE_SPLITS else -(-splits // COARSE_SPLITS) * COARSE_SPLITS
    return Room(max(LEAST_SPLITS, size), min(size for size in SHARED_BUCKETS if size >= need.shared))


def substitute(own: Bucket, need: Room, recorded: Collection[Bucket]) -> Bucket | None:
    """The least recorded bucket that can do the work of `own`. `need` is beyond one split for each of the step's rows: every
    row of a bucket, used or not, takes one."""
    next_shared = min((size for size in SHARED_BUCKETS if size > own.room.shared), default=own.room.shared)
    near = (
        bucket
        for bucket in recorded
        if bucket.rows <= BORROWED * own.rows
        and bucket.room.splits <= BORROWED * own.room.splits
        and bucket.room.shared <= next_shared
    )
    able = (
        bucket
        for bucket in near
        if own.rows <= bucket.rows and need.splits + bucket.rows <= bucket.room.splits and need.shared <= bucket.room.shared
    )
    return min(able, key=lambda bucket: (bucket.rows, bucket.room.splits, bucket.room.shared), default=None)


def worth_having(max_rows: int) -> list[Bucket]:
    """Buckets to record before anybody wants them: powers of two first (others can borrow them), small ones first."""
    sizes = sorted({min(size, max_rows) for size in ROW_BUCKETS}, key=lambda size: (size & (size - 1) != 0, size))
    likely = (Bucket(size, room) for pieces in USUAL_PIECES for size in sizes if (room := usual_room(size, pieces)))
    return list(dict.fromkeys(likely))


def usual_room(rows: int, pieces: int) -> Room | None:
    """For rows of so many splits each, none of them shared."""
    return room_bucket(Room((pieces - 1) * rows, 0), rows)
