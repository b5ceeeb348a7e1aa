"""temperature: logits are divided by it. A slot at 0 is greedy and never comes here."""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.runner.sampler.stage import Column, Rows
from quire.runner.transfer import Longs
from quire.types.plan import Admission


class Temperature:
    def __init__(self, slots: int, device: torch.device) -> None:
        self._temperature = Column(slots, np.float32, 1.0, device)

    def admit(self, slot: int, admission: Admission) -> None:
        self._temperature[slot] = 0.0 if admission.params.greedy else admission.params.temperature

    def retire(self, slot: int) -> None:
        self._temperature.reset(slot)

    def random(self, slots: Longs) -> npt.NDArray[np.bool_]:
        """[N] which of these slots draw at random."""
        random: npt.NDArray[np.bool_] = self._temperature.host[slots] > 0
        return random

    def active(self, rows: Rows) -> bool:
        return bool(self._temperature.used(rows.slots).any())

    def apply(self, logits: Tensor, rows: Rows) -> Tensor:
        return logits.div_(self._temperature.at(rows.slot)[:, None])
