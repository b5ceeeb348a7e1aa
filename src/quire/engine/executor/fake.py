"""An executor without a model: the engine and server can run on it, and no slip in pages, tables, copies or cursors hides.

It believes only the plan: page tables are built from its entries, tokens come from admissions and its own samples, and what a
row reads is whatever lies in the pages its table names. What it computes is in `fake_model`. It knows no requests and no text.
"""

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.engine.executor.fake_model import FakeModel, Words
from quire.types.cache import CacheLayout
from quire.types.errors import EngineDead, EngineError
from quire.types.plan import Admission, Ints, StepPlan, StepResult, TopLogprobs
from quire.types.plan import Words as Masks
from quire.types.stats import NO_COUNTS, DeviceCounts

POISON = np.uint64(0xDEADDEADDEADDEAD)
Longs = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Faults:
    """Failures on order. A step lost in `submit` has no effect; one lost in `result` leaves poison in its pages."""

    rows: Collection[tuple[int, int]] = ()  # (step, slot) whose row is reported as failed
    submit: Collection[int] = ()  # steps
    result: Collection[int] = ()  # steps


class FakeFlight:
    """`run` takes the masks of the step's masked rows, if it has any."""

    def __init__(self, ready: float, masked: bool, run: Callable[[Masks | None], StepResult | EngineError]) -> None:
        self._ready, self._run = ready, run
        self._outcome: StepResult | EngineError = EngineError("a step was awaited before it got its masks")
        if not masked:
            self._outcome = run(None)

    def draw(self, masks: Masks) -> None:
        self._outcome = self._run(masks)

    def result(self) -> StepResult:
        wait = self._ready - time.monotonic()
        if wait > 0:  # even a sleep of 0 would let others have the processor
            time.sleep(wait)
        if isinstance(self._outcome, EngineError):
            raise self._outcome
        return self._outcome


class FakeExecutor:
    """`latency` is how long a step keeps the device busy, in seconds."""

    def __init__(
        self,
        layout: CacheLayout,
        model: FakeModel,
        *,
        pages: int,
        max_seqs: int,
        max_model_len: int,
        latency: float = 0.0,
        faults: Faults | None = None,
    ) -> None:
        self.model, self.size, self.latency, self.faults = model, layout.page_size, latency, faults or Faults()
        width = -(-max_model_len // layout.page_size)
        self.cells: Words = np.full((pages + 1, layout.page_size), POISON)  # [pages, page_size]
        self.sums: Words = self.cells.sum(axis=1, dtype=np.uint64)  # [pages] of the cells, kept up to date
        self.tables: Ints = np.zeros((len(layout.groups), max_seqs, width), np.int32)  # [groups, slots, page index]
        self.tokens: Ints = np.zeros((max_seqs, max_model_len + 1), np.int32)  # [slots, positions]
        self.known: Longs = np.zeros(max_seqs, np.int64)  # [slots] tokens, 0 = no tenant
        self.cursor: Longs = np.zeros(max_seqs, np.int64)  # [slots] positions run so far
        self.seeds: Words = np.zeros(max_seqs, np.uint64)  # [slots]
        self.tenants: dict[int, Admission] = {}
        self._special: set[int] = set()  # slots whose params ask for more than a token
        self._busy_until = 0.0
        self._stopped = False

    @property
    def counts(self) -> DeviceCounts:
        return NO_COUNTS

    def submit(self, plan: StepPlan) -> FakeFlight:
        if self._stopped:
            raise EngineDead("the executor was stopped; no step can be submitted")
        if plan.step in self.faults.submit:
            raise EngineError(f"step {plan.step} failed on order, in submit")
        self._seat(plan)
        self._busy_until = max(self._busy_until, time.monotonic()) + self.latency
        return FakeFlight(self._busy_until, len(plan.masked) > 0, partial(self._finish, plan))

    def _finish(self, plan: StepPlan, masks: Masks | None) -> StepResult | EngineError:
        lost = plan.step in self.faults.result
        result = self._run(plan, lost, masks)
        return EngineError(f"step {plan.step} failed on order, in result") if lost else result

    def idle(self) -> bool:
        return False

    def call(self, method: str, *args: Any) -> Any:
        raise EngineError(f"the fake executor has no method {method!r} (called with {len(args)} arguments)")

    def stop(self) -> None:
        self._stopped = True

    # ---- before the rows: retire, admit, tables, copies ------------------------------------------------------------------

    def _seat(self, plan: StepPlan) -> None:
        for slot in plan.retired.tolist():
            self.tables[:, slot] = 0
            self.known[slot] = self.cursor[slot] = 0
            self.tenants.pop(slot, None)
            self._special.discard(slot)
        for tenant in plan.admitted:
            slot = tenant.slot
            if slot in self.tenants:
                raise EngineError(f"slot {slot} was admitted while it had a tenant")
            self.tenants[slot] = tenant
            self.tokens[slot, : len(tenant.tokens)] = tenant.tokens
            params = tenant.params
            self.known[slot], self.cursor[slot] = len(tenant.tokens), tenant.start
            self.seeds[slot] = 0 if params.greedy else tenant.seed & 2**64 - 1
            if params.logprobs is not None or params.prompt_logprobs is not None or params.min_tokens:
                self._special.add(slot)
        if (plan.given_position != self.known[plan.given_slot] + _counts_before(plan.given_slot)).any():
            raise EngineError("a token was given that does not follow its slot's last one")
        self.tokens[plan.given_slot, plan.given_position] = plan.given_token
        np.add.at(self.known, plan.given_slot, 1)
        self.tables[plan.entry_group, plan.entry_slot, plan.entry_index] = plan.entry_page
        targets = plan.copy_to.tolist()
        if len(set(targets)) < len(targets) or set(targets) & set(plan.copy_from.tolist()):
            raise EngineError("page copies of one step depend on each other")
        self.cells[plan.copy_to] = self.cells[plan.copy_from]
        self.sums[plan.copy_to] = self.sums[plan.copy_from]

    # ---- the rows --------------------------------------------------------------------------------------------------------

    def _run(self, plan: StepPlan, lost: bool, masks: Masks | None) -> StepResult:
        slots, end, count = plan.slot.astype(np.int64), plan.end.astype(np.int64), plan.count.astype(np.int64)
        self._check_rows(plan, slots, end, count)
        fresh = np.isin(slots, [tenant.slot for tenant in plan.admitted])
        single = (count == 1) & ~fresh  # these read only what earlier steps wrote; the others may read each other, in order
        self._write(slots[single], end[single] - 1, lost)
        for i in np.flatnonzero(~single):
            positions = np.arange(end[i] - count[i], end[i])
            self._write_span(int(slots[i]), positions, lost)
        self.cursor[slots] = end
        sampled = np.full(len(slots), -1, np.int32)
        last = np.flatnonzero(plan.sample)
        if len(last):
            digests = [self._digest(group, slots[last], end[last]) for group in range(len(self.tables))]
            sampled[last] = self.model.draw(digests, self.seeds[slots[last]], end[last])
        if masks is not None:
            for row, mask in zip(plan.masked.tolist(), masks, strict=True):
                sampled[row] = self.model.within(int(sampled[row]), mask)
        logprobs, prompt_logprobs = self._finish_special(plan, sampled) if self._special else ({}, {})
        self.tokens[slots[last], end[last]] = sampled[last]
        self.known[slots[last]] += 1
        bad = {slot for step, slot in self.faults.rows if step == plan.step}
        failed = {int(i): "failed on order" for i in np.flatnonzero(np.isin(slots, list(bad)))} if bad else {}
        return StepResult(plan.step, sampled, logprobs, prompt_logprobs, failed)

    def _check_rows(self, plan: StepPlan, slots: Longs, end: Longs, count: Longs) -> None:
        if (slots < 0).any():
            raise EngineError("a row has no slot")
        if len(set(slots.tolist())) < len(slots):
            raise EngineError("a slot has two rows in one step")
        if (count < 1).any() or (end - count != self.cursor[slots]).any():
            raise EngineError("a row does not begin where its slot's last one ended")
        if (end > self.known[slots]).any() or (plan.sample != (end == self.known[slots])).any():
            raise EngineError("a row ends after its last token, or samples before it")

    def _write(self, slots: Longs, positions: Longs, lost: bool) -> None:
        """One token of each slot."""
        index, offset = positions // self.size, positions % self.size
        before, tokens = np.maximum(positions - 1, 0), self.tokens[slots, positions]
        for group, window in enumerate(self.model.windows):
            pages = self._pages(group, slots, index)
            values = self.model.weights(group, tokens, positions)
            if window != 1:
                previous = self.cells[self._pages(group, slots, before // self.size), before % self.size]
                values = values + np.where(positions > 0, previous, np.uint64(0))
            self._clear(pages[offset == 0])
            values = np.full_like(values, POISON) if lost else values
            self.sums[pages] += values - self.cells[pages, offset]
            self.cells[pages, offset] = values

    def _write_span(self, slot: int, positions: Longs, lost: bool) -> None:
        """Many tokens of one slot."""
        index, offset, before = positions // self.size, positions % self.size, positions[:1] - 1
        for group, window in enumerate(self.model.windows):
            pages = self._pages(group, np.full_like(positions, slot), index)
            values = self.model.weights(group, self.tokens[slot, positions], positions)
            if window != 1:
                values = np.cumsum(values, dtype=np.uint64)
                if before[0] >= 0:
                    values = values + self.cells[self._pages(group, np.array([slot]), before // self.size), before % self.size]
            self._clear(pages[offset == 0])
            self.cells[pages, offset] = POISON if lost else values
            touched = np.unique(pages)
            self.sums[touched] = self.cells[touched].sum(axis=1, dtype=np.uint64)

    def _pages(self, group: int, slots: Longs, index: Longs) -> Longs:
        pages: Longs = self.tables[group, slots, index].astype(np.int64)
        if not pages.all():
            raise EngineError(f"a row touches the null page in group {group}")
        return pages

    def _clear(self, pages: Longs) -> None:
        """A page that is written from its start has a new owner: whatever was left in it must not be mistaken for content."""
        self.cells[pages] = POISON
        self.sums[pages] = self.cells[:1].sum(dtype=np.uint64)

    def _digest(self, group: int, slots: Longs, end: Longs) -> Words:
        """Sum of the visible cells of each row: whole pages, less what lies before the window and after the end. → [rows]"""
        window = self.model.windows[group]
        start = np.zeros_like(end) if window is None else np.maximum(end - window, 0)
        first, last = start // self.size, (end - 1) // self.size
        counts = last - first + 1
        row_starts = np.cumsum(counts) - counts
        index = np.arange(counts.sum()) - np.repeat(row_starts - first, counts)
        pages = self._pages(group, np.repeat(slots, counts), index)
        digest: Words = np.add.reduceat(self.sums[pages], row_starts)
        offsets = np.arange(self.size)
        head = self.cells[pages[row_starts]]
        tail = self.cells[pages[row_starts + counts - 1]]
        digest -= (head * (offsets < (start % self.size)[:, None])).sum(axis=1, dtype=np.uint64)
        digest -= (tail * (offsets > ((end - 1) % self.size)[:, None])).sum(axis=1, dtype=np.uint64)
        return digest

    def _finish_special(self, plan: StepPlan, sampled: Ints) -> tuple[dict[int, TopLogprobs], dict[int, TopLogprobs]]:
        """What single slots asked for: no stop ids yet, logprobs of the sample, logprobs of the prompt."""
        logprobs, prompt_logprobs = {}, {}
        for i, slot in enumerate(plan.slot.tolist()):
            if slot not in self._special:
                continue
            tenant, end = self.tenants[slot], int(plan.end[i])
            params = tenant.params
            if plan.sample[i]:
                if end - tenant.prompt_length < params.min_tokens:
                    sampled[i] = self.model.without(int(sampled[i]), tenant.stop_ids)
                if params.logprobs is not None:
                    logprobs[i] = self._top(sampled[i : i + 1], params.logprobs)
            chosen = self.tokens[slot, end - plan.count[i] + 1 : min(end + 1, tenant.prompt_length)]
            if params.prompt_logprobs is not None and len(chosen):
                prompt_logprobs[i] = self._top(chosen, params.prompt_logprobs)
        return logprobs, prompt_logprobs

    def _top(self, chosen: Ints, k: int) -> TopLogprobs:
        """The chosen token leads, the ids after it follow at half a nat each. chosen [positions] → [positions, 1 + k]"""
        k = self.model.vocab_size if k < 0 else k
        steps = np.concatenate([[0], np.arange(k)])
        ids = ((chosen[:, None] + steps) % self.model.vocab_size).astype(np.int32)
        values = np.broadcast_to((-0.5 - 0.5 * steps).astype(np.float32), ids.shape).copy()
        return TopLogprobs(ids, values, np.ones(len(chosen), np.int32))


def _counts_before(slots: Ints) -> Ints:
    """How often each slot occurs before its place: [3, 3, 5, 3] -> [0, 1, 0, 2]."""
    return np.array([int((slots[:i] == slot).sum()) for i, slot in enumerate(slots)], np.int32)
