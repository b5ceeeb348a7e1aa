"""min_tokens: the ids that would end generation are forbidden until enough tokens are out."""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.runner.sampler.stage import Lists, Rows
from quire.types.plan import Admission


class MinTokens:
    fields = ("min_tokens",)

    def __init__(self, slots: int, device: torch.device) -> None:
        self._least = np.zeros(slots, np.int64)  # [S]
        self._stops = Lists(device)

    def wants(self, admission: Admission) -> bool:
        return admission.params.min_tokens > 0 and bool(admission.stop_ids)

    def admit(self, slot: int, admission: Admission) -> None:
        if self.wants(admission):
            self._least[slot] = admission.params.min_tokens
            self._stops.put(slot, np.array(admission.stop_ids, np.int64))

    def retire(self, slot: int) -> None:
        self._least[slot] = 0
        self._stops.drop(slot)

    def active(self, rows: Rows) -> bool:
        return bool(self._short(rows).any())

    def apply(self, logits: Tensor, rows: Rows) -> Tensor:
        row, ids, _ = self._stops.gather(rows.slots, np.flatnonzero(self._short(rows)))
        logits[row, ids] = -torch.inf
        return logits

    def _short(self, rows: Rows) -> npt.NDArray[np.bool_]:
        short: npt.NDArray[np.bool_] = rows.outputs < self._least[rows.slots]
        return short
