"""A plan and the slots become the ragged batch the model runs, and the rows the sampler draws for.

    rows        r0: 3 tokens at 0..2      r1: 1 token at 7       r2: 2 tokens at 4..5
    positions   [ 0  1  2 |  7 |  4  5 ]
    row_starts  [ 0          3    4       6 ]
    kept                2    3                 (r2 is a chunk: it ends before its last known token)

A row keeps its last token if it draws, all tokens if their logprobs are reported, none otherwise; but some token is kept.

The token ids are read from the slots on the device, so a row can follow a draw whose value has not reached the host.
"""

import numpy as np
import torch

from quire.attn.batch import Batch, GroupView, keep_last
from quire.ops.rows import RowInputs, fill_rows
from quire.runner.sampler.logprobs import NO_ROWS
from quire.runner.sampler.stage import Rows
from quire.runner.slots import Slots, ragged_arange
from quire.runner.transfer import Longs, upload_together
from quire.types.plan import StepPlan


def build_batch(plan: StepPlan, slots: Slots, reporting: Longs = NO_ROWS) -> tuple[Batch, Rows]:
    """`reporting` [n]: the rows whose every hidden state is wanted."""
    slot, count, end = (array.astype(np.int64) for array in (plan.slot, plan.count, plan.end))
    row_starts = _starts(count)
    drawing = np.flatnonzero(plan.sample)
    kept = _count_kept(plan, count, reporting)
    kept_starts = _starts(kept)
    all_kept = kept_starts[-1] == row_starts[-1]
    kept_index = NO_ROWS if all_kept else ragged_arange(kept) + np.repeat(row_starts[1:] - kept, kept)
    drawing_slot, drawing_end, prompt = slot[drawing], end[drawing], slots.prompt_length[slot[drawing]]
    starts_there, slot_there, end_there, kept_starts_there, kept_there, logit_index, *rest = upload_together(
        [row_starts, slot, end, kept_starts, kept_index, kept_starts[1:][drawing] - 1, drawing_slot, drawing_end, prompt],
        slots.device,
    )
    starts_there = starts_there.int()
    inputs = _blank(len(slot), int(row_starts[-1]), -(-int(end.max()) // slots.page_size), slots)
    slots.mail.deliver()
    fill_rows(slot_there, end_there, starts_there, slots.tokens, slots.tables, slots.page_size, inputs)
    batch = Batch(
        ids=inputs.ids,
        positions=inputs.positions,
        row_starts=starts_there,
        kv_lengths=inputs.kv_lengths,
        rows=tuple(zip(row_starts.tolist(), count.tolist(), end.tolist(), strict=False)),
        logit_index=logit_index,
        groups=tuple(
            GroupView(tables, write, slots.prefixes.finder(group, plan.slot, plan.count, plan.end))
            for group, (tables, write) in enumerate(zip(inputs.tables, inputs.write, strict=True))
        ),
    )
    if not all_kept:
        batch = keep_last(batch, kept, kept_starts_there.int(), kept_there)
    rows = Rows(drawing_slot, drawing_end, prompt, slot=rest[0], end=rest[1], prompt=rest[2], tokens=slots.tokens)
    return batch, rows


def _starts(counts: Longs) -> Longs:
    """[3, 2] -> [0, 3, 5]."""
    starts = np.zeros(len(counts) + 1, np.int64)
    counts.cumsum(out=starts[1:])
    return starts


def _count_kept(plan: StepPlan, count: Longs, reporting: Longs) -> Longs:
    """[R] how many of its last tokens each row keeps."""
    kept = plan.sample.astype(np.int64)
    kept[reporting] = count[reporting]
    if not kept.any():
        kept[-1] = 1  # layers need not know what it is to have no token at all
    return kept


def _blank(rows: int, tokens: int, width: int, slots: Slots) -> RowInputs:
    """Memory for `rows` rows of `tokens` tokens in all, whose tables are `width` pages wide."""
    groups, device = len(slots.tables), slots.device
    return RowInputs(
        ids=torch.empty(tokens, dtype=torch.int64, device=device),
        positions=torch.empty(tokens, dtype=torch.int64, device=device),
        kv_lengths=torch.empty(rows, dtype=torch.int32, device=device),
        tables=torch.zeros(groups, rows, width, dtype=torch.int32, device=device),
        write=torch.empty(groups, tokens, dtype=torch.int64, device=device),
    )
