"""min_p: tokens less likely than min_p times the most likely one are dropped."""

import numpy as np
import torch
from torch import Tensor

from quire.runner.sampler.extremes import drop_below
from quire.runner.sampler.stage import Column, Rows
from quire.types.plan import Admission


class MinP:
    def __init__(self, slots: int, device: torch.device) -> None:
        self._min_p = Column(slots, np.float32, 0.0, device)

    def admit(self, slot: int, admission: Admission) -> None:
        self._min_p[slot] = admission.params.min_p

    def retire(self, slot: int) -> None:
        self._min_p.reset(slot)

    def active(self, rows: Rows) -> bool:
        return bool(self._min_p.used(rows.slots).any())

    def apply(self, logits: Tensor, rows: Rows) -> Tensor:
        """p ≥ min_p · max p is, in logits, x ≥ max x + log min_p; log 0 = -inf keeps everything."""
        least = logits.amax(dim=1) + self._min_p.at(rows.slot).log()
        return drop_below(logits, least)
