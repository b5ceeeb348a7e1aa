"""What rows bring to a batch beside tokens and pages: each kind is a part, asked only where a slot of the step has any of it.

A new part is a class, and a line in `make_parts`.
"""

from dataclasses import replace
from typing import Protocol

import numpy as np

from quire.attn.batch import AdapterRows, Batch
from quire.runner.sampler.stage import Tenancy
from quire.runner.transfer import upload
from quire.types.errors import EngineError
from quire.types.plan import Admission, Ints, StepPlan


class RowPart(Tenancy, Protocol):
    """`admission.extras` say what a tenant brings."""

    def active(self, slots: Ints) -> bool:
        """Has any of these? Their step is not replayed: graphs know tokens only."""

    def attach(self, batch: Batch, plan: StepPlan) -> Batch:
        """The batch of all the step's tokens -> the same with what the rows bring."""


class AdapterPart:
    """The adapters that tenants have asked for, by number."""

    def __init__(self, slots: int, room: int) -> None:
        """`room`: no number is larger."""
        self._numbers, self._room = np.zeros(slots, np.int64), room
        self._adapted: set[int] = set()  # slots that have one

    def admit(self, slot: int, admission: Admission) -> None:
        self.retire(slot)
        if admission.extras.adapter:
            self._numbers[slot] = admission.extras.adapter
            self._adapted.add(slot)

    def retire(self, slot: int) -> None:
        self._numbers[slot] = 0
        self._adapted.discard(slot)

    def active(self, slots: Ints) -> bool:
        return bool(self._adapted) and not self._adapted.isdisjoint(slots.tolist())

    def attach(self, batch: Batch, plan: StepPlan) -> Batch:
        numbers = self._numbers[plan.slot]
        present = [number for number in np.unique(numbers).tolist() if number]
        if present[-1] > self._room:
            raise EngineError(f"a row asks for adapter {present[-1]}, but there is room for {self._room}")
        index = upload(np.repeat(numbers, plan.count), batch.ids.device)
        return replace(batch, adapters=AdapterRows(index, tuple(present)))


def make_parts(slots: int, adapters: int) -> tuple[RowPart, ...]:
    return (AdapterPart(slots, adapters),)
