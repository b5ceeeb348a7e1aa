"""min_p: tokens less likely than min_p times the most likely one are dropped."""

import numpy as np
from torch import Tensor

from quire.runner.sampler.extremes import drop_below
from quire.runner.sampler.stage import Columns, Rows
from quire.types.plan import Admission


class MinP:
    fields = ("min_p",)

    def __init__(self, columns: Columns) -> None:
        self.column = columns.make(np.float32, 0.0)

    def admit(self, slot: int, admission: Admission) -> None:
        self.column[slot] = admission.params.min_p

    def retire(self, slot: int) -> None:
        self.column.reset(slot)

    def active(self, rows: Rows) -> bool:
        return bool(self.column.used(rows.slots).any())

    def apply(self, logits: Tensor, rows: Rows) -> Tensor:
        """p ≥ min_p · max p is, in logits, x ≥ max x + log min_p; log 0 = -inf keeps everything."""
        least = logits.amax(dim=1) + self.column.at(rows.slot).log()
        return drop_below(logits, least)
