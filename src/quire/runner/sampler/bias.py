"""logit_bias: a number added to the logits of some ids."""

import numpy as np
import torch
from torch import Tensor

from quire.runner.sampler.stage import Lists, Rows
from quire.types.plan import Admission


class Bias:
    fields = ("logit_bias",)

    def __init__(self, device: torch.device) -> None:
        self._bias = Lists(device)

    def wants(self, admission: Admission) -> bool:
        return bool(admission.params.logit_bias)

    def admit(self, slot: int, admission: Admission) -> None:
        bias = admission.params.logit_bias
        if bias:
            self._bias.put(slot, np.array(list(bias.keys()), np.int64), np.array(list(bias.values()), np.float32))

    def retire(self, slot: int) -> None:
        self._bias.drop(slot)

    def active(self, rows: Rows) -> bool:
        return self._bias.holders(rows.slots).size > 0

    def apply(self, logits: Tensor, rows: Rows) -> Tensor:
        row, ids, values = self._bias.gather(rows.slots, self._bias.holders(rows.slots))
        logits[row, ids] += values
        return logits
