"""allowed_token_ids: every other token is forbidden."""

import numpy as np
import torch
from torch import Tensor

from quire.runner.sampler.stage import Lists, Rows
from quire.runner.transfer import upload
from quire.types.plan import Admission


class Allowed:
    fields = ("allowed_token_ids",)

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._ids = Lists(device)

    def wants(self, admission: Admission) -> bool:
        return admission.params.allowed_token_ids is not None

    def admit(self, slot: int, admission: Admission) -> None:
        if admission.params.allowed_token_ids is not None:
            self._ids.put(slot, np.array(admission.params.allowed_token_ids, np.int64))

    def retire(self, slot: int) -> None:
        self._ids.drop(slot)

    def active(self, rows: Rows) -> bool:
        return self._ids.holders(rows.slots).size > 0

    def apply(self, logits: Tensor, rows: Rows) -> Tensor:
        holders = self._ids.holders(rows.slots)
        row, ids, _ = self._ids.gather(rows.slots, holders)
        kept = logits[row, ids]
        logits[upload(holders, self._device)] = -torch.inf
        logits[row, ids] = kept
        return logits
