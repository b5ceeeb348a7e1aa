"""A plan and the slots become the ragged batch the model runs, and the rows the sampler draws for.

    rows        r0: 3 tokens at 0..2      r1: 1 token at 7       r2: 2 tokens at 4..5
    positions   [ 0  1  2 |  7 |  4  5 ]
    row_starts  [ 0          3    4       6 ]
    logit_index             2,   3             (r2 is a chunk: it ends before its last known token)

The token ids are read from the slots on the device, so a row can follow a draw whose value has not reached the host.
"""

import numpy as np
from torch import Tensor

from quire.attn.alike import FindAlike
from quire.attn.batch import Batch, GroupView
from quire.runner.sampler.stage import Rows
from quire.runner.slots import Slots, ragged_arange
from quire.runner.transfer import upload_together
from quire.types.plan import StepPlan


def build_batch(plan: StepPlan, slots: Slots) -> tuple[Batch, Rows]:
    slot, count, end = (array.astype(np.int64) for array in (plan.slot, plan.count, plan.end))
    row_starts = np.concatenate([[0], np.cumsum(count)])
    positions = ragged_arange(count) + np.repeat(end - count, count)
    drawing = np.flatnonzero(plan.sample)
    drawing_slot, drawing_end, prompt = slot[drawing], end[drawing], slots.prompt_length[slot[drawing]]
    arrays = [
        np.repeat(slot, count), positions, slot, row_starts, end,
        row_starts[1:][drawing] - 1, drawing_slot, drawing_end, prompt,
    ]  # fmt: skip
    token_slot, position, row_slot, starts, lengths, logit_index, *rest = upload_together(arrays, slots.device)
    width = -(-int(end.max()) // slots.page_size)
    host = plan.slot, plan.count, plan.end
    batch = Batch(
        ids=slots.tokens[token_slot, position].long(),
        positions=position,
        row_starts=starts.int(),
        kv_lengths=lengths.int(),
        rows=tuple(zip(row_starts.tolist(), count.tolist(), end.tolist(), strict=False)),
        logit_index=logit_index,
        groups=tuple(
            _view(table, row_slot, token_slot, position, width, slots.page_size, slots.prefixes.finder(group, *host))
            for group, table in enumerate(slots.tables)
        ),
    )
    rows = Rows(drawing_slot, drawing_end, prompt, slot=rest[0], end=rest[1], prompt=rest[2], tokens=slots.tokens)
    return batch, rows


def _view(
    table: Tensor, row_slot: Tensor, token_slot: Tensor, position: Tensor, width: int, page_size: int, alike: FindAlike
) -> GroupView:
    """table [S, P]: one group's pages."""
    page = position // page_size
    own = table[token_slot, page].long()
    return GroupView(table[row_slot, :width], own * page_size + (position - page * page_size), alike)
