"""What viewers of the engine see. It exists only while there are viewers: the core and the scheduler report to it.

    request    grammar ─► waiting ─► prompt ─► decode ─► finished      `moved`: by the scheduler, in any order
                             └◄─ preempted ◄─┘                          `landed`: from prompt to decode, with the first token

The time of a request is added up when its state changes. The time that decoding requests lose to others is the same for all,
so there is one clock for it and one for waits for masks. Each request notes both clocks when it begins, so most requests cost
nothing in most steps.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import TypeVar

import numpy as np

from quire.cache.pool import Pool
from quire.sched.plan_builder import Scheduled
from quire.sched.roster import QueueState, Roster
from quire.types import engine_snapshot as snapshots
from quire.types.engine_snapshot import EngineSnapshot, RequestSnapshot, RequestState, Step
from quire.types.plan import StepResult
from quire.types.request import Request

MAP_CHUNK_CELLS = 512  # cells of the page map in one snapshot
MAX_WALKED_ENTRIES = 2048  # page-table entries whose owner is looked up before a snapshot
MAX_MOVED = 1024  # requests in one snapshot

_Value = TypeVar("_Value")


class _Watched:
    __slots__ = (
        "accepted", "drafted", "fresh", "idle_s", "length", "masks", "parts", "request", "seen", "shared", "since", "state",
    )  # fmt: skip

    def __init__(self, request: Request, state: RequestState, now: float, fresh: bool) -> None:
        self.request, self.state, self.since, self.seen, self.fresh = request, state, now, now, fresh
        self.parts = [0.0] * len(snapshots.PARTS)
        self.length = len(request.tokens)  # when it began to run
        self.shared = self.masks = 0.0  # the clocks when it began to decode
        self.idle_s = 0.0  # seconds of steps without a row of it, since then
        self.drafted = self.accepted = 0


class Watch:
    def __init__(self, roster: Roster, pool: Pool, clock: Callable[[], float] = time.monotonic) -> None:
        self._roster, self._clock = roster, clock
        self._records: dict[Request, _Watched] = {}
        self._running: dict[Request, _Watched] = {}
        self._prompting: dict[Request, _Watched] = {}
        self._moved: dict[_Watched, None] = {}  # since the latest snapshot
        self._left_out: dict[int, list[_Watched]] = {}  # step -> running ones without a row in it
        self._shared = self._masks = 0.0  # seconds, ever: of steps that were others' prompts; of waiting for masks
        self._mask_waits: dict[int, float] = {}  # step -> seconds
        self._steps: deque[Step] = deque(maxlen=snapshots.MAX_LISTED_STEPS)
        self._skipped = self._preempted = 0
        self._guesses = False
        self._last: Scheduled | None = None
        self._next = 0.0
        self._pages = PageMap(pool)
        now = clock()
        for request in roster.live.values():
            self._begin(request, _state(request, roster.state(request)), now, fresh=False)
        roster.on_move = self.moved

    def stop(self) -> None:
        self._roster.on_move = None

    # ---- events ----------------------------------------------------------------------------------------------------------

    def moved(self, request: Request, to: QueueState) -> None:
        now, state = self._clock(), _state(request, to)
        record = self._records.get(request)
        if record is None:
            self._begin(request, state, now, fresh=True)
            return
        self._settle(record, now)
        if state == "preempted" and request in self._running:
            self._preempted += 1
        self._enter(record, state)
        if state == "finished":
            del self._records[request]

    def planned(self, scheduled: Scheduled) -> None:
        if len(scheduled.requests) < len(self._running):
            rows = set(scheduled.requests)
            self._left_out[scheduled.plan.step] = [record for request, record in self._running.items() if request not in rows]

    def waited_for_masks(self, step: int, seconds: float) -> None:
        self._mask_waits[step] = seconds
        self._masks += seconds

    def landing(self, scheduled: Scheduled, result: StepResult, seconds: float, now: float) -> None:
        """Note a step before it is committed. It kept the device busy for `seconds`, until now."""
        plan, rows = scheduled.plan, len(scheduled.requests)
        tokens, prompt, drafted, accepted = plan.tokens, 0, 0, 0
        waited = _take(self._mask_waits, plan.step) or 0.0 if self._mask_waits else 0.0
        left_out = _take(self._left_out, plan.step) or [] if self._left_out else []
        for record in left_out:
            if record.state == "decode":
                record.idle_s += seconds
        decoding = rows
        for record in self._prompting.values():
            there = 0 <= record.request.admitted <= plan.step and record not in left_out
            decoding -= there
            record.parts[snapshots.PROMPT if there else snapshots.OTHERS] += now - record.since
            record.since = now
        if tokens != rows:
            if plan.drafts.any():
                drafted, accepted = int(plan.drafts.sum()), self._count_guesses(scheduled, result)
            prompt = max(0, tokens - drafted - decoding)
            self._shared += max(0.0, seconds - waited) * prompt / tokens
        if len(self._steps) == snapshots.MAX_LISTED_STEPS:
            self._skipped += 1
        self._steps.append(
            (
                plan.step, seconds * 1e3, rows, tokens, prompt, drafted, accepted, len(result.ids), len(plan.masked),
                len(plan.given_token), waited * 1e3, self._preempted,
            )
        )  # fmt: skip
        self._preempted, self._last = 0, scheduled

    def landed(self) -> None:
        """Note the first tokens of requests, after the commit."""
        if self._prompting:
            for record in [each for each in self._prompting.values() if len(each.request.tokens) > each.length]:
                self._enter(record, "decode")

    # ---- snapshots -------------------------------------------------------------------------------------------------------

    @property
    def pending(self) -> bool:
        return bool(self._steps or self._moved or self._pages.stale)

    def look(self) -> EngineSnapshot | None:
        """Return what is new, if a snapshot is due."""
        now = self._clock()
        if now < self._next or not self.pending:
            return None
        self._next = now + (
            snapshots.SNAPSHOT_INTERVAL_S
            if len(self._running) <= snapshots.MANY_REQUESTS
            else 2 * snapshots.SNAPSHOT_INTERVAL_S
        )
        steps, self._steps = list(self._steps), deque(maxlen=snapshots.MAX_LISTED_STEPS)
        skipped, self._skipped = self._skipped, 0
        moved = list(self._moved)[:MAX_MOVED]
        for record in moved:
            del self._moved[record]
        running = list(self._running)
        row = np.zeros(self._roster.max_seqs, np.int32)
        if self._last is not None:
            row[self._last.plan.slot] = self._last.plan.count
        sampled = [len(request.tokens) - len(request.spec.prompt) for request in running]
        guesses = None
        if self._guesses:
            records = self._running.values()
            guesses = (_ints([each.drafted for each in records]), _ints([each.accepted for each in records]))
        if steps or moved:
            self._pages.changed()
        self._pages.walk(running, self._roster.tenants)
        first, cells = self._pages.next_chunk()
        return EngineSnapshot(
            now, steps, skipped, [_snapshot(record) for record in moved], self._roster.compiling,
            [request.spec.id for request in running], row[[request.slot for request in running]],
            _ints([request.computed for request in running]), _ints(sampled),
            first, cells, self._pages.tenants, self._pages.pool.blank, self._pages.pool.cached, guesses,
        )  # fmt: skip

    # ---- inside ----------------------------------------------------------------------------------------------------------

    def _begin(self, request: Request, state: RequestState, now: float, fresh: bool) -> None:
        record = self._records[request] = _Watched(request, state, now, fresh)
        self._enter(record, state)

    def _enter(self, record: _Watched, state: RequestState) -> None:
        request, record.state = record.request, state
        self._moved[record] = None
        if state in ("prompt", "decode"):
            self._running[request] = record
            record.length = len(request.tokens)
            record.shared, record.masks, record.idle_s = self._shared, self._masks, 0.0
        else:
            self._running.pop(request, None)
        if state == "prompt":
            self._prompting[request] = record
        else:
            self._prompting.pop(request, None)

    def _settle(self, record: _Watched, now: float) -> None:
        """Add the time since the latest change to its parts."""
        elapsed, parts, state = now - record.since, record.parts, record.state
        record.since = now
        if state != "decode":
            parts[_part(record)] += elapsed
            return
        masks, others = self._masks - record.masks, self._shared - record.shared + record.idle_s
        if not record.request.spec.params.needs_masks:
            masks, others = 0.0, others + masks
        others = min(elapsed, others)
        masks = min(elapsed - others, masks)
        parts[snapshots.OTHERS] += others
        parts[snapshots.MASKS] += masks
        parts[snapshots.DECODE] += elapsed - others - masks

    def _count_guesses(self, scheduled: Scheduled, result: StepResult) -> int:
        self._guesses, accepted = True, 0
        for i in np.flatnonzero(scheduled.plan.drafts).tolist():
            right = max(0, int(result.lengths[i]) - 1)
            accepted += right
            record = self._records.get(scheduled.requests[i])
            if record is not None:
                record.drafted += int(scheduled.plan.drafts[i])
                record.accepted += right
        return accepted


class PageMap:
    """The page pool as cells, reported in chunks.

    If there are several tenants, the owner of a page is looked up in the tables of running requests, a limited number at a
    time.
    """

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.tenants: list[str] = []  # by number
        self._numbers: dict[str, int] = {}
        self._each = snapshots.pages_per_cell(pool.pages)
        self._cells = -(-pool.pages // self._each) if self._each else 0
        self._owners: bytearray | None = None  # of pages, while there are several tenants
        self._first = self._walked = 0
        self._pending_cells = self._cells

    @property
    def stale(self) -> bool:
        """Whether something has changed since the last chunk."""
        return self._pending_cells > 0

    def changed(self) -> None:
        self._pending_cells = self._cells

    def walk(self, running: list[Request], tenants: Iterable[str]) -> None:
        for tenant in [each for each in tenants if each not in self._numbers]:
            if len(self.tenants) < snapshots.UNKNOWN_TENANT:
                self._numbers[tenant] = len(self.tenants)
                self.tenants.append(tenant)
        if len(self.tenants) < 2 or not running:
            return
        if self._owners is None:
            self._owners = bytearray([snapshots.UNKNOWN_TENANT]) * (self.pool.pages + 1)
        owners, left = self._owners, MAX_WALKED_ENTRIES
        for i in range(len(running)):
            request = running[(self._walked + i) % len(running)]
            number = self._numbers.get(request.spec.tenant, snapshots.UNKNOWN_TENANT)
            for table in request.pages:
                left -= len(table)
                for page in table:
                    owners[page] = number
            if left <= 0:
                break
        self._walked = (self._walked + i + 1) % len(running)

    def next_chunk(self) -> tuple[int, bytes]:
        first = self._first
        last = min(self._cells, first + MAP_CHUNK_CELLS)
        self._first = last % self._cells if self._cells else 0
        self._pending_cells -= last - first
        pages = slice(1 + first * self._each, 1 + last * self._each, self._each or None)
        kinds = self.pool.kinds(pages)
        if self._owners is None:
            return first, kinds
        owned = zip(kinds, self._owners[pages], strict=True)
        return first, bytes([kind if kind < snapshots.USED else kind + 2 * owner for kind, owner in owned])


def _state(request: Request, place: QueueState) -> RequestState:
    if place == "unready" and "grammar" in request.lacks:
        return "grammar"
    if place in ("unready", "waiting"):
        return "waiting" if request.admitted < 0 else "preempted"
    if place == "running":
        return "prompt" if request.known > 1 or not request.sampled else "decode"
    return "finished"


def _take(values: "dict[int, _Value]", step: int) -> "_Value | None":
    """Return the value of a step, and drop values of earlier steps, which were lost."""
    found = values.pop(step, None)
    for old in [each for each in values if each < step]:
        del values[old]
    return found


def _part(record: _Watched) -> int:
    """Return the part of a request that does not decode. After a late mask, a request that had run waits in the grammar
    state.
    """
    match record.state:
        case "grammar":
            return snapshots.GRAMMAR if record.request.admitted < 0 else snapshots.MASKS
        case "waiting":
            return snapshots.QUEUE
        case "prompt":
            return snapshots.PROMPT
        case _:
            return snapshots.PREEMPTED


def _snapshot(record: _Watched) -> RequestSnapshot:
    request = record.request
    spec = request.spec
    return RequestSnapshot(
        spec.id, spec.tenant, record.state, record.since, record.seen, record.fresh, len(spec.prompt), request.cached,
        len(request.tokens) - len(spec.prompt), record.drafted, record.accepted, request.limit - len(spec.prompt),
        spec.params.needs_masks, request.preemptions, record.parts, request.finished,
        spec.extras.lora_name,
    )  # fmt: skip


def _ints(values: list[int]) -> "np.ndarray[tuple[int], np.dtype[np.int32]]":
    return np.array(values, np.int32)
