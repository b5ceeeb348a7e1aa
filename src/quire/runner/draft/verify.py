"""Behind a draw: which drafts were right, where the slots stand, and the next drafts.

    row       [ newest  draft 1  draft 2  draft 3 ]          what was run
    drawn        t1       t2       t3       t4               behind each of them
    accepted     t1       t2       t3                        where draft 1 = t1, draft 2 = t2, draft 3 is not t3

Where steps are planned ahead of the draws, drafts are compared on the device. Otherwise the host compares them, which knows
where the slots stand.

Every draw is what it would be without drafts: with the same logits, parameters and random numbers, and the drafts before it as
its history. A draft that is not drawn only ends the row's tokens.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from quire.attn.batch import Batch
from quire.ops.arguments import GOOD
from quire.runner.draft.base import NO_DRAFT, Drafter
from quire.runner.sampler.pipeline import Drawn
from quire.runner.sampler.stage import Rows
from quire.runner.slots import Slots
from quire.runner.transfer import Longs, upload_together
from quire.types.plan import Ints, StepPlan, StepRows


@dataclass(frozen=True)
class Verification:
    rows: Rows  # the draws
    first: Tensor  # [R] int64 of each row that draws, its first draw
    drafts: Tensor  # [N] int64 the draft behind each draw, or NO_DRAFT
    hidden: Tensor  # [N, H] what the draws are from
    token: Tensor  # [N] int64 behind which of the step's tokens they are

    def follow(self, drawn: Drawn, slots: Slots, drafter: Drafter) -> Drawn:
        """Moves the slots on, and has their next tokens guessed."""
        lengths = accept(drawn.result[:, : len(self.drafts)], self.first, self.drafts)
        slot, newest = self.rows.slot[self.first], self.rows.end[self.first] + lengths - 1
        slots.position[slot] = newest
        last = self.first + lengths - 1
        guesses = drafter.propose(slot, newest + 1, slots.tokens, self.hidden[last], self.token[last]).int()
        places = newest[:, None] + 1 + torch.arange(drafter.most, device=newest.device)
        slots.tokens[slot[:, None], places] = guesses
        return replace(drawn, lengths=lengths, guesses=guesses)


def prepare(plan: StepRows, slots: Slots, batch: Batch, rows: Rows, hidden: Tensor) -> Verification:
    """hidden [N, H] of the draws. To be called when the step's inputs are in place; slots that do not draw move on."""
    draw, row = plan.outputs.draw, plan.draw_row
    first = np.flatnonzero(np.diff(row, prepend=-1))
    behind = np.append(np.diff(row) == 0, False)[: len(row)]
    chunks = np.flatnonzero(~plan.sample & slots.loose[plan.slot])
    first_there, draft_there, passing, by, token = upload_together(
        [first, np.where(behind, draw + 1, NO_DRAFT), plan.slot[chunks], plan.count[chunks], draw], slots.device
    )
    slots.position[passing] += by
    drafts = torch.where(draft_there == NO_DRAFT, NO_DRAFT, batch.ids[draft_there])
    return Verification(rows, first_there, drafts, hidden, token)


def accept_told(plan: StepPlan, ids: Ints, fault: Ints, told: Ints) -> Longs:
    """As `accept`, on the host, where the drafts are known: ids and fault [N] of its draws, told [sum of drafts]. The device
    waits for this: there are few, and lists are quicker then."""
    drawn, faults, expected = ids.tolist(), fault.tolist(), told.tolist()
    lengths, at, draft = list[int](), 0, 0
    for sample, drafts in plan.shapes.each:
        if not sample:
            continue
        right = 0
        for guess in expected[draft : draft + drafts]:
            if drawn[at + right] != guess or faults[at + right] != GOOD:
                break
            right += 1
        lengths.append(1 + right)
        at += 1 + drafts
        draft += drafts
    return np.array(lengths, np.int64)


def accept(result: Tensor, first: Tensor, drafts: Tensor) -> Tensor:
    """result [2, N] ids and faults of the draws, first [R] of each row, drafts [N] -> [R] int64 how many of its draws a row
    takes: those up to the first whose draft is another, or that went wrong."""
    ending = (result[0] != drafts) | (result[1] != GOOD)
    place = torch.arange(len(drafts), device=drafts.device)
    nearest = torch.where(ending, place, len(drafts)).flip(0).cummin(0).values.flip(0)  # [N] at or behind each draw
    return nearest[first] - first + 1
