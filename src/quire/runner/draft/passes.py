"""Rows for drafters with a cache, over the pages of one of the model's groups: of texts as the host knows them to be.

What they write behind the last known token is written again when that has come. Where a table has no page yet, they guess
worse, and nobody else notices.
"""

import numpy as np
import torch
from torch import Tensor

from quire.runner.batch import Built, build_batch
from quire.runner.slots import Slots
from quire.runner.transfer import upload_together
from quire.types.plan import Bools, Ints, Outputs, RowShapes, StepRows


class Passes:
    def __init__(self, slots: Slots, group: int) -> None:
        self.slots = slots.only(group)

    def fits(self, end: Ints) -> Bools:
        """Which rows may end there."""
        fits: Bools = end <= self.slots.length
        return fits

    def build(self, plan: StepRows, whole: bool = False) -> Built:
        return build_batch(plan, self.slots, whole=whole)

    def read(self, slot: Ints, place: Ints, count: int) -> Tensor:
        """[R, count] the tokens from there on."""
        return read_guesses(self.slots, slot, place, count)


def read_guesses(slots: Slots, slot: Ints, place: Ints, count: int) -> Tensor:
    """[R, count] the tokens of `slot` [R] from position `place` [R] on."""
    slot_there, first = upload_together([slot, place], slots.device)
    return slots.tokens[slot_there[:, None], first[:, None] + torch.arange(count, device=slots.device)]


def rows(slot: Ints, count: Ints | int, end: Ints, sample: Bools | bool = True) -> StepRows:
    """These, without drafts."""
    counts = np.broadcast_to(np.asarray(count, np.int32), slot.shape)
    draws = np.broadcast_to(np.asarray(sample), slot.shape).astype(np.int32)
    shapes = RowShapes(counts, np.zeros_like(counts), Outputs.last(counts, draws))
    return StepRows(slot.astype(np.int32), end.astype(np.int32), shapes)
