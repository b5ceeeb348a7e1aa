"""Snapshots that an engine sends while it has viewers: steps, changed requests, pages (docs/events.md)."""

from typing import Literal

import msgspec

from quire.types.plan import Ints
from quire.types.request import FinishReason

SNAPSHOT_INTERVAL_S = 0.25  # minimum between two snapshots
MANY_REQUESTS = 64  # with more running requests, snapshots are half as frequent
MAX_LISTED_STEPS = 64
MAX_CELLS = 4096  # of the map of pages

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
UNKNOWN_TENANT = 126  # of pages without a known owner
Step = tuple[int, float, int, int, int, int, int, int, int, int, float, int]


class RequestSnapshot(msgspec.Struct, array_like=True, gc=False):
    """One request of the engine. Times are seconds of time.monotonic()."""

    key: str
    tenant: str
    state: RequestState
    since: float
    seen: float  # since when viewers watch it
    fresh: bool  # it has been watched since its arrival
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
    compiling: int  # requests whose grammar is being compiled
    # of the running requests
    keys: list[str]
    row: Ints  # tokens in the latest step
    computed: Ints
    drawn: Ints
    # changed cells of the map of pages
    first: int
    cells: bytes
    tenants: list[str]  # by number
    blank: int
    cached: int
    guesses: tuple[Ints, Ints] | None = None  # tokens drafted and accepted, of running requests, if there are any
    engine: int = 0  # its number, of several


def pages_per_cell(pages: int) -> int:
    return -(-pages // MAX_CELLS)
