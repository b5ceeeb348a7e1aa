"""The sizes graphs are recorded for: how many rows, and room for how many pieces of attention work.

Few, so that traffic that wanders over rows and lengths has soon met them all; and near enough to each other that what is left
over costs little. Pure arithmetic: nothing here knows the device.
"""

from collections.abc import Collection
from dataclasses import dataclass

MOST_ROWS = 512
ROW_BUCKETS = (1, 2, 4, 8, 16, 32, 64, *range(96, 257, 32), *range(320, MOST_ROWS + 1, 64))
LEAST_ROOM, MOST_ROOM = 64, 8192
USUAL_PIECES = (4, 2, 8)  # of a row: the lengths that idle time is spent on, most usual first
BORROWED = 2  # times as large another bucket may be, in rows and in room


@dataclass(frozen=True)
class Bucket:
    rows: int
    room: int


def row_bucket(rows: int, max_rows: int) -> int | None:
    """The least number of rows a graph is made for that takes these; None = there are too many."""
    return min((min(size, max_rows) for size in ROW_BUCKETS if size >= rows), default=None)


def room_bucket(need: int) -> int | None:
    return None if need > MOST_ROOM else max(LEAST_ROOM, 1 << (need - 1).bit_length())


def substitute(own: Bucket, need: int, recorded: Collection[Bucket]) -> Bucket | None:
    """The least recorded bucket that can do the work of `own`. `need` is the room for the step's rows beyond one piece each:
    every row of a bucket, used or not, takes one."""
    near = (bucket for bucket in recorded if bucket.rows <= BORROWED * own.rows and bucket.room <= BORROWED * own.room)
    able = (bucket for bucket in near if own.rows <= bucket.rows and need + bucket.rows <= bucket.room)
    return min(able, key=lambda bucket: (bucket.rows, bucket.room), default=None)


def worth_having(max_rows: int) -> list[Bucket]:
    """Buckets to record before anybody wants them: powers of two first (others can borrow them), small ones first."""
    sizes = sorted({min(size, max_rows) for size in ROW_BUCKETS}, key=lambda size: (size & (size - 1) != 0, size))
    wanted = [Bucket(size, room) for pieces in USUAL_PIECES for size in sizes if (room := room_bucket(pieces * size))]
    return list(dict.fromkeys(wanted))
