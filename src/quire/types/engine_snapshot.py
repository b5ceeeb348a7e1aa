"""Snapshots that an engine sends while it has viewers: steps, changed requests, pages (docs/events.md)."""

from typing import Literal

import msgspec

from quire.types.plan import Ints
from quire.types.request import FinishReason

EVERY = 0.25  # seconds between two snapshots, at least
MANY = 64  # running requests: with more, snapshots are half as frequent
MOST_STEPS = 64  # listed one by one
CELLS = 4096  # of the map of pages, at most

RequestState = Literal["grammar", "waiting", "prompt", "decode", "preempted", "restart", "finished"]
# where a request's time went
PARTS = (
    "prepare", "unseen", "grammar", "queue", "prompt", "decode", "masks", "others", "preempted", "restart", "deliver",
)  # fmt: skip
PREPARE, UNSEEN, GRAMMAR, QUEUE, PROMPT, DECODE, MASKS, OTHERS, PREEMPTED, RESTART, DELIVER = range(len(PARTS))
STEP_COLUMNS = (
    "step", "ms", "rows", "tokens", "prompt", "drafted", "accepted", "drawn", "masked", "given", "mask_ms", "preempted",
)  # fmt: skip
# a cell of the map: blank, cached, or in use once or several times by the tenant whose number follows
BLANK, CACHED, USED, SHARED = range(4)
STRANGER = 126  # the tenant of pages whose owner is not known
Step = tuple[int, float, int, int, int, int, int, int, int, int, float, int]


class RequestSnapshot(msgspec.Struct, array_like=True, gc=False):
    """One request of the engine. Times are seconds of time.monotonic()."""

    key: str
    tenant: str
    state: RequestState
    since: float
    seen: float  # since when it has been watched
    fresh: bool  # that is when the engine got it
    prompt: int
    cached: int
    drawn: int
    drafted: int
    accepted: int
    max_tokens: int
    grammar: bool
    preemptions: int
    parts: list[float]  # seconds by PARTS, up to `since`
    reason: FinishReason | None = None
    adapter: str = ""  # its name


class EngineSnapshot(msgspec.Struct, array_like=True):
    t: float
    steps: list[Step]  # since the snapshot before
    skipped: int  # steps before those
    requests: list[RequestSnapshot]  # that changed since the snapshot before
    compiling: int  # requests whose grammar is
    # of the running requests
    keys: list[str]
    row: Ints  # tokens in the latest step
    computed: Ints
    drawn: Ints
    # of the map of pages, a piece
    first: int
    cells: bytes
    tenants: list[str]  # by number
    blank: int
    cached: int
    guesses: tuple[Ints, Ints] | None = None  # tokens drafted and accepted, of the running, where there are any
    engine: int = 0  # who sees it, of several


def pages_per_cell(pages: int) -> int:
    return -(-pages // CELLS)
