"""A row with drafts as rows of one token each, one behind the other.

    row        slot 3, [ newest  draft 1  draft 2 ] up to position 9
    unrolled   slot 3 up to 7      slot 3 up to 8      slot 3 up to 9

Where all keys of a layer are written before any are read, that is the same, and it is what decoding steps are made of: recorded
graphs of so many rows run it, each row is cut as it is without drafts, and rows of one slot read its pages together. Tokens and
draws are the same ones, in the same order.
"""

from dataclasses import replace

import numpy as np

from quire.types.plan import Ints, Outputs, StepPlan, spans


def unroll(plan: StepPlan) -> tuple[StepPlan, Ints]:
    """And the row of the plan that each of its rows is of. Rows with drafts have one token before them."""
    pieces = np.where(plan.drafts > 0, plan.count, 1)
    owner = np.repeat(np.arange(len(pieces), dtype=np.int32), pieces)
    behind = (pieces[owner] - 1) - spans(np.zeros_like(pieces), pieces)  # tokens of its row that come after a piece
    split = (plan.drafts > 0)[owner]
    count = np.where(split, 1, plan.count[owner]).astype(np.int32)
    outputs = replace(Outputs.last(count, plan.sample[owner].astype(np.int32)), prompt_logprobs=plan.outputs.prompt_logprobs)
    unrolled = replace(
        plan,
        slot=plan.slot[owner],
        count=count,
        drafts=np.zeros_like(count),
        end=np.where(split, plan.end[owner] - behind, plan.end[owner]).astype(np.int32),
        outputs=replace(outputs, pool=plan.outputs.pool),
        draft_token=plan.draft_token[:0],
    )
    return unrolled, owner
