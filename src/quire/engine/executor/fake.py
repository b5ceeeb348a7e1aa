"""An executor without a model, for the engine, the server and tests: any mistake in pages, tables, copies or cursors shows.

It uses only the plan: page tables are built from its entries, tokens come from admissions and its own samples, and a row
reads whatever is in the pages of its table. It tracks the position of each slot itself, because drafts may have been wrong.
`fake_model` computes the tokens. It knows no requests and no text.
"""

import os
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.cache.layout import SNAPSHOTS_PER_SLOT, Capacity, pages_for
from quire.config.config import Config
from quire.config.facts import ModelFacts
from quire.engine.executor.base import Executor
from quire.engine.executor.fake_media import FakeEncoder
from quire.engine.executor.fake_model import FakeModel, Words, flavour
from quire.engine.executor.fake_tier import FakeTier
from quire.engine.layouts import fit_or_warn, state_bytes
from quire.engine.timeline import Stopwatch
from quire.features.media.host import encoder_cache_size, media_of
from quire.files.adapter import find_adapter, read_config
from quire.types.adapter import AdapterFacts, AdapterRef
from quire.types.cache import CacheLayout
from quire.types.errors import AdapterError, ConfigError, EngineDead, EngineError
from quire.types.media import Bidirectional
from quire.types.plan import NOTHING, Admission, Ints, StepPlan, StepResult, TopLogprobs, spans
from quire.types.plan import Words as Masks
from quire.types.stats import NO_COUNTS, DeviceCounts

FAKE_LATENCY = "QUIRE_FAKE_LATENCY"  # environment: seconds per step
MAX_FAKE_PAGES = 1 << 17
MAX_DRAFTS = 8
POISON = np.uint64(0xDEADDEADDEADDEAD)
LOST = b"lost"  # state of a lost step
Longs = npt.NDArray[np.int64]
Guess = Callable[[Admission, int], Sequence[int]]  # admission, position -> the expected tokens from there on


@dataclass(frozen=True)
class Faults:
    """Failures on demand. A step lost in `submit` has no effect; one lost in `result` leaves poison in its pages."""

    rows: Collection[tuple[int, int]] = ()  # (step, slot) whose row is reported as failed
    submit: Collection[int] = ()  # steps
    result: Collection[int] = ()  # steps


class FakeFlight:
    """A step. `run` takes the masks of its masked rows, if it has any."""

    def __init__(self, ready: float, masked: bool, run: Callable[[Masks | None], StepResult | EngineError]) -> None:
        self._ready, self._run = ready, run
        self._outcome: StepResult | EngineError = EngineError("a step was awaited before it got its masks")
        if not masked:
            self._outcome = run(None)

    def sample(self, masks: Masks) -> None:
        self._outcome = self._run(masks)

    def result(self) -> StepResult:
        wait = self._ready - time.monotonic()
        if wait > 0:  # even a sleep of 0 would let others have the processor
            time.sleep(wait)
        if isinstance(self._outcome, EngineError):
            raise self._outcome
        return self._outcome


class FakeExecutor:
    """latency: seconds that a step keeps the device busy. guess: makes drafts, if a plan has any."""

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
        guess: Guess | None = None,
        recurrent: bool = False,
        embeddings: int = 0,
        undivided: Bidirectional = "",
    ) -> None:
        """recurrent: check the state of every slot and snapshot, known by the tokens before it.

        embeddings, undivided: of the encoder, see `FakeEncoder`
        """
        self._guess, self.encoder = guess, FakeEncoder(embeddings, undivided)
        self._states: dict[int, bytes] | None = {} if recurrent else None  # entry -> the tokens that made it
        self.model, self.size, self.latency, self.faults = model, layout.page_size, latency, faults or Faults()
        width = -(-max_model_len // layout.page_size)
        self.cells: Words = np.full((pages + 1, layout.page_size), POISON)  # [pages, page_size]
        self.sums: Words = self.cells.sum(axis=1, dtype=np.uint64)  # [pages] of the cells, kept up to date
        self.tables: Ints = np.zeros((len(layout.groups), max_seqs, width), np.int32)  # [groups, slots, page index]
        self.tokens: Ints = np.zeros((max_seqs, max_model_len + 1), np.int32)  # [slots, positions]
        self.known: Longs = np.zeros(max_seqs, np.int64)  # [slots] tokens, 0: the slot is free
        self.cursor: Longs = np.zeros(max_seqs, np.int64)  # [slots] positions run so far, without drafts that were wrong
        self.bound: Longs = np.zeros(max_seqs, np.int64)  # [slots] the same, if all drafts had been right
        self.seeds: Words = np.zeros(max_seqs, np.uint64)  # [slots]
        self.flavours: Words = np.zeros(max_seqs, np.uint64)  # [slots] of their adapters
        self.adapters: dict[int, str] = {}  # adapter slot -> version
        self.tier = FakeTier(self.cells, self.sums, self._states)
        self._read: dict[str, AdapterFacts] = {}  # version -> its facts
        self.admissions: dict[int, Admission] = {}
        self._special: set[int] = set()  # slots whose params require more than a token
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
        self._apply(plan)
        self._busy_until = max(self._busy_until, time.monotonic()) + self.latency
        return FakeFlight(self._busy_until, len(plan.masked) > 0, partial(self._finish, plan))

    def _finish(self, plan: StepPlan, masks: Masks | None) -> StepResult | EngineError:
        lost = plan.step in self.faults.result
        result = self._run(plan, lost, masks)
        return EngineError(f"step {plan.step} failed on order, in result") if lost else result

    def idle(self) -> bool:
        return False

    def check(self) -> None:
        pass

    def call(self, method: str, *args: Any) -> Any:
        if (method, *args[:1]) == ("call_part", "tiers"):
            return getattr(self.tier, args[1])(*args[2:])
        raise EngineError(f"the fake executor has no method {method!r} (called with {len(args)} arguments)")

    def call_all(self, method: str, *args: Any) -> list[Any]:
        return [self.call(method, *args)]

    def read_adapter(self, ref: AdapterRef) -> AdapterFacts:
        """Read the configuration only."""
        files = find_adapter(ref.path)
        rank = read_config(files).get("r")
        if type(rank) is not int or rank < 1:
            raise AdapterError(f"{files.config}: r must be an integer of at least 1; got {rank!r}", "lora_path")
        self._read[ref.version] = AdapterFacts(rank, files.weights.stat().st_size)
        return self._read[ref.version]

    def read_ahead(self, ref: AdapterRef) -> None:
        pass

    def put_adapter(self, ref: AdapterRef, slot: int) -> None:
        if ref.version not in self._read:
            raise EngineError(f"{ref.path} was not read, so it cannot be put in adapter slot {slot}")
        self.adapters[slot] = ref.version

    def drop_adapter(self, slot: int) -> None:
        self.adapters.pop(slot, None)

    def forget_adapter(self, version: str) -> None:
        self._read.pop(version, None)

    def stop(self) -> None:
        self._stopped = True

    # ---- before the rows: retire, admit, tables, copies ------------------------------------------------------------------

    def _apply(self, plan: StepPlan) -> None:
        for slot in plan.retired.tolist():
            self.tables[:, slot] = 0
            self.known[slot] = self.cursor[slot] = self.bound[slot] = 0
            self.admissions.pop(slot, None)
            self._special.discard(slot)
        for admission in plan.admitted:
            slot = admission.slot
            if slot in self.admissions:
                raise EngineError(f"slot {slot} was admitted while it had a request")
            self.admissions[slot] = admission
            self.tokens[slot, : len(admission.tokens)] = admission.tokens
            params = admission.params
            self.known[slot], self.cursor[slot], self.bound[slot] = len(admission.tokens), admission.start, admission.start
            self.flavours[slot] = self._flavour(admission)
            self.seeds[slot] = 0 if params.greedy else admission.seed & 2**64 - 1
            if params.logprobs is not None or params.min_tokens:
                self._special.add(slot)
        if (plan.given_position != self.known[plan.given_slot] + _counts_before(plan.given_slot)).any():
            raise EngineError("a token was given that does not follow its slot's last one")
        self.tokens[plan.given_slot, plan.given_position] = plan.given_token
        np.add.at(self.known, plan.given_slot, 1)
        self.tables[plan.entry_group, plan.entry_slot, plan.entry_index] = plan.entry_page
        if self._states is not None:
            for admission in plan.admitted:
                self._states[admission.slot] = b""
            for entry, slot in zip(plan.load_entry.tolist(), plan.load_slot.tolist(), strict=True):
                if entry not in self._states:
                    raise EngineError(f"a state was loaded from entry {entry}, where none was saved")
                self._states[slot] = self._states[entry]
        self.tier.move(plan)
        self.encoder.apply(plan, self.admissions)
        targets = plan.copy_to.tolist()
        if len(set(targets)) < len(targets) or set(targets) & set(plan.copy_from.tolist()):
            raise EngineError("page copies of one step depend on each other")
        self.cells[plan.copy_to] = self.cells[plan.copy_from]
        self.sums[plan.copy_to] = self.sums[plan.copy_from]

    def _flavour(self, admission: Admission) -> int:
        slot = admission.extras.adapter_slot
        if slot and slot not in self.adapters:
            raise EngineError(f"a row uses adapter slot {slot}, which is empty")
        return flavour(self.adapters[slot]) if slot else 0

    # ---- the rows --------------------------------------------------------------------------------------------------------

    def _run(self, plan: StepPlan, lost: bool, masks: Masks | None) -> StepResult:
        if not len(plan.slot):
            return StepResult(plan.step, NOTHING, NOTHING)
        slots, count = plan.slot.astype(np.int64), plan.count.astype(np.int64)
        end = self.cursor[slots] + count
        self._check_rows(plan, slots, end, count)
        self._expect(plan, slots, end)
        if self._states is not None:
            self._move_states(self._states, plan, end, lost)
        fresh = np.isin(slots, [admission.slot for admission in plan.admitted])
        single = (count == 1) & ~fresh  # these read only what earlier steps wrote; others may read each other, in order
        self._write(slots[single], end[single] - 1, lost)
        for i in np.flatnonzero(~single):
            positions = np.arange(end[i] - count[i], end[i])
            self._write_span(int(slots[i]), positions, lost)
        positions = spans(end - count, count)  # [tokens]
        sampled = self._sample(plan, slots[plan.sample_row], positions[plan.outputs.sample_after] + 1, masks)
        lengths = self._accept(plan, sampled, positions)
        kept = spans(np.searchsorted(plan.sample_row, np.arange(len(slots))), lengths)  # the samples that count
        ids, row = sampled[kept], plan.sample_row[kept]
        self.cursor[slots] = end - np.where(plan.sample, 1 + plan.drafts - lengths, 0)
        self.bound[slots] = plan.end
        if self._states is not None:  # after wrong drafts they are restored
            for slot in slots[plan.drafts > 0].tolist():
                if self._states[slot] != LOST:
                    self._states[slot] = self._history(slot, int(self.cursor[slot]))
        self.tokens[slots[row], positions[plan.outputs.sample_after[kept]] + 1] = ids
        self.known[slots] = np.where(plan.sample, self.cursor[slots] + 1, self.known[slots])
        self._propose(slots[plan.sample])
        logprobs, scores = self._score(plan, slots, ids, row, positions)
        bad = {slot for step, slot in self.faults.rows if step == plan.step}
        failed = {int(i): "failed on order" for i in np.flatnonzero(np.isin(slots, list(bad)))} if bad else {}
        if failed:
            ids, lengths = ids[~np.isin(row, list(failed))], np.where(np.isin(np.arange(len(slots)), list(failed)), 0, lengths)
        masked = np.unique(plan.sample_row[plan.masked]).tolist()
        drafts = {row: self._drafts(int(slots[row])) for row in masked if self._guess is not None}
        pool = plan.outputs.pool
        owner = plan.shapes.rows_of(pool)
        pooled = {row: positions[pool[owner == row]].astype(np.float32)[:, None] for row in np.unique(owner).tolist()}
        return StepResult(plan.step, lengths, ids, logprobs, scores, pooled, drafts, failed)

    def _check_rows(self, plan: StepPlan, slots: Longs, end: Longs, count: Longs) -> None:
        """Raise if a row is not where its slot is. end: where the rows really end."""
        if (slots < 0).any():
            raise EngineError("a row has no slot")
        if len(set(slots.tolist())) < len(slots):
            raise EngineError("a slot has two rows in one step")
        begin = plan.end - count
        self.encoder.check(slots.tolist(), (end - count).tolist(), end.tolist())
        if (count < 1).any() or (begin < self.cursor[slots]).any() or (begin > self.bound[slots]).any():
            raise EngineError("a row does not begin where its slot's last one ended")
        for slot in slots[self.flavours[slots] != 0].tolist():
            if self._flavour(self.admissions[slot]) != int(self.flavours[slot]):
                raise EngineError(f"the adapter of slot {slot} was changed during its request")
        known = self.known[slots] + plan.drafts
        if (end > known).any():
            raise EngineError("a row ends after its last token")
        samples = np.array([self.admissions[slot].extras.pooling is None for slot in slots.tolist()], np.bool_)
        if (plan.sample != ((end == known) & samples)).any():
            raise EngineError("a row samples before its last token, or does not sample after it")

    def _history(self, slot: int, end: int) -> bytes:
        """Return what the state of a slot after `end` tokens depends on."""
        return self.tokens[slot, :end].tobytes() + self.encoder.history(slot, end)

    def _move_states(self, states: dict[int, bytes], plan: StepPlan, end: Longs, lost: bool) -> None:
        for slot, count, stop in zip(plan.slot.tolist(), plan.count.tolist(), end.tolist(), strict=True):
            before = states.get(slot, b"")
            if before not in (LOST, self._history(slot, stop - count)):
                raise EngineError(f"the row of slot {slot} goes on from a state that is not its own")
            states[slot] = LOST if lost or before == LOST else self._history(slot, stop)
        for slot, entry in zip(plan.save_slot.tolist(), plan.save_entry.tolist(), strict=True):
            states[entry] = states[slot]

    def _expect(self, plan: StepPlan, slots: Longs, end: Longs) -> None:
        """Take the drafts of the plan."""
        if len(plan.draft_token):
            if (end != plan.end)[plan.drafts > 0].any() or len(plan.draft_token) != plan.drafts.sum():
                raise EngineError("drafts do not follow the last token of their slot")
            self.tokens[np.repeat(slots, plan.drafts), spans(end - plan.drafts, plan.drafts)] = plan.draft_token

    def _sample(self, plan: StepPlan, slots: Longs, positions: Ints, masks: Masks | None) -> Ints:
        """Return the new tokens for slots and positions [samples]."""
        if not len(slots):
            return np.empty(0, np.int32)
        sampled = self.model.sample(
            [self._digest(g, slots, positions) for g in range(len(self.tables))], self.seeds[slots], positions
        )
        if self._states is not None:
            wrong = np.array([self._states[slot] == LOST for slot in slots.tolist()])
            sampled = np.where(wrong, (sampled + 1) % self.model.vocab_size, sampled).astype(np.int32)
        if masks is not None:
            for i, mask in zip(plan.masked.tolist(), masks, strict=True):
                sampled[i] = self.model.within(int(sampled[i]), mask)
        for i, slot in enumerate(slots.tolist()) if self._special else ():
            admission = self.admissions[slot]
            if positions[i] - admission.prompt_length < admission.params.min_tokens:
                sampled[i] = self.model.without(int(sampled[i]), admission.stop_ids)
        return sampled

    def _accept(self, plan: StepPlan, sampled: Ints, positions: Ints) -> Ints:
        """Return [rows] how many of the sampled tokens are kept: those before the first wrong draft, and one."""
        lengths = plan.sample.astype(np.int32)
        for row in np.flatnonzero(plan.drafts).tolist():
            index = np.flatnonzero(plan.sample_row == row)
            drafts = self.tokens[plan.slot[row], positions[plan.outputs.sample_after[index[1:]]]]
            wrong = np.flatnonzero(sampled[index[:-1]] != drafts)
            lengths[row] += wrong[0] if len(wrong) else len(drafts)
        return lengths

    def _propose(self, slots: Longs) -> None:
        if self._guess is None:
            return
        for slot in slots.tolist():
            known = int(self.known[slot])
            drafts = self._guess(self.admissions[slot], known)[: self.tokens.shape[1] - known]
            self.tokens[slot, known : known + len(drafts)] = drafts

    def _drafts(self, slot: int) -> Ints:
        known = int(self.known[slot])
        return self.tokens[slot, known : known + MAX_DRAFTS].copy()

    def _write(self, slots: Longs, positions: Longs, lost: bool) -> None:
        """Write one token of each slot."""
        index, offset = positions // self.size, positions % self.size
        before, tokens = np.maximum(positions - 1, 0), self.tokens[slots, positions]
        for group, window in enumerate(self.model.windows):
            pages = self._pages(group, slots, index)
            values = self.encoder.add(self.model.weights(group, tokens, positions) + self.flavours[slots], slots, positions)
            if window != 1:
                previous = self.cells[self._pages(group, slots, before // self.size), before % self.size]
                values = values + np.where(positions > 0, previous, np.uint64(0))
            self._clear(pages[offset == 0])
            values = np.full_like(values, POISON) if lost else values
            self.sums[pages] += values - self.cells[pages, offset]
            self.cells[pages, offset] = values

    def _write_span(self, slot: int, positions: Longs, lost: bool) -> None:
        """Write several tokens of one slot."""
        index, offset, before = positions // self.size, positions % self.size, positions[:1] - 1
        for group, window in enumerate(self.model.windows):
            pages = self._pages(group, np.full_like(positions, slot), index)
            values = self.model.weights(group, self.tokens[slot, positions], positions) + self.flavours[slot]
            values = self.encoder.add(values, np.full_like(positions, slot), positions)
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
        """Poison pages that are written from their start: old content must not be mistaken for new."""
        self.cells[pages] = POISON
        self.sums[pages] = self.cells[:1].sum(dtype=np.uint64)

    def _digest(self, group: int, slots: Longs, end: npt.NDArray[np.integer]) -> Words:
        """Return [rows] the sum of the visible cells: whole pages, less what is before the window and after the end."""
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

    def _score(
        self, plan: StepPlan, slots: Longs, ids: Ints, row: Ints, positions: Ints
    ) -> tuple[dict[int, TopLogprobs], dict[int, TopLogprobs]]:
        """Return the logprobs of sampled tokens and of prompt tokens."""
        logprobs, prompt_logprobs = {}, {}
        for i in np.unique(row).tolist() if self._special else ():
            count = self.admissions[int(slots[i])].params.logprobs
            if count is not None:
                logprobs[i] = self._top(ids[row == i], count)
        scored = plan.outputs.prompt_logprobs
        rows = plan.shapes.rows_of(scored)
        for i in np.unique(rows).tolist():
            chosen = self.tokens[slots[i], positions[scored[rows == i]] + 1]
            prompt_logprobs[i] = self._top(chosen, self.admissions[int(slots[i])].params.prompt_logprobs or 0)
        return logprobs, prompt_logprobs

    def _top(self, chosen: Ints, k: int) -> TopLogprobs:
        """Return [positions, 1 + k]: the chosen tokens, then the ids after them, each half a nat less likely."""
        k = self.model.vocab_size if k < 0 else k
        steps = np.concatenate([[0], np.arange(k)])
        ids = ((chosen[:, None] + steps) % self.model.vocab_size).astype(np.int32)
        values = np.broadcast_to((-0.5 - 0.5 * steps).astype(np.float32), ids.shape).copy()
        return TopLogprobs(ids, values, np.ones(len(chosen), np.int32))


def _counts_before(slots: Ints) -> Ints:
    """Return how often each slot occurs before its index: [3, 3, 5, 3] -> [0, 1, 0, 2]."""
    return np.array([int((slots[:i] == slot).sum()) for i, slot in enumerate(slots)], np.int32)


def start_fake(config: Config, facts: ModelFacts, layout: CacheLayout, watch: Stopwatch) -> tuple[Executor, Capacity]:
    """Start without a model. By default the cache holds a full batch of the longest requests, up to MAX_FAKE_PAGES."""
    args = config.args
    override = args.num_gpu_blocks_override
    if override is None and args.kv_cache_memory_bytes is None:
        alone = pages_for(layout, config.max_model_len, config.max_batched_tokens)
        override = max(alone, min(alone * config.max_seqs, MAX_FAKE_PAGES))
    states = (SNAPSHOTS_PER_SLOT + 2) * config.max_seqs * state_bytes(config)
    capacity = fit_or_warn(config, layout, args.kv_cache_memory_bytes or states, override)
    embeddings, media = encoder_cache_size(config), media_of(config)
    executor = FakeExecutor(
        layout,
        FakeModel.of(layout, vocab_size=facts.vocab_size, eos_id=next(iter(facts.eos_ids), None)),
        pages=capacity.pages,
        max_seqs=config.max_seqs,
        max_model_len=capacity.max_model_len,
        latency=_fake_latency(),
        recurrent=bool(facts.states),
        embeddings=0 if embeddings is None else embeddings.capacity,
        undivided="" if media is None else media.family.bidirectional,
    )
    watch.lap("fake model")
    return executor, capacity


def _fake_latency() -> float:
    text = os.environ.get(FAKE_LATENCY, "0")
    try:
        return max(0.0, float(text))
    except ValueError:
        raise ConfigError(f"{FAKE_LATENCY} must be seconds, got {text!r}") from None
