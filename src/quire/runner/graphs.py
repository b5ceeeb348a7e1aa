"""CUDA graphs of the steps whose rows are all one token long: everything from slots to logits in one launch.

A graph is recorded for a bucket, so many rows with room for so much attention work, over inputs that stay where they are:

    numbers   [ slot, end, prompt of each row (int64) | attention plan of group 0 | group 1 ... ]     one copy a step
    fill      numbers, slots ─► ids, positions, key lengths, tables, places to write                  in the graph
    model     ─► logits [rows, V]                                                                     in the graph

Rows beyond the step's own run token 0 on the null page, and nobody reads what they give. A bucket runs eagerly until it has
been wanted a few times; then a step runs on the persistent inputs and is recorded behind its own launch. This file does not
know how tokens are drawn.
"""

import logging
from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.attn.backend import FixedPlans, Room
from quire.attn.batch import Batch, GroupView
from quire.models.decoder import Decoder
from quire.ops.rows import RowInputs, fill_rows
from quire.runner.sampler.stage import Rows
from quire.runner.slots import Slots
from quire.runner.transfer import Longs, upload
from quire.types.plan import Ints, StepPlan

logger = logging.getLogger(__name__)

MOST_ROWS = 512
ROW_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, *range(96, 257, 32), *range(320, MOST_ROWS + 1, 64))
LEAST_ROOM, MOST_ROOM = 64, 8192  # pieces of attention work
SHARED_BUCKETS = (0, 64, 256, 1024, 4096)  # pieces that several rows share
WANTED = 3  # times a bucket is asked for before it is recorded
ACTIVATION_BYTES = 512 << 20


@dataclass(frozen=True)
class Bucket:
    rows: int
    room: Room


def allowance(max_seqs: int, vocabulary: int) -> int:
    """Bytes all graphs together may take: logits (kept, and on their way in two types), activations, the graphs themselves."""
    return ACTIVATION_BYTES + 3 * 4 * min(max_seqs, MOST_ROWS) * vocabulary


def row_bucket(rows: int, max_seqs: int) -> int | None:
    """The least number of rows a graph is made for that takes these; None = there are too many."""
    return min((min(size, max_seqs) for size in ROW_BUCKETS if size >= rows), default=None)


def room_bucket(needs: list[Room], padding: int) -> Room | None:
    """The least room that is made for plans of these needs and so many rows more; None = there is none so large."""
    splits, shared = max(need.splits for need in needs) + padding, max(need.shared for need in needs)
    if splits > MOST_ROOM or shared > SHARED_BUCKETS[-1]:
        return None
    return Room(max(LEAST_ROOM, 1 << (splits - 1).bit_length()), min(size for size in SHARED_BUCKETS if size >= shared))


def fixed_plans(model: Decoder, groups: int) -> list[tuple[FixedPlans, int | None]] | None:
    """How each cache group's attention is planned, and its window; None = this model cannot be recorded."""
    found: dict[int, tuple[FixedPlans, int | None]] = {}
    for attention in model.attentions:
        fixed = None if attention.backend is None else attention.backend.fixed(attention.spec, attention.bound().dtype)
        if fixed is None:
            return None
        found[attention.group] = fixed, attention.spec.window
    return [found[group] for group in range(groups)] if model.recordable else None


class Graphs:
    """`captures` and `replays` count since the cache was allocated."""

    def __init__(self, model: Decoder, slots: Slots, planners: list[tuple[FixedPlans, int | None]], vocabulary: int) -> None:
        self._model, self._slots, self._planners, self._vocabulary = model, slots, planners, vocabulary
        self._max_rows = min(len(slots.tokens), MOST_ROWS)
        self._allowance = allowance(len(slots.tokens), vocabulary)
        self._taken = 0  # bytes
        self._wanted: Counter[Bucket] = Counter()
        self._graphs: dict[Bucket, torch.cuda.CUDAGraph] = {}
        self._inputs: Inputs | None = None
        self.captures = self.replays = 0

    def run(self, plan: StepPlan) -> tuple[Tensor, Rows] | None:
        """Logits [N, V] float32 of the rows that draw, good until the next step; None = this step is to be run eagerly."""
        cut = self._cut(plan)
        if cut is None:
            return None
        bucket, pieces = cut
        graph = self._graphs.get(bucket)
        if graph is None and not self._due(bucket):
            return None
        if self._inputs is None:
            before = torch.cuda.mem_get_info(self._slots.device)[0]
            self._inputs = Inputs(self._slots, self._planners, self._max_rows, self._vocabulary)
            self._taken += before - torch.cuda.mem_get_info(self._slots.device)[0]
        rows = self._inputs.write(plan, bucket, pieces)
        if graph is None:
            self._record(bucket, self._inputs)
        else:
            graph.replay()
            self.replays += 1
        logits = self._inputs.logits[: len(plan.slot)]
        if plan.sample.all():
            return logits, rows
        drawing = np.flatnonzero(plan.sample)
        return logits[upload(drawing, self._slots.device)], rows.take(drawing)

    def _cut(self, plan: StepPlan) -> tuple[Bucket, list[Any]] | None:
        """The bucket that takes these rows, and each group's attention work."""
        rows = None if (plan.count != 1).any() else row_bucket(len(plan.slot), self._max_rows)
        if rows is None:
            return None
        lengths = plan.end.astype(np.int32)
        pieces, needs = [], []
        for group, (planner, window) in enumerate(self._planners):
            find = self._slots.prefixes.finder(group, plan.slot, plan.count, plan.end)
            found = planner.cut(lengths, window, find)
            if found is None:
                return None
            pieces.append(found[0])
            needs.append(found[1])
        room = room_bucket(needs, rows - len(lengths))
        return None if room is None else (Bucket(rows, room), pieces)

    def _due(self, bucket: Bucket) -> bool:
        self._wanted[bucket] += 1
        return self._wanted[bucket] >= WANTED and self._taken < self._allowance

    def _record(self, bucket: Bucket, inputs: "Inputs") -> None:
        """Runs the step for its result, then records the same launches, which runs nothing."""
        before = torch.cuda.mem_get_info(self._slots.device)[0]
        run = partial(self._forward, inputs, bucket, inputs.batch(bucket))
        run()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(inputs.stream):
                graph.capture_begin(pool=inputs.pool, capture_error_mode="thread_local")
                try:
                    run()
                finally:
                    graph.capture_end()
        except RuntimeError as error:  # most likely there is no memory left
            logger.warning("no more CUDA graphs are recorded: the one for %s failed", bucket, exc_info=error)
            self._taken = self._allowance
            return
        self._graphs[bucket] = graph
        self.captures += 1
        self._taken += before - torch.cuda.mem_get_info(self._slots.device)[0]

    def _forward(self, inputs: "Inputs", bucket: Bucket, batch: Batch) -> None:
        slots = self._slots
        slot, end, _ = inputs.row_numbers(bucket)
        fill_rows(slot, end, slots.tokens, slots.tables, slots.page_size, inputs.rows(bucket))
        inputs.logits[: bucket.rows].copy_(self._model.logits(self._model(batch)))


class Inputs:
    """The memory that graphs read and write, shared by all of them: steps run one after the other."""

    def __init__(self, slots: Slots, planners: list[tuple[FixedPlans, int | None]], max_rows: int, vocabulary: int) -> None:
        device, groups = slots.device, len(planners)
        self._slots, self._planners = slots, planners
        size = 6 * max_rows + sum(planner.size(max_rows, Room(MOST_ROOM, SHARED_BUCKETS[-1])) for planner, _ in planners)
        width = -(-slots.tables.shape[2] // 4) * 4  # rows of tables begin at multiples of 16 bytes
        self._numbers = torch.zeros(size, dtype=torch.int32, device=device)
        self._starts = torch.arange(max_rows + 1, dtype=torch.int32, device=device)
        self._index = torch.arange(max_rows, device=device)
        self._rows = RowInputs(
            ids=torch.zeros(max_rows, dtype=torch.int64, device=device),
            positions=torch.zeros(max_rows, dtype=torch.int64, device=device),
            kv_lengths=torch.zeros(max_rows, dtype=torch.int32, device=device),
            tables=torch.zeros(groups, max_rows, width, dtype=torch.int32, device=device),
            write=torch.zeros(groups, max_rows, dtype=torch.int64, device=device),
        )
        self.logits = torch.zeros(max_rows, vocabulary, dtype=torch.float32, device=device)  # [max_rows, V]
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.pool = torch.cuda.graph_pool_handle()

    def write(self, plan: StepPlan, bucket: Bucket, pieces: list[Any]) -> Rows:
        """Sends a step's numbers to the device; -> all its rows, as the sampler sees them."""
        count = len(plan.slot)
        slot, end = plan.slot.astype(np.int64), plan.end.astype(np.int64)
        prompt = self._slots.prompt_length[slot]
        plans = [
            planner.numbers(cut, bucket.rows, bucket.room) for (planner, _), cut in zip(self._planners, pieces, strict=True)
        ]
        packed = torch.from_numpy(pack(slot, end, prompt, bucket, plans)).pin_memory()
        self._numbers[: len(packed)].copy_(packed, non_blocking=True)
        slot_there, end_there, prompt_there = (numbers[:count] for numbers in self.row_numbers(bucket))
        return Rows(slot, end, prompt, slot_there, end_there, prompt_there, self._slots.tokens)

    def row_numbers(self, bucket: Bucket) -> tuple[Tensor, ...]:
        """slot, end and prompt, each [rows] int64."""
        return self._numbers[: 6 * bucket.rows].view(torch.int64).view(3, bucket.rows).unbind()

    def rows(self, bucket: Bucket) -> RowInputs:
        n, rows = bucket.rows, self._rows
        return RowInputs(rows.ids[:n], rows.positions[:n], rows.kv_lengths[:n], rows.tables[:, :n], rows.write[:, :n])

    def batch(self, bucket: Bucket) -> Batch:
        """The batch of a bucket: its tensors are the persistent ones. The key lengths on the host are not those of any step."""
        rows, n = self.rows(bucket), bucket.rows
        batch = Batch(
            ids=rows.ids,
            positions=rows.positions,
            row_starts=self._starts[: n + 1],
            kv_lengths=rows.kv_lengths,
            rows=tuple((row, 1, 1) for row in range(n)),
            logit_index=self._index[:n],
            groups=tuple(GroupView(tables, write) for tables, write in zip(rows.tables, rows.write, strict=True)),
        )
        at = 6 * n
        for group, (planner, _) in enumerate(self._planners):
            size = planner.size(n, bucket.room)
            planner.attach(batch, group, self._numbers[at : at + size], n, bucket.room)
            at += size
        return batch


def pack(slot: Longs, end: Longs, prompt: Longs, bucket: Bucket, plans: list[Ints]) -> Ints:
    """slot, end, prompt [n] int64 of a step's rows -> its numbers, with rows of no slot up to the bucket's size."""
    numbers = np.zeros((3, bucket.rows), np.int64)
    numbers[:, len(slot) :] = [[-1], [1], [0]]
    numbers[:, : len(slot)] = slot, end, prompt
    return np.concatenate([numbers.view(np.int32).ravel(), *plans])
