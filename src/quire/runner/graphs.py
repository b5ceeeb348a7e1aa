"""CUDA graphs of steps with few tokens: everything from slots to sampled tokens in one launch.

    fill      numbers, slots ─► ids, positions, key lengths, tables, write positions
    model     ─► logits [rows, V]
    sample      ─► ids and faults [2, rows], tokens to their slots

A graph is recorded for a bucket: a number of rows and tokens, and room for attention splits. Its inputs have fixed addresses
(`graph_inputs.py`). This module decides which graph runs a step, and which are recorded.

Most buckets are for decode steps; the others are for steps with prompts, whose rows are ragged. Padding rows run token 0 on the
null page, and their results are not read: in ragged steps the first one takes all unused tokens, and the others are empty. If
rows need more than sampling (edits, logprobs), the graph samples for none of them, and the sampler continues from the logits.

A bucket without a graph borrows a larger one, or the step runs eagerly. A bucket that is needed often is recorded in a step;
that step is its first replay. Idle time is used to record buckets ahead. Recording takes as long as a few steps: ragged
buckets that can borrow at little cost are recorded in idle time only. `buckets.py` has the sizes and the order.
"""

import logging
import math
import sys
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from quire.attn.backend import FixedPlans, Room
from quire.attn.batch import Batch
from quire.config.memory import graph_bytes
from quire.device.base import Recorder, Recording
from quire.dist.stages import Stage
from quire.features.base import StepPart
from quire.models.decoder import Decoder
from quire.ops.rows import fill_rows
from quire.runner.buckets import (
    MAX_GRAPH_ROWS,
    MAX_GRAPH_TOKENS,
    MAX_PROMPT_SPLITS,
    MAX_TILES,
    Bucket,
    draft_buckets,
    drafter_buckets,
    idle_buckets,
    prompt_bucket,
    room_bucket,
    row_bucket,
    substitute,
)  # fmt: skip
from quire.runner.graph_inputs import Inputs, Planners, Work
from quire.runner.sampler.stage import Rows
from quire.runner.slots import Slots
from quire.runner.transfer import upload
from quire.types.plan import Ints, RowShapes, StepRows

logger = logging.getLogger(__name__)
EAGER_STEPS = 3  # eager steps of a bucket before it is recorded
BORROWED_REPLAYS = 200  # borrowed replays of a bucket before it is recorded
NOT_RECORDED = 1 << 62  # bytes that a rank reports if its recording failed
MAX_START_DRAFTS = 15  # drafts of one request, whose steps are recorded at the start


class FusedSampler(Protocol):
    """The part of a sampler that samples without edits."""

    def sample_fused(self, logits: Tensor, sampling_slot: Tensor, end: Tensor, tokens: Tensor) -> Tensor: ...

    @property
    def latest(self) -> Tensor: ...


class StepRecorder:
    """Record whole steps."""

    def __init__(
        self,
        model: Decoder,
        slots: Slots,
        sampler: FusedSampler,
        inputs: Inputs,
        recorder: Recorder,
        parts: Sequence[StepPart] = (),
    ) -> None:
        self._model, self._slots, self._sampler, self._inputs, self._recorder = model, slots, sampler, inputs, recorder
        self._parts = parts

    def record(self, bucket: Bucket) -> tuple[Recording | None, Tensor]:
        """Record the step, and replay it for its result [rows, V].

        Kernels that never ran may refuse to be recorded; then recording is repeated after an eager run. None: it failed
        again.
        """
        logits = None
        try:
            recorded = self._capture(bucket)
        except RuntimeError:
            logits = self._forward(bucket)
            try:
                recorded = self._capture(bucket)
            except RuntimeError as error:  # most likely out of memory
                logger.warning("recording of a CUDA graph for %s failed; no more graphs are recorded", bucket, exc_info=error)
                return None, logits
        logger.debug("recorded a CUDA graph for %s", bucket)
        return recorded, recorded.replay() if logits is None else logits

    def _capture(self, bucket: Bucket) -> Recording:
        return self._recorder.capture(partial(self._forward, bucket))

    def _forward(self, bucket: Bucket) -> Tensor:
        """Return logits [rows, V]; sampled tokens are in the slots and in the sampler's result.

        Each run has its own batch: what layers cache in a batch, such as sines of positions, would be missing in a recording
        that only reads it.
        """
        batch = self._fill(bucket)
        batch = self._inputs.keep_final(bucket, batch) if bucket.tokens else batch
        hidden = self._model(batch)
        for part in self._parts:
            part.keep_states(hidden, len(batch.ids))
        logits = self._model.logits(hidden, batch.final.tokens)
        _, end, _, sampling_slot = self._inputs.row_numbers(bucket)
        self._sampler.sample_fused(logits, sampling_slot, end, self._slots.tokens)
        return logits

    def _fill(self, bucket: Bucket) -> Batch:
        slots, inputs = self._slots, self._inputs
        batch = inputs.batch(bucket)
        slot, end, _, _ = inputs.row_numbers(bucket)
        filled = inputs.rows(bucket)
        fill_rows(slot, end, batch.row_starts, slots.tokens, slots.tables, slots.page_size, filled)
        return inputs.extend(bucket, batch)


@dataclass(frozen=True)
class StageBuffers:
    """The hidden states of a recorded pipeline stage: its input and its output."""

    entry: Tensor | None  # [T, H]; None: this stage embeds
    exit: Tensor  # [T, H]
    last: bool  # the output has only the rows' last tokens
    pooled: bool = False  # the output is pooled: no row draws

    @classmethod
    def to_pool(cls, columns: int, dtype: torch.dtype, device: torch.device) -> "StageBuffers":
        return cls(None, torch.zeros(MAX_GRAPH_TOKENS, columns, dtype=dtype, device=device), False, pooled=True)

    @classmethod
    def of(cls, stage: Stage, columns: int, dtype: torch.dtype, device: torch.device) -> "StageBuffers":
        places = [torch.zeros(MAX_GRAPH_TOKENS, columns, dtype=dtype, device=device) for _ in range(1 if stage.first else 2)]
        return cls(None if stage.first else places[1], places[0], stage.last)


class StageRecorder(StepRecorder):
    """Record the layers of a stage, or of a model that pools: hidden states from `entry`, or embedded ids, to `exit`."""

    def __init__(self, buffers: StageBuffers, *args: Any) -> None:
        super().__init__(*args)
        self._stage_buffers = buffers
        self._nothing = torch.zeros(1, device=buffers.exit.device)  # what a recording returns

    def _forward(self, bucket: Bucket) -> Tensor:
        buffers, batch = self._stage_buffers, self._fill(bucket)
        if buffers.last and bucket.tokens:
            batch = self._inputs.keep_final(bucket, batch)
        x = self._model.embed(batch) if buffers.entry is None else buffers.entry[: bucket.width]
        hidden = self._model.body(x, batch)
        buffers.exit[: len(hidden)].copy_(hidden)
        return self._nothing


def allowance(max_seqs: int, vocabulary: int, parts: Sequence[StepPart] = ()) -> int:
    """Return the bytes that all graphs together may take: logits (of several sizes, in two dtypes), activations, the graphs.

    Each combination of the parts' keys has graphs of its own.
    """
    return graph_bytes(max_seqs, vocabulary, math.prod(len(part.graph_keys) for part in parts))


def fixed_plans(model: Decoder, groups: int) -> Planners | None:
    """Return each cache group's attention planner and window; None: this model cannot be recorded."""
    found: dict[int, tuple[FixedPlans, int | None]] = {}
    for attention in model.attentions:
        fixed = None if attention.backend is None else attention.backend.fixed(attention.spec, attention.dtype)
        if fixed is None:
            return None
        found[attention.group] = fixed, attention.spec.window
    if not model.recordable or (groups and not found):
        return None
    some = next(iter(found.values()), None)  # for groups whose layers are all on other stages
    return [plans for group in range(groups) if (plans := found.get(group, some)) is not None]


def recordable(rows: StepRows, pools: bool) -> bool:
    """Return whether the rows need nothing but samples after their last tokens, or nothing but states if the model pools."""
    outputs = rows.outputs
    return not (rows.shapes.drafted or len(outputs.prompt_logprobs) or len(outputs.sample_after if pools else outputs.pool))


class ReplayedStep(NamedTuple):
    """A decode step. Until a row needs more attention work, the next one differs only in where its rows end."""

    slot: Ints
    shapes: RowShapes
    plain: bool
    changes: int  # of shared prefixes
    bucket: Bucket
    own: Bucket  # `bucket` may be a larger one
    work: Work

    def like(self, plan: StepRows, plain: bool, changes: int) -> bool:
        return self.slot is plan.slot and self.shapes is plan.shapes and self.plain == plain and self.changes == changes


@dataclass(frozen=True)
class PendingSample:
    """Logits of a graph for the sampler, valid until the next step."""

    logits: Tensor  # [N, V] float32 of the rows that sample, which the sampler may overwrite
    rows: Rows  # those rows


class Graphs:
    """CUDA graphs and their counts since the cache was allocated: `captures`, `replays`, and `eager` (small steps without a
    graph).
    """

    def __init__(
        self,
        model: Decoder,
        slots: Slots,
        sampler: FusedSampler,
        planners: Planners,
        recorder: Recorder,
        vocabulary: int,
        max_tokens: int,
        drafts: int = 0,
        parts: Sequence[StepPart] = (),
        buffers: StageBuffers | None = None,
        largest: Callable[[int], int] | None = None,
    ) -> None:
        """max_tokens: of a step, at most.
        drafts: rows that a slot may have in addition, one per draft token.
        largest: returns the largest of all ranks' values. Ranks whose graphs contain collectives must choose the same graphs.
        buffers: the hidden states of a pipeline stage or of a model that pools; None: steps draw.
        """
        self._keys: list[tuple[Hashable, ...]] = list(product(*(part.graph_keys for part in parts)))
        self._max_tokens = 0 if any(part.single_tokens for part in parts) else min(max_tokens, MAX_GRAPH_TOKENS)
        self._slots, self._sampler, self._planners = slots, sampler, planners
        self._drafts, rows = drafts, len(slots.tokens) * (1 + drafts)
        self._max_rows = min(rows, MAX_GRAPH_ROWS)
        self._allowance = allowance(rows, vocabulary, parts)
        self._taken = 0  # bytes
        self._uses: Counter[Bucket] = Counter()
        self._recorded: dict[Bucket, Recording] = {}
        self._inputs = Inputs(slots, planners, self._max_rows, parts)
        self._device, self._largest = recorder, largest
        recorded = model, slots, sampler, self._inputs, recorder, parts
        self._recorder = StepRecorder(*recorded) if buffers is None else StageRecorder(buffers, *recorded)
        self.states = buffers.exit if buffers is not None and buffers.pooled else None  # [T, H] of the latest step, to pool
        self._latest: ReplayedStep | None = None
        self.captures = self.replays = self.eager = 0

    def run(self, plan: StepRows, plain: bool, keys: tuple[Hashable, ...] = ()) -> Tensor | PendingSample | None:
        """Replay a step, or record it. None: run it eagerly.

        plain: the rows need nothing but sampling; then the result are ids and faults [2, >= R] int32 of all rows.
        keys: of the parts, in their order.
        """
        found = self._replay(plan, plain, keys)
        if found is None:
            return None
        bucket, logits = found
        if plain:
            return self._sampler.latest
        rows = self._inputs.sampler_rows(plan, bucket)
        if plan.shapes.all_sample:
            return PendingSample(logits[: len(plan.slot)], rows)
        sampling = np.flatnonzero(plan.sample)
        return PendingSample(logits[upload(sampling, self._slots.device)], rows.take(sampling))

    def replay_stage(self, plan: StepRows, enter: Callable[[], None], keys: tuple[Hashable, ...] = ()) -> bool:
        """Replay a pipeline stage, from the entry of the buffers, where `enter` writes hidden states, to its exit.

        False: run the step eagerly; `enter` was not called.
        """
        return self._replay(plan, False, keys, enter) is not None

    def _replay(
        self, plan: StepRows, plain: bool, keys: tuple[Hashable, ...], enter: Callable[[], None] | None = None
    ) -> tuple[Bucket, Tensor] | None:
        """Return the bucket that was run, and what its recording returns."""
        bucket = self._write(plan, plain, keys)
        if bucket is None:
            return None
        if enter is not None:
            enter()
        recorded = self._recorded.get(bucket)
        if recorded is None:
            logits = self._record(bucket)
        else:
            logits = recorded.replay()
            self.replays += 1
        return bucket, logits

    def _write(self, plan: StepRows, plain: bool, keys: tuple[Hashable, ...]) -> Bucket | None:
        """Write the inputs of the graph that runs this step. None: no graph does."""
        latest, tokens, unused = self._latest, plan.tokens, not any(keys)
        alike = latest is not None and unused and latest.like(plan, plain, self._slots.prefixes.changes)
        if alike and latest is not None and self._stays(latest) and self._inputs.write_again(plan, plain, latest.work):
            self._uses[latest.own] += latest.bucket != latest.own
            return latest.bucket
        self._latest = None
        if len(plan.slot) > self._max_rows or tokens > max(self._max_rows, self._max_tokens):
            return None
        chosen = self._choose(plan, tokens, keys)
        if chosen is None:
            self.eager += 1
            return None
        bucket, own, work = chosen
        self._inputs.write(plan, bucket, plain, work)
        if unused and not bucket.tokens and bucket in self._recorded:
            self._latest = ReplayedStep(plan.slot, plan.shapes, plain, self._slots.prefixes.changes, bucket, own, work)
        return bucket

    def _stays(self, latest: ReplayedStep) -> bool:
        """Return whether the borrowed graph is used again; False: the bucket's own graph is due."""
        return latest.bucket == latest.own or self._uses[latest.own] + 1 < BORROWED_REPLAYS

    def record_drafts(self) -> None:
        """Record before the first step: the time of the first steps decides whether drafts pay off."""
        self._record_all(draft_buckets(min(self._drafts, MAX_START_DRAFTS), self._max_rows) if self._drafts else [])

    def record_guesses(self) -> None:
        """Record the graphs of a draft model before the first step."""
        self._record_all(drafter_buckets(self._max_rows, self._max_tokens))

    def _record_all(self, buckets: list[Bucket]) -> None:
        for bucket in buckets:
            plain = bucket._replace(keys=self._keys[0])
            if plain not in self._recorded and self._taken < self._allowance:
                self._record_nothing(plain)

    def record_next(self) -> bool:
        """Record the most useful bucket that has no graph. Return False if there is none, or no memory."""
        usual = idle_buckets(self._max_rows, self._max_tokens)
        if self.states is not None:
            usual = [bucket for bucket in usual if bucket.tokens]  # prompts alone
        likely = [bucket for bucket, _ in self._uses.most_common()] + usual
        likely = [bucket._replace(keys=keys) for bucket in likely for keys in (bucket.keys or self._keys[0], *self._keys)]
        bucket = next((bucket for bucket in likely if bucket not in self._recorded), None)
        if bucket is None or self._taken >= self._allowance:
            return False
        self._record_nothing(bucket)
        return True

    def _record_nothing(self, bucket: Bucket) -> None:
        self._latest = None
        self._inputs.write_nothing(bucket)
        self._record(bucket)

    def _choose(self, plan: StepRows, tokens: int, keys: tuple[Hashable, ...]) -> tuple[Bucket, Bucket, Work] | None:
        """Return the bucket that runs or records this step, the step's own bucket, and each group's attention work."""
        found = self._cut(plan)
        if found is None:
            return None
        work, need = found
        own = self._bucket(need, len(plan.slot), tokens, keys)
        if own is None:
            return None
        if own in self._recorded:
            return own, own, work
        other = substitute(own, need, self._recorded)
        self._uses[own] += 1
        enough = EAGER_STEPS if other is None else sys.maxsize if own.tokens else BORROWED_REPLAYS
        due = self._uses[own] >= enough and self._taken < self._allowance
        chosen = own if due else other
        return None if chosen is None else (chosen, own, work)

    def _bucket(self, need: Room, rows: int, tokens: int, keys: tuple[Hashable, ...]) -> Bucket | None:
        if need.tiles:
            found = prompt_bucket(need, rows, tokens, self._max_rows)
            return None if found is None else found._replace(keys=keys)
        size = row_bucket(rows, self._max_rows)
        room = None if size is None else room_bucket(need, size)
        return None if size is None or room is None else Bucket(size, room, keys=keys)

    def _cut(self, plan: StepRows) -> tuple[Work, Room] | None:
        """Return each group's attention work, and the room it needs beyond one split per row; None: too much for any graph."""
        if not self._planners:  # an encoder finds its own tiles
            return Work([], []), Room(0, 0, 1)
        counts, lengths = plan.count, plan.end
        work, splits, shared, tiles = Work([], []), 0, 0, 0
        for group, (planner, window) in enumerate(self._planners):
            find = self._slots.prefixes.finder(group, plan.slot, plan.count, plan.end)
            cut = planner.cut(counts, lengths, window, find)
            if cut is None:
                return None
            work.splits.append(cut[0])
            splits, shared, tiles = max(splits, cut[1].splits), max(shared, cut[1].shared), max(tiles, cut[1].tiles)
            if cut[1].tiles:
                final = planner.cut(np.ones_like(counts), lengths, window, find)
                if final is None or final[1].splits - cut[1].splits > MAX_PROMPT_SPLITS:
                    return None
                work.final.append(final[0])
        return (work, Room(splits - len(lengths), shared, tiles)) if tiles <= MAX_TILES else None

    def _record(self, bucket: Bucket) -> Tensor:
        """Record the bucket. Return the logits [rows, V] of the step whose inputs are written."""
        before = self._device.taken_bytes()
        recorded, logits = self._recorder.record(bucket)
        taken = NOT_RECORDED if recorded is None else self._taken + self._device.taken_bytes() - before
        if self._largest is not None:
            taken = self._largest(taken)
        if recorded is None or taken == NOT_RECORDED:
            self._taken = self._allowance
            return logits
        self._recorded[bucket] = recorded
        self.captures += 1
        self._taken = taken
        return logits
