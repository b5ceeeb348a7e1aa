"""Build the ragged batch that the model runs, and the rows that the sampler samples for, from a plan and the slots.

    rows        r0: 3 tokens at 0..2      r1: 1 token at 7       r2: 2 tokens at 4..5
    positions   [ 0  1  2 |  7 |  4  5 ]
    row_starts  [ 0          3    4       6 ]
    kept                2    3                 (r2 is a chunk: it ends before its last known token)

After the last attention a row keeps its tokens from the first one that an output needs: the last token if it samples, one more
for each draft, more for prompt logprobs. At least one token of the batch is kept.

Token ids are read from the slots on the device: a row can follow a sampled token whose value has not reached the host.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from quire.attn.batch import Batch, GroupView, with_final_tokens
from quire.features.base import StepPart
from quire.ops.arguments import RowInputs
from quire.ops.rows import fill_rows
from quire.runner.sampler.stage import Rows
from quire.runner.slots import Slots
from quire.runner.transfer import Longs, upload, upload_together
from quire.types.plan import Outputs, RowShapes, StepRows, spans

NO_TOKENS: Longs = np.empty(0, np.int64)


@dataclass(frozen=True)
class Built:
    batch: Batch
    rows: Rows  # the samples
    shift: Longs  # [R] index among kept tokens = index among all tokens + shift


def build_batch(
    plan: StepRows,
    slots: Slots,
    parts: Iterable[StepPart] = (),
    whole: bool = False,
) -> Built:
    """whole: all tokens are kept."""
    slot, count = plan.slot.astype(np.int64), plan.count.astype(np.int64)
    end = plan.end.astype(np.int64)
    row_starts = _starts(count)
    kept = count if whole else _count_kept(plan, row_starts)
    kept_starts = _starts(kept)
    all_kept = kept_starts[-1] == row_starts[-1]
    kept_index = NO_TOKENS if all_kept else spans(row_starts[1:] - kept, kept)
    after, row = plan.outputs.sample_after, plan.sample_row
    shift = kept_starts[1:] - row_starts[1:]
    sample_slot, sample_end = slot[row], end[row] - (row_starts[1:][row] - 1 - after)
    prompt = slots.prompt_length[sample_slot]
    starts_on_device, slot_on_device, end_on_device, kept_starts_on_device, kept_on_device, logit_index, *rest = (
        upload_together(
            [row_starts, slot, end, kept_starts, kept_index, after + shift[row], sample_slot, sample_end, prompt],
            slots.device,
        )
    )
    starts_on_device = starts_on_device.int()
    inputs = _blank(len(slot), int(row_starts[-1]), -(-int(end.max()) // slots.page_size), slots)
    slots.updates.deliver()
    fill_rows(slot_on_device, end_on_device, starts_on_device, slots.tokens, slots.tables, slots.page_size, inputs)
    batch = Batch(
        ids=inputs.ids,
        positions=inputs.positions,
        row_starts=starts_on_device,
        kv_lengths=inputs.kv_lengths,
        rows=tuple(zip(row_starts.tolist(), count.tolist(), end.tolist(), strict=False)),
        logit_index=logit_index,
        groups=tuple(
            GroupView(tables, write, slots.prefixes.finder(group, plan.slot, plan.count, plan.end))
            for group, (tables, write) in enumerate(zip(inputs.tables, inputs.write, strict=True))
        ),
    )
    for part in parts:
        batch = part.extend(batch, plan, slot_on_device)
    if not all_kept:
        batch = with_final_tokens(batch, kept, kept_starts_on_device.int(), kept_on_device)
    return Built(batch, Rows(sample_slot, sample_end, prompt, rest[0], rest[1], rest[2], slots.tokens), shift)


def samples_of(plan: StepRows, slots: Slots) -> Rows:
    """Return the samples of rows that sample after their last token, or not at all."""
    row = plan.sample_row
    slot, end = plan.slot[row].astype(np.int64), plan.end[row].astype(np.int64)
    prompt = slots.prompt_length[slot]
    slot_on_device, end_on_device, prompt_on_device = upload_together([slot, end, prompt], slots.device)
    return Rows(slot, end, prompt, slot_on_device, end_on_device, prompt_on_device, slots.tokens)


def samples_batch(plan: StepRows, slots: Slots, parts: Iterable[StepPart]) -> Batch:
    """Return a batch of the tokens that the rows of `plan` sample after, for logits alone."""
    row = plan.sample_row
    slot, none = upload(plan.slot[row].astype(np.int64), slots.device), torch.zeros(0, dtype=torch.int32, device=slots.device)
    batch = Batch(slot, slot, none, none, (), slot, ())
    one = np.ones(len(row), np.int32)
    rows = StepRows(plan.slot[row], plan.end[row], RowShapes(one, np.zeros_like(one), Outputs.last(one, one)))
    for part in parts:
        batch = part.extend(batch, rows, slot)
    return batch


def _starts(counts: Longs) -> Longs:
    """[3, 2] -> [0, 3, 5]."""
    starts = np.zeros(len(counts) + 1, np.int64)
    counts.cumsum(out=starts[1:])
    return starts


def _count_kept(plan: StepRows, row_starts: Longs) -> Longs:
    """Return [R] the number of last tokens that each row keeps."""
    outputs, kept = plan.outputs, np.zeros(len(plan.slot), np.int64)
    for tokens in (outputs.sample_after, outputs.prompt_logprobs, outputs.pool):
        if len(tokens):
            row = plan.shapes.rows_of(tokens)
            np.maximum.at(kept, row, row_starts[row + 1] - tokens)
    if not kept.any():
        kept[-1] = 1  # layers never get an empty batch
    return kept


def _blank(rows: int, tokens: int, width: int, slots: Slots) -> RowInputs:
    """Return memory for `rows` rows with `tokens` tokens in all, and tables of `width` pages."""
    groups, device = len(slots.tables), slots.device
    return RowInputs(
        ids=torch.empty(tokens, dtype=torch.int64, device=device),
        positions=torch.empty(tokens, dtype=torch.int64, device=device),
        kv_lengths=torch.empty(rows, dtype=torch.int32, device=device),
        tables=torch.zeros(groups, rows, width, dtype=torch.int32, device=device),
        write=torch.empty(groups, tokens, dtype=torch.int64, device=device),
    )
