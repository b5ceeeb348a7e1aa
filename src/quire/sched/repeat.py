"""The latest step once more: its rows, each with as many drafts as it had, which end elsewhere by now.

Drafts of the host are made of the last step's tokens, so the device waits while the next one is planned, and most are like the
one before. It is what the rules of `scheduler` come to where nobody came or went and no row needs a page.
"""

import numpy as np

from quire.sched.draft.speculation import Speculation
from quire.sched.plan_builder import Scheduled
from quire.types.plan import StepPlan


def repeat(last: Scheduled, step: int, speculation: Speculation) -> Scheduled | None:
    """Of all requests that there are, to whom drafts were granted; their cursors move. None = it would not be the same."""
    plan, shapes, ends = last.plan, last.plan.shapes, list[int]()
    if speculation.ahead or plan.ahead or len(shapes.outputs.pool) or shapes.tokens != len(last.requests) + shapes.drafted:
        return None
    for request, (sample, drafts) in zip(last.requests, shapes.each, strict=True):
        end = request.computed + 1 + drafts
        able = sample and request.drew and request.known == 1 and not (request.loose or request.spec.params.needs_masks)
        if not able or speculation.granted.get(request, 0) != drafts or end > min(request.covered, request.limit - 1):
            return None
        ends.append(end)
    tokens: list[int] = []
    for request, end, (_, drafts) in zip(last.requests, ends, shapes.each, strict=True):
        request.computed, request.loose = end, drafts
        tokens += speculation.tokens(request, drafts)
    again = StepPlan(
        step=step,
        slot=plan.slot,
        end=np.array(ends, np.int32),
        shapes=shapes,
        draft_token=np.array(tokens, np.int32),
        guesses=plan.guesses,
    )
    return Scheduled(again, last.requests, last.odd)
