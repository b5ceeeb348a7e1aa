"""Recurrent states behind drafts that were wrong: a state has no positions, so it is gone back from to one that was kept.

    row         [ newest  draft 1  draft 2  draft 3 ]        before it runs, its slot's state is kept
    next row    [ newest  draft 1 | t2 ... ]                 draft 2 was wrong: from what was kept, over what was right, and on

What is run again are tokens whose keys and values are in their pages: the same are written there. A row may begin so many
tokens earlier; where what was kept lies farther back, its tokens are run by themselves before the step, and kept anew.
"""

import numpy as np

from quire.runner.states import StateBuffers
from quire.runner.transfer import Longs
from quire.types.errors import EngineError
from quire.types.plan import Ints, Outputs, RowShapes, StepPlan, StepRows

FARTHEST = 8  # tokens that a row begins earlier at most
NOTHING = -1


class Rollback:
    """Where each slot's state stands, and where the one stands that was kept of it."""

    def __init__(self, slots: int, states: StateBuffers) -> None:
        self._states = states
        self._at: Longs = np.zeros(slots, np.int64)  # [slots] behind so many tokens
        self._kept: Longs = np.full(slots, NOTHING, np.int64)  # [slots]
        self._keep: Ints = np.empty(0, np.int32)  # slots whose states are to be kept before the step that was prepared runs

    def admit(self, plan: StepPlan) -> None:
        for admission in plan.admitted:
            self._at[admission.slot], self._kept[admission.slot] = admission.start, NOTHING

    def prepare(self, plan: StepPlan) -> tuple[StepRows | None, StepRows]:
        """-> what is to be run before it, without outputs, and what in its place. Behind the first comes `keep`."""
        slot, begin = plan.slot, plan.end.astype(np.int64) - plan.count
        ahead = self._at[slot] - begin
        back = np.flatnonzero(ahead)
        kept = self._kept[slot[back]]
        if (ahead < 0).any() or (kept == NOTHING).any() or (kept > begin[back]).any():
            raise EngineError("a recurrent state cannot go back to where a row begins")
        self._states.copy(self._states.beside(slot[back]), slot[back])
        far = back[begin[back] - kept > FARTHEST]
        near = np.setdiff1d(back, far)
        keeps = plan.drafts > 0
        keeps[near] = False
        self._keep = slot[keeps]
        self._kept[self._keep] = begin[keeps]
        self._at[slot] = plan.end
        by = np.zeros_like(plan.count)
        by[near] = begin[near] - self._kept[slot[near]]
        first = None
        if len(far):
            distance = (begin[far] - kept[np.searchsorted(back, far)]).astype(np.int32)
            first = _alone(plan, far, distance, begin[far].astype(np.int32))
        return first, _longer(plan, by) if len(near) else plan

    def keep(self) -> None:
        self._states.copy(self._keep, self._states.beside(self._keep))


def _alone(plan: StepPlan, rows: Longs, count: Ints, end: Ints) -> StepRows:
    return StepRows(plan.slot[rows], end, RowShapes(count, np.zeros_like(count), Outputs(count[:0])))


def _longer(plan: StepPlan, by: Ints) -> StepRows:
    """Rows begin so many tokens earlier."""
    behind, outputs = np.cumsum(by), plan.outputs
    moved = (tokens + behind[plan.shapes.rows_of(tokens)] for tokens in (outputs.draw, outputs.prompt_logprobs, outputs.pool))
    outputs = Outputs(*(tokens.astype(np.int32) for tokens in moved))
    return StepRows(plan.slot, plan.end, RowShapes(plan.count + by, plan.drafts, outputs))
