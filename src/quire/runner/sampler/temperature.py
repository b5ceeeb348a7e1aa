"""temperature: logits are divided by it. A slot at 0 is greedy and never comes here."""

import numpy as np
import numpy.typing as npt
from torch import Tensor

from quire.runner.sampler.stage import Columns, Rows
from quire.runner.transfer import Longs
from quire.types.plan import Admission


class Temperature:
    fields = ("temperature",)

    def __init__(self, columns: Columns) -> None:
        self.column = columns.make(np.float32, 1.0)

    def admit(self, slot: int, admission: Admission) -> None:
        self.column[slot] = 0.0 if admission.params.greedy else admission.params.temperature

    def retire(self, slot: int) -> None:
        self.column.reset(slot)

    def random(self, slots: Longs) -> npt.NDArray[np.bool_]:
        """[N] which of these slots draw at random."""
        random: npt.NDArray[np.bool_] = self.column.host[slots] > 0
        return random

    def active(self, rows: Rows) -> bool:
        return bool(self.column.used(rows.slots).any())

    def apply(self, logits: Tensor, rows: Rows) -> Tensor:
        return logits.div_(self.column.at(rows.slot)[:, None])
