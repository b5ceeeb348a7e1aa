"""A row with drafts as rows of one token each, one behind the other.

    row        slot 3, [ newest  draft 1  draft 2 ] up to position 9
    unrolled   slot 3 up to 7      slot 3 up to 8      slot 3 up to 9

Where all keys of a layer are written before any are read, that is the same, and it is what decoding steps are made of: recorded
graphs of so many rows run it, each row is cut as it is without drafts, and rows of one slot read its pages together. Tokens and
draws are the same ones, in the same order.
"""

from dataclasses import replace

import numpy as np

from quire.types.plan import Ints, Outputs, StepPlan


def unroll(plan: StepPlan) -> tuple[StepPlan, Ints]:
    """And the row of the plan that each of its rows is of. The device waits for this, so that usual steps take few turns."""
    pieces = 1 + plan.drafts  # what is known, and each draft
    owner = np.arange(len(pieces), dtype=np.int32).repeat(pieces)
    behind = pieces.cumsum(dtype=np.int32)
    place = np.arange(len(owner), dtype=np.int32) - (behind - pieces)[owner]
    end = (plan.end - plan.drafts)[owner] + place
    if len(plan.outputs.draw) == plan.tokens:  # every row has one token and its drafts
        count, outputs = np.ones_like(owner), Outputs(np.arange(len(owner), dtype=np.int32))
    else:
        count = np.where(place == 0, (plan.count - plan.drafts)[owner], 1).astype(np.int32)
        outputs = Outputs.last(count, plan.sample[owner].astype(np.int32))
    if len(plan.outputs.prompt_logprobs) or len(plan.outputs.pool):
        outputs = replace(outputs, prompt_logprobs=plan.outputs.prompt_logprobs, pool=plan.outputs.pool)
    unrolled = replace(
        plan,
        slot=plan.slot[owner],
        count=count,
        drafts=np.zeros_like(count),
        end=end,
        outputs=outputs,
        draft_token=plan.draft_token[:0],
    )
    return unrolled, owner
