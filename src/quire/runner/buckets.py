"""The sizes that CUDA graphs are recorded for: rows, tokens, and attention splits.

There are few sizes, so that varying traffic soon finds all of them recorded, and they are close enough that padding costs
little. This is arithmetic only: nothing here knows the device.
"""

from collections.abc import Collection, Hashable
from functools import lru_cache
from typing import NamedTuple

from quire.attn.backend import Room
from quire.attn.work_split import MIN_SHARING_ROWS
from quire.config.memory import MAX_GRAPH_ROWS as MAX_GRAPH_ROWS
from quire.types.plan import MAX_GRAPH_TOKENS as MAX_GRAPH_TOKENS
from quire.types.plan import TOKEN_BUCKETS

ROW_BUCKETS = (1, 2, 4, 8, 16, 32, 64, *range(96, 257, 32), *range(320, MAX_GRAPH_ROWS + 1, 64))
MIN_SPLITS = 64
COARSE_SPLITS = 1024  # step between larger sizes: unused splits cost time there
SHARED_BUCKETS = (0, 64, 256, 1024, 4096)  # splits that several rows share
MAX_TILES = 512
MAX_ROOM = Room(8192, SHARED_BUCKETS[-1], MAX_TILES)
USUAL_SPLITS = (4, 2, 8)  # splits of a row: context lengths that are recorded in idle time, the most frequent first
BORROWED = 2  # factor by which a borrowed bucket may be larger, in rows and in splits; shared splits: the next size
# steps with prompts: padding costs little compared with prompt tokens, so coarse sizes suffice
ROW_BUCKETS_WITH_PROMPTS = (16, 80, 288, MAX_GRAPH_ROWS + 1)  # above 64 and 256, common values of max_num_seqs
MIN_TILES = 128  # enough for MAX_GRAPH_TOKENS in a few rows
MAX_PROMPT_SPLITS = 256  # of the contexts of all prompts' last tokens
BORROWED_WITH_PROMPTS = 4
MAX_START_ROWS = 256  # rows of graphs that are recorded at the start if drafts are on
MAX_UNSEEN_TOKENS = 256  # tokens that a draft model catches up on
CACHE_SIZE = 4096  # cached results: most steps repeat earlier ones


class Bucket(NamedTuple):
    rows: int
    room: Room
    tokens: int = 0  # in rows of any length; 0: every row has one token
    keys: tuple[Hashable, ...] = ()  # of the parts that the step uses (`StepPart.graph_key`), one per part

    @property
    def width(self) -> int:
        """Return the number of tokens that are run."""
        return self.tokens or self.rows


@lru_cache(CACHE_SIZE)
def row_bucket(rows: int, max_rows: int) -> int | None:
    """Return the smallest row count of a graph that holds `rows`; None: too many rows."""
    return min((min(size, max_rows) for size in ROW_BUCKETS if size >= rows), default=None)


@lru_cache(CACHE_SIZE)
def room_bucket(need: Room, rows: int) -> Room | None:
    """Return the smallest room for `need` splits beyond one per row; None: it is too large."""
    splits = need.splits + rows
    if splits > MAX_ROOM.splits or need.shared > MAX_ROOM.shared:
        return None
    size = 1 << (splits - 1).bit_length() if splits <= COARSE_SPLITS else -(-splits // COARSE_SPLITS) * COARSE_SPLITS
    return Room(max(MIN_SPLITS, size), min(size for size in SHARED_BUCKETS if size >= need.shared))


@lru_cache(CACHE_SIZE)
def prompt_bucket(need: Room, rows: int, tokens: int, max_rows: int) -> Bucket | None:
    """Return the smallest bucket with rows of any length; one more row holds unused tokens. need: as in room_bucket."""
    sizes = sorted({min(size, max_rows + 1) for size in ROW_BUCKETS_WITH_PROMPTS})
    size = next((size for size in sizes if size > rows), None)
    width = next((width for width in TOKEN_BUCKETS if width >= tokens), None)
    room = None if size is None or width is None else room_bucket(need, size)
    if size is None or width is None or room is None:
        return None
    splits = room.splits << (room.splits.bit_length() - MIN_SPLITS.bit_length()) % 2  # every other size
    tiles = max(MIN_TILES, 1 << (need.tiles - 1).bit_length())
    return Bucket(size, Room(min(splits, MAX_ROOM.splits), room.shared, tiles), width)


def final_room(room: Room) -> Room:
    """Return the room for the last tokens of rows in a bucket with prompts."""
    return Room(room.splits + MAX_PROMPT_SPLITS, room.shared)


def substitute(own: Bucket, need: Room, recorded: Collection[Bucket]) -> Bucket | None:
    """Return the smallest recorded bucket that can run what `own` would.

    need: splits beyond one per row of the step; every row of a bucket, used or not, takes one.
    """
    next_shared = min((size for size in SHARED_BUCKETS if size > own.room.shared), default=own.room.shared)
    factor = BORROWED_WITH_PROMPTS if own.tokens else BORROWED
    near = (
        bucket
        for bucket in recorded
        if bucket.keys == own.keys
        and bucket.rows <= factor * own.rows
        and bucket.room.splits <= factor * own.room.splits
        and bucket.room.shared <= next_shared
        and (bucket.tokens <= own.tokens + own.tokens // 4 if own.tokens else not bucket.tokens)
    )
    able = (
        bucket
        for bucket in near
        if own.rows <= bucket.rows
        and own.tokens <= bucket.tokens
        and need.splits + bucket.rows <= bucket.room.splits
        and need.shared <= bucket.room.shared
        and need.tiles <= bucket.room.tiles
    )
    return min(able, key=lambda bucket: (bucket.width, bucket.rows, bucket.room.splits, bucket.room.shared), default=None)


def draft_buckets(drafts: int, max_rows: int) -> list[Bucket]:
    """Return buckets for steps with drafts: each draft is a row, and the rows of one request share its context."""
    one = {row_bucket(1 + count, max_rows) or 1 for count in range(drafts + 1)}
    buckets: list[Bucket] = []
    for size in sorted({*one, *_powers_of_two(max_rows)}):
        buckets += _decode_buckets(size)
        if size >= MIN_SHARING_ROWS and (room := usual_room(size, USUAL_SPLITS[1 if size > MIN_SPLITS else 0])):
            buckets.append(Bucket(size, Room(room.splits, SHARED_BUCKETS[1 if size <= SHARED_BUCKETS[1] else 2])))
    return buckets


def drafter_buckets(max_rows: int, max_tokens: int) -> list[Bucket]:
    """Return the buckets of a draft model: one token per row, and tokens that it has not seen."""
    widths = [width for width in TOKEN_BUCKETS if width <= min(max_tokens, MAX_UNSEEN_TOKENS)]
    return [
        *(bucket for size in _powers_of_two(max_rows) for bucket in _decode_buckets(size)),
        *_with_prompts(widths, max_rows),
    ]


def _powers_of_two(max_rows: int) -> list[int]:
    return [size for size in ROW_BUCKETS if size & (size - 1) == 0 and size <= min(max_rows, MAX_START_ROWS)]


def _decode_buckets(size: int) -> list[Bucket]:
    """Return buckets for usual context lengths. With many rows, short contexts cannot borrow the buckets of long ones."""
    splits = USUAL_SPLITS[: 2 if size >= MIN_SPLITS else 1]
    return [Bucket(size, room) for count in splits if (room := usual_room(size, count))]


def _with_prompts(widths: list[int], max_rows: int) -> list[Bucket]:
    return [
        bucket
        for rows in ROW_BUCKETS_WITH_PROMPTS[:2]
        for width in widths
        if (bucket := prompt_bucket(Room((USUAL_SPLITS[0] - 1) * (rows - 1), 0, 1), min(rows - 1, max_rows), width, max_rows))
    ]


def idle_buckets(max_rows: int, max_tokens: int) -> list[Bucket]:
    """Return buckets to record in idle time: those that others can borrow first, small ones first."""
    sizes = sorted({min(size, max_rows) for size in ROW_BUCKETS}, key=lambda size: (size & (size - 1) != 0, size))
    alone = [Bucket(size, room) for splits in USUAL_SPLITS for size in sizes if (room := usual_room(size, splits))]
    widths = sorted((width for width in TOKEN_BUCKETS if width <= max_tokens), key=lambda width: (width % 256 > 0, width))
    first = sum(size & (size - 1) == 0 for size in sizes)
    return list(dict.fromkeys([*alone[:first], *_with_prompts(widths, max_rows), *alone[first:]]))


def usual_room(rows: int, splits: int) -> Room | None:
    """Return the room for rows of `splits` unshared splits each."""
    return room_bucket(Room((splits - 1) * rows, 0), rows)
