"""Plan a step like the last one, without planning anew: most steps with drafts."""

import numpy as np

from quire.sched.draft.speculation import Speculation
from quire.sched.plan_builder import Scheduled
from quire.types.plan import StepPlan


def steady_decode(last: Scheduled, step: int, speculation: Speculation) -> Scheduled | None:
    """Return the last step again, with all requests and new drafts, and move the cursors; None if planning would differ."""
    plan, shapes, ends = last.plan, last.plan.shapes, list[int]()
    if (
        speculation.next_drafts
        or plan.next_drafts
        or len(shapes.outputs.pool)
        or shapes.tokens != len(last.requests) + shapes.drafted
    ):
        return None
    for request, (sample, drafts) in zip(last.requests, shapes.each, strict=True):
        end = request.computed + 1 + drafts
        able = sample and request.sampled and request.known == 1 and not (request.unverified or request.spec.params.needs_masks)
        if not able or speculation.granted.get(request, 0) != drafts or end > min(request.covered, request.limit - 1):
            return None
        ends.append(end)
    tokens: list[int] = []
    for request, end, (_, drafts) in zip(last.requests, ends, shapes.each, strict=True):
        request.computed, request.unverified = end, drafts
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
