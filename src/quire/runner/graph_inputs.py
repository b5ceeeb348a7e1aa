"""The inputs of CUDA graphs, at fixed addresses.

numbers   [ slot, end, prompt, sampling_slot of each row (int64) | starts | attention plan of group 0 | ... ]
          ragged: ... | plan of group 0 for the rows' last tokens, which alone continue after the last attention | ... ]
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.attn.backend import FixedPlans, Room
from quire.attn.batch import Batch, GroupView, LogitTokens
from quire.attn.work_split import nothing_shared
from quire.features.base import StepPart
from quire.ops.arguments import RowInputs
from quire.runner.buckets import MAX_GRAPH_TOKENS, MAX_ROOM, Bucket, final_room
from quire.runner.sampler.stage import Rows
from quire.runner.slots import Slots
from quire.types.plan import Ints, Longs, StepRows

NUMBERS = 4  # int64 of each row
NO_SLOT = -1
PADDING = np.array([[NO_SLOT], [1], [0], [NO_SLOT]])  # slot, end, prompt and sampling_slot of padding rows
NOTHING: Ints = np.empty(0, np.int32)
Integers = npt.NDArray[np.integer]
Planners = list[tuple[FixedPlans, int | None]]


@dataclass(frozen=True)
class Work:
    """Attention work of each group, split by its planner."""

    splits: list[Any]
    final: list[Any]  # of the last token of each row, if rows have several


class Inputs:
    """The inputs, shared by all graphs: steps run one after the other."""

    def __init__(self, slots: Slots, planners: Planners, max_rows: int, parts: Sequence[StepPart] = ()) -> None:
        """parts: in the order of the buckets' `keys`."""
        device, groups = slots.device, max(1, len(planners))  # an encoder has none, but rows read one table
        self._slots, self._planners = slots, planners
        most = max_rows + 1  # ragged buckets have one more row, for unused tokens
        rooms = (MAX_ROOM, final_room(MAX_ROOM))
        size = number_size(most) + start_size(most) + sum(planner.size(most, room) for planner, _ in planners for room in rooms)
        tokens = max(most, MAX_GRAPH_TOKENS)
        width = -(-slots.tables.shape[2] // 4) * 4  # rows of tables begin at multiples of 16 bytes
        self._numbers = torch.zeros(size, dtype=torch.int32, device=device)
        self._packed: Ints = NOTHING  # the latest step's inputs, and views of it:
        self._row_numbers: Longs = np.empty((NUMBERS, 0), np.int64)  # [NUMBERS, rows]
        self._plans: list[Ints] = []  # each group's
        self._parts = parts
        for part in parts:
            part.allocate_inputs(slots, most)
        self._starts = torch.arange(most + 1, dtype=torch.int32, device=device)
        self._index = torch.arange(most, device=device)
        self._rows = RowInputs(
            ids=torch.zeros(tokens, dtype=torch.int64, device=device),
            positions=torch.zeros(tokens, dtype=torch.int64, device=device),
            kv_lengths=torch.zeros(most, dtype=torch.int32, device=device),
            tables=torch.zeros(groups, most, width, dtype=torch.int32, device=device),
            write=torch.zeros(groups, tokens, dtype=torch.int64, device=device),
        )

    def write(self, plan: StepRows, bucket: Bucket, plain: bool, work: Work) -> None:
        """Send a step's numbers to the device, with other pending updates."""
        for part in self._used(bucket):
            part.write_inputs(plan, bucket.rows)
        sampling_slot: Integers = plan.slot
        if not plain or not plan.shapes.all_sample:
            sampling_slot = np.where(plan.sample & plain, plan.slot, NO_SLOT)
        self._send((plan.slot, plan.end, self._slots.prompt_length[plan.slot], sampling_slot), plan.count, bucket, work)

    def write_again(self, plan: StepRows, plain: bool, work: Work) -> bool:
        """Send the latest decode step again with new ends. Return False if its attention work has changed."""
        for (planner, _), cut, numbers in zip(self._planners, work.splits, self._plans, strict=True):
            if not planner.renew(cut, plan.end, numbers):
                return False
        rows = len(plan.end)
        self._row_numbers[1, :rows] = plan.end
        if not plain:  # sampling does not read it
            self._row_numbers[2, :rows] = self._slots.prompt_length[plan.slot]
        self._deliver()
        return True

    def sampler_rows(self, plan: StepRows, bucket: Bucket) -> Rows:
        """Return all rows of the written step for the sampler."""
        slot, end = plan.slot.astype(np.int64), plan.end.astype(np.int64)
        slot_on_device, end_on_device, prompt_on_device, _ = (numbers[: len(slot)] for numbers in self.row_numbers(bucket))
        return Rows(
            slot, end, self._slots.prompt_length[slot], slot_on_device, end_on_device, prompt_on_device, self._slots.tokens
        )

    def write_nothing(self, bucket: Bucket) -> None:
        """Send a step without rows: all of the bucket's rows are padding."""
        for part in self._used(bucket):
            part.write_inputs(None, bucket.rows)
        splits = []
        for planner, window in self._planners:
            cut = planner.cut(NOTHING, NOTHING, window, nothing_shared)
            assert cut is not None
            splits.append(cut[0])
        self._send([NOTHING] * NUMBERS, NOTHING, bucket, Work(splits, splits))

    def _send(self, numbers: Sequence[Integers], counts: Ints, bucket: Bucket, work: Work) -> None:
        planners = [planner for planner, _ in self._planners]
        plans = [planner.numbers(cut, bucket.rows, bucket.room) for planner, cut in zip(planners, work.splits, strict=True)]
        if bucket.tokens:
            last, room = zip(planners, work.final, strict=True), final_room(bucket.room)
            plans = [row_starts(counts, bucket), *plans, *(planner.numbers(cut, bucket.rows, room) for planner, cut in last)]
        self._packed = np.empty(number_size(bucket.rows) + sum(len(plan) for plan in plans), np.int32)
        self._row_numbers, self._plans = pack(numbers, bucket, plans, self._packed)
        self._deliver()

    def _deliver(self) -> None:
        self._slots.updates.write(self._numbers, 0, self._packed)
        self._slots.updates.deliver()

    def _used(self, bucket: Bucket) -> list[StepPart]:
        return [part for part, key in zip(self._parts, bucket.keys, strict=True) if key] if bucket.keys else []

    def extend(self, bucket: Bucket, batch: Batch) -> Batch:
        """Return the batch of a bucket with the arrays of the parts that it uses. This is recorded."""
        for part in self._used(bucket):
            batch = part.extend_recorded(batch, bucket.rows)
        return batch

    def row_numbers(self, bucket: Bucket) -> tuple[Tensor, ...]:
        """Return slot, end, prompt and sampling_slot, each [rows] int64."""
        numbers = self._numbers[: number_size(bucket.rows)].view(torch.int64).view(NUMBERS, -1)
        return numbers[:, : bucket.rows].unbind()

    def rows(self, bucket: Bucket) -> RowInputs:
        n, t, rows = bucket.rows, bucket.width, self._rows
        return RowInputs(rows.ids[:t], rows.positions[:t], rows.kv_lengths[:n], rows.tables[:, :n], rows.write[:, :t])

    def batch(self, bucket: Bucket) -> Batch:
        """Return the batch of a bucket over the persistent tensors. Its host-side rows are placeholders."""
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
            entries=self.row_numbers(bucket)[0],
        )
        self._attach(batch, at, n, bucket.room)
        return batch

    def keep_final(self, bucket: Bucket, batch: Batch) -> Batch:
        """Return the batch of a bucket that keeps the last token of each row. This is recorded: their indices change from step
        to step. An empty row keeps the last token of all."""
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
        part = self.extend(bucket, part)
        before = sum(planner.size(n, bucket.room) for planner, _ in self._planners)
        self._attach(part, number_size(n) + start_size(n) + before, n, final_room(bucket.room))
        return replace(batch, logit_tokens=LogitTokens(index, part))

    def _attach(self, batch: Batch, at: int, rows: int, room: Room) -> None:
        """Attach the groups' attention plans, which follow each other in the inputs."""
        for group, (planner, _) in enumerate(self._planners):
            size = planner.size(rows, room)
            planner.attach(batch, group, self._numbers[at : at + size], rows, room)
            at += size


def _of_one_token(rows: int) -> tuple[tuple[int, int, int], ...]:
    return tuple((row, 1, 1) for row in range(rows))


def number_size(rows: int) -> int:
    """Return the int32 elements of the row inputs. Each array begins at a multiple of 16 bytes, or Triton would recompile."""
    return 2 * NUMBERS * (rows + rows % 2)


def start_size(rows: int) -> int:
    """Return the int32 elements of row starts, padded to 16 bytes."""
    return -(-(rows + 1) // 4) * 4


def row_starts(counts: Ints, bucket: Bucket) -> Ints:
    """Return [start_size(rows)] the first token of each row, and the end. Unused tokens belong to the first padding row."""
    out = np.full(start_size(bucket.rows), bucket.tokens, np.int32)
    out[0] = 0
    out[1 : len(counts) + 1] = np.cumsum(counts)
    return out


def pack(numbers: Sequence[Integers], bucket: Bucket, plans: list[Ints], out: Ints) -> tuple[Longs, list[Ints]]:
    """Write slot, end, prompt and sampling_slot [n] of a step's rows to `out`, padded to the bucket's size, and then the plans.

    Return the views of `out` with the rows [NUMBERS, rows], and with each plan.
    """
    at, count = number_size(bucket.rows), len(numbers[0])
    rows = out[:at].view(np.int64).reshape(NUMBERS, -1)
    if count < bucket.rows:
        rows[:, count : bucket.rows] = PADDING
    for i, given in enumerate(numbers):
        rows[i, :count] = given
    segments: list[Ints] = []
    for plan in plans:
        segments.append(out[at : at + len(plan)])
        segments[-1][:] = plan
        at += len(plan)
    return rows, segments
