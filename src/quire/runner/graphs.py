"""CUDA graphs of steps with few tokens: everything from slots to drawn tokens in one launch.

A graph is recorded for a bucket, so many rows and tokens with room for so much attention work, over inputs that stay where
they are:

    numbers   [ slot, end, prompt, drawer of each row (int64) | starts | attention plan of group 0 | ... ]  by the mail
              ragged: ... | plan of group 0 for the rows' last tokens, which alone go on behind the last attention | ... ]
    fill      numbers, slots ─► ids, positions, key lengths, tables, places to write                        in the graph
    model     ─► logits [rows, V]                                                                           in the graph
    draw      ─► ids and faults [2, rows], tokens to their slots                                            in the graph

Most steps have rows of one token each, and so have most buckets; the others are for steps with prompts, which are ragged. Rows
beyond the step's own run token 0 on the null page, and nobody reads what they give: in ragged steps the first of them takes all
tokens that are left, and the others are empty. Where rows ask for more than a draw
(edits, logprobs), nobody is a drawer, and the sampler goes on from the logits.

A bucket without a graph borrows that of a somewhat larger one, or runs eagerly; one that is wanted often enough is recorded
within a step, which its first replay then is, and idle time is used to record buckets before anybody wants them. Recording
makes people wait for a few steps' time: ragged buckets that can borrow, at little cost, are left to idle time.
`buckets.py` has the sizes and the order.
"""

import logging
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.attn.alike import nothing_alike
from quire.attn.backend import FixedPlans, Room
from quire.attn.batch import Batch, GroupView, Kept
from quire.models.decoder import Decoder
from quire.ops.rows import RowInputs, fill_rows
from quire.runner.buckets import (
    MOST_PROMPT_SPLITS,
    MOST_ROOM,
    MOST_ROWS,
    MOST_TILES,
    MOST_TOKENS,
    Bucket,
    final_room,
    prompt_bucket,
    room_bucket,
    row_bucket,
    substitute,
    worth_having,
)  # fmt: skip
from quire.runner.sampler.pipeline import Sampler
from quire.runner.sampler.stage import Rows
from quire.runner.slots import Slots
from quire.runner.transfer import upload
from quire.types.plan import Ints, StepPlan

logger = logging.getLogger(__name__)

WANTED = 3  # steps that would have run eagerly before their bucket is recorded
MISSED = 200  # steps that borrowed before theirs is
ACTIVATION_BYTES = 512 << 20
NUMBERS = 4  # int64 of each row
NOBODY = -1
PADDING = np.array([[NOBODY], [1], [0], [NOBODY]])  # slot, end, prompt and drawer of rows beyond the step's own
NOTHING: Ints = np.empty(0, np.int32)
Integers = npt.NDArray[np.integer]
Planners = list[tuple[FixedPlans, int | None]]


def allowance(max_seqs: int, vocabulary: int) -> int:
    """Bytes all graphs together may take: logits (of several sizes, on their way in two types), activations, the graphs."""
    return ACTIVATION_BYTES + 3 * 4 * min(max_seqs, MOST_ROWS) * vocabulary


def fixed_plans(model: Decoder, groups: int) -> Planners | None:
    """How each cache group's attention is planned, and its window; None = this model cannot be recorded."""
    found: dict[int, tuple[FixedPlans, int | None]] = {}
    for attention in model.attentions:
        fixed = None if attention.backend is None else attention.backend.fixed(attention.spec, attention.bound().dtype)
        if fixed is None:
            return None
        found[attention.group] = fixed, attention.spec.window
    return [found[group] for group in range(groups)] if model.recordable else None


@dataclass(frozen=True)
class Undrawn:
    """What a graph left to the sampler; it is good until the next step."""

    logits: Tensor  # [N, V] float32 of the rows that draw, which the sampler may overwrite
    rows: Rows  # those rows


@dataclass(frozen=True)
class Recorded:
    graph: torch.cuda.CUDAGraph
    logits: Tensor  # [rows, V] float32


class Graphs:
    """`captures`, `replays` and `eager` (steps that were small enough, and yet no graph ran them) count since the cache was
    allocated."""

    def __init__(
        self, model: Decoder, slots: Slots, sampler: Sampler, planners: Planners, vocabulary: int, max_tokens: int
    ) -> None:
        """`max_tokens`: no step has more."""
        self._max_tokens = min(max_tokens, MOST_TOKENS)
        self._model, self._slots, self._sampler, self._planners = model, slots, sampler, planners
        self._max_rows = min(len(slots.tokens), MOST_ROWS)
        self._allowance = allowance(len(slots.tokens), vocabulary)
        self._taken = 0  # bytes
        self._wanted: Counter[Bucket] = Counter()
        self._recorded: dict[Bucket, Recorded] = {}
        self._inputs = Inputs(slots, planners, self._max_rows)
        self.captures = self.replays = self.eager = 0

    def run(self, plan: StepPlan, plain: bool) -> Tensor | Undrawn | None:
        """`plain`: a draw is all that the rows ask for; then -> ids and faults [2, >= R] int32 of all rows of the step.
        None = this step is to be run eagerly."""
        tokens = plan.tokens
        if len(plan.slot) > self._max_rows or tokens > max(self._max_rows, self._max_tokens):
            return None
        chosen = self._choose(plan, tokens)
        if chosen is None:
            self.eager += 1
            return None
        bucket, work = chosen
        self._inputs.write(plan, bucket, plain, work)
        recorded = self._recorded.get(bucket)
        if recorded is None:
            logits = self._record(bucket)
        else:
            recorded.graph.replay()
            self.replays += 1
            logits = recorded.logits
        if plain:
            return self._sampler.latest
        rows = self._inputs.sampler_rows(plan, bucket)
        if plan.sample.all():
            return Undrawn(logits[: len(plan.slot)], rows)
        drawing = np.flatnonzero(plan.sample)
        return Undrawn(logits[upload(drawing, self._slots.device)], rows.take(drawing))

    def record_next(self) -> bool:
        """Records the most useful bucket that has no graph, without any row; False = there is none, or no memory."""
        likely = [bucket for bucket, _ in self._wanted.most_common()] + worth_having(self._max_rows, self._max_tokens)
        bucket = next((bucket for bucket in likely if bucket not in self._recorded), None)
        if bucket is None or self._taken >= self._allowance:
            return False
        self._inputs.write_nothing(bucket)
        self._record(bucket)
        return True

    def _choose(self, plan: StepPlan, tokens: int) -> tuple[Bucket, "Work"] | None:
        """The bucket whose graph runs this step, or is to be recorded by it, and each group's attention work."""
        found = self._cut(plan)
        if found is None:
            return None
        work, need = found
        own = self._bucket(need, len(plan.slot), tokens)
        if own is None:
            return None
        if own in self._recorded:
            return own, work
        other = substitute(own, need, self._recorded)
        self._wanted[own] += 1
        enough = WANTED if other is None else sys.maxsize if own.tokens else MISSED
        due = self._wanted[own] >= enough and self._taken < self._allowance
        chosen = own if due else other
        return None if chosen is None else (chosen, work)

    def _bucket(self, need: Room, rows: int, tokens: int) -> Bucket | None:
        if need.tiles:
            return prompt_bucket(need, rows, tokens, self._max_rows)
        size = row_bucket(rows, self._max_rows)
        room = None if size is None else room_bucket(need, size)
        return None if size is None or room is None else Bucket(size, room)

    def _cut(self, plan: StepPlan) -> "tuple[Work, Room] | None":
        """Each group's attention work, and the most of it beyond one split a row; None = it is too much for any graph."""
        counts, lengths = plan.count, plan.end
        work, splits, shared, tiles = Work([], []), 0, 0, 0
        for group, (planner, window) in enumerate(self._planners):
            find = self._slots.prefixes.finder(group, plan.slot, plan.count, plan.end)
            cut = planner.cut(counts, lengths, window, find)
            if cut is None:
                return None
            work.pieces.append(cut[0])
            splits, shared, tiles = max(splits, cut[1].splits), max(shared, cut[1].shared), max(tiles, cut[1].tiles)
            if cut[1].tiles:
                final = planner.cut(np.ones_like(counts), lengths, window, find)
                if final is None or final[1].splits - cut[1].splits > MOST_PROMPT_SPLITS:
                    return None
                work.final.append(final[0])
        return (work, Room(splits - len(lengths), shared, tiles)) if tiles <= MOST_TILES else None

    def _record(self, bucket: Bucket) -> Tensor:
        """Records the step, which runs nothing, and replays it for its result. What was never run may refuse to be recorded, so
        that it is tried again after a run."""
        before = torch.cuda.mem_get_info(self._slots.device)[0]
        batch, logits = self._inputs.batch(bucket), None
        try:
            recorded = self._capture(bucket, batch)
        except RuntimeError:
            logits = self._forward(bucket, batch)
            try:
                recorded = self._capture(bucket, batch)
            except RuntimeError as error:  # most likely there is no memory left
                logger.warning("no more CUDA graphs are recorded: the one for %s failed", bucket, exc_info=error)
                self._taken = self._allowance
                return logits
        self._recorded[bucket] = recorded
        self.captures += 1
        logger.debug("recorded a CUDA graph for %s", bucket)
        self._taken += before - torch.cuda.mem_get_info(self._slots.device)[0]
        if logits is None:
            recorded.graph.replay()
            logits = recorded.logits
        return logits

    def _capture(self, bucket: Bucket, batch: Batch) -> Recorded:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._inputs.stream):
            graph.capture_begin(pool=self._inputs.pool, capture_error_mode="thread_local")
            try:
                place = Place(self._forward(bucket, batch))
            finally:
                graph.capture_end()
        return Recorded(graph, torch.as_tensor(place, device=self._slots.device))

    def _forward(self, bucket: Bucket, batch: Batch) -> Tensor:
        """-> logits [rows, V]; what was drawn is in the slots and in the sampler's result."""
        slots, inputs = self._slots, self._inputs
        slot, end, _, drawer = inputs.row_numbers(bucket)
        filled = inputs.rows(bucket)
        fill_rows(slot, end, batch.row_starts, slots.position, slots.tokens, slots.tables, slots.page_size, filled)
        logits = self._model.logits(self._model(inputs.keep_final(bucket, batch) if bucket.tokens else batch))
        self._sampler.draw(logits, drawer, end, slots.tokens)
        return logits


@dataclass(frozen=True)
class Work:
    """Attention work, cut by each group's planner."""

    pieces: list[Any]
    final: list[Any]  # of the last token of each row, where rows have several


class Place:
    """Where a recorded step leaves a tensor. It belongs to the pool that all graphs share, and is not held: the next graph may
    be recorded over the same memory, because what one step leaves there is used before the next step runs."""

    def __init__(self, tensor: Tensor) -> None:
        assert tensor.dtype == torch.float32 and tensor.is_contiguous()
        shape, data = tuple(tensor.shape), (tensor.data_ptr(), False)
        self.__cuda_array_interface__ = {"shape": shape, "typestr": "<f4", "data": data, "version": 2}


class Inputs:
    """The memory that graphs read, shared by all of them: steps run one after the other."""

    def __init__(self, slots: Slots, planners: Planners, max_rows: int) -> None:
        device, groups = slots.device, len(planners)
        self._slots, self._planners = slots, planners
        most = max_rows + 1  # rows of prompts have one more, for what is left
        rooms = (MOST_ROOM, final_room(MOST_ROOM))
        size = number_size(most) + start_size(most) + sum(planner.size(most, room) for planner, _ in planners for room in rooms)
        tokens = max(most, MOST_TOKENS)
        width = -(-slots.tables.shape[2] // 4) * 4  # rows of tables begin at multiples of 16 bytes
        self._numbers = torch.zeros(size, dtype=torch.int32, device=device)
        self._starts = torch.arange(most + 1, dtype=torch.int32, device=device)
        self._index = torch.arange(most, device=device)
        self._rows = RowInputs(
            ids=torch.zeros(tokens, dtype=torch.int64, device=device),
            positions=torch.zeros(tokens, dtype=torch.int64, device=device),
            kv_lengths=torch.zeros(most, dtype=torch.int32, device=device),
            tables=torch.zeros(groups, most, width, dtype=torch.int32, device=device),
            write=torch.zeros(groups, tokens, dtype=torch.int64, device=device),
        )
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.pool = torch.cuda.graph_pool_handle()

    def write(self, plan: StepPlan, bucket: Bucket, plain: bool, work: Work) -> None:
        """Sends a step's numbers to the device, with what else is on its way."""
        drawer = np.where(plan.sample, plan.slot, NOBODY) if plain else np.full(len(plan.slot), NOBODY)
        self._send((plan.slot, plan.end, self._slots.prompt_length[plan.slot], drawer), plan.count, bucket, work)

    def sampler_rows(self, plan: StepPlan, bucket: Bucket) -> Rows:
        """All rows of the step that was written, as the sampler sees them."""
        slot, end = plan.slot.astype(np.int64), plan.end.astype(np.int64)
        slot_there, end_there, prompt_there, _ = (numbers[: len(slot)] for numbers in self.row_numbers(bucket))
        return Rows(slot, end, self._slots.prompt_length[slot], slot_there, end_there, prompt_there, self._slots.tokens)

    def write_nothing(self, bucket: Bucket) -> None:
        """A step without rows: all of the bucket's are padding."""
        pieces = []
        for planner, window in self._planners:
            cut = planner.cut(NOTHING, NOTHING, window, nothing_alike)
            assert cut is not None
            pieces.append(cut[0])
        self._send([NOTHING] * NUMBERS, NOTHING, bucket, Work(pieces, pieces))

    def _send(self, numbers: Sequence[Integers], counts: Ints, bucket: Bucket, work: Work) -> None:
        planners = [planner for planner, _ in self._planners]
        plans = [planner.numbers(cut, bucket.rows, bucket.room) for planner, cut in zip(planners, work.pieces, strict=True)]
        if bucket.tokens:
            last, room = zip(planners, work.final, strict=True), final_room(bucket.room)
            plans = [row_starts(counts, bucket), *plans, *(planner.numbers(cut, bucket.rows, room) for planner, cut in last)]
        packed = np.empty(number_size(bucket.rows) + sum(len(plan) for plan in plans), np.int32)
        pack(numbers, bucket, plans, packed)
        self._slots.mail.write(self._numbers, 0, packed)
        self._slots.mail.deliver()

    def row_numbers(self, bucket: Bucket) -> tuple[Tensor, ...]:
        """slot, end, prompt and drawer, each [rows] int64."""
        numbers = self._numbers[: number_size(bucket.rows)].view(torch.int64).view(NUMBERS, -1)
        return numbers[:, : bucket.rows].unbind()

    def rows(self, bucket: Bucket) -> RowInputs:
        n, t, rows = bucket.rows, bucket.width, self._rows
        return RowInputs(rows.ids[:t], rows.positions[:t], rows.kv_lengths[:n], rows.tables[:, :n], rows.write[:, :t])

    def batch(self, bucket: Bucket) -> Batch:
        """The batch of a bucket: its tensors are the persistent ones. The rows the host knows are not those of any step."""
        rows, n, at = self.rows(bucket), bucket.rows, number_size(bucket.rows)
        starts = self._starts[: n + 1]
        if bucket.tokens:
            starts = self._numbers[at : at + n + 1]
            at += start_size(n)
        batch = Batch(
            ids=rows.ids,
            positions=rows.positions,
            row_starts=starts,
            kv_lengths=rows.kv_lengths,
            rows=() if bucket.tokens else _of_one_token(n),
            logit_index=self._index[:n],
            groups=tuple(GroupView(tables, write) for tables, write in zip(rows.tables, rows.write, strict=True)),
        )
        self._attach(batch, at, n, bucket.room)
        return batch

    def keep_final(self, bucket: Bucket, batch: Batch) -> Batch:
        """The batch of a bucket, of which the last token of each row is kept. Where those are changes from step to step, so
        this is recorded; a row without any keeps the last of all."""
        n = bucket.rows
        index = batch.row_starts[1:].long() - 1
        part = replace(
            batch,
            ids=batch.ids[index],
            positions=batch.positions[index],
            row_starts=self._starts[: n + 1],
            rows=_of_one_token(n),
            groups=tuple(GroupView(view.tables, view.write[index]) for view in batch.groups),
            plans={},
        )
        before = sum(planner.size(n, bucket.room) for planner, _ in self._planners)
        self._attach(part, number_size(n) + start_size(n) + before, n, final_room(bucket.room))
        return replace(batch, kept=Kept(index, part))

    def _attach(self, batch: Batch, at: int, rows: int, room: Room) -> None:
        """The groups' plans stand one after the other among the numbers."""
        for group, (planner, _) in enumerate(self._planners):
            size = planner.size(rows, room)
            planner.attach(batch, group, self._numbers[at : at + size], rows, room)
            at += size


def _of_one_token(rows: int) -> tuple[tuple[int, int, int], ...]:
    return tuple((row, 1, 1) for row in range(rows))


def number_size(rows: int) -> int:
    """In int32. Each of the numbers begins at a multiple of 16 bytes: kernels are compiled anew for pointers that do not."""
    return 2 * NUMBERS * (rows + rows % 2)


def start_size(rows: int) -> int:
    """In int32, up to a multiple of 16 bytes."""
    return -(-(rows + 1) // 4) * 4


def row_starts(counts: Ints, bucket: Bucket) -> Ints:
    """[start_size(rows)] where each row begins among the bucket's tokens, and all end: what is left belongs to the row after
    the step's own."""
    out = np.full(start_size(bucket.rows), bucket.tokens, np.int32)
    out[0] = 0
    out[1 : len(counts) + 1] = np.cumsum(counts)
    return out


def pack(numbers: Sequence[Integers], bucket: Bucket, plans: list[Ints], out: Ints) -> None:
    """slot, end, prompt, drawer [n] of a step's rows -> its numbers, with rows of no slot up to the bucket's size."""
    at = number_size(bucket.rows)
    rows = out[:at].view(np.int64).reshape(NUMBERS, -1)[:, : bucket.rows]
    rows[:] = PADDING
    for part, given in zip(rows, numbers, strict=True):
        part[: len(given)] = given
    for plan in plans:
        out[at : at + len(plan)] = plan
        at += len(plan)
