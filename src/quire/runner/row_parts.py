"""What rows bring to a batch beside tokens and pages: each kind is a part, asked only where a slot of the step has any of it.

A new part is a class, and a line in `make_parts`.
"""

from collections.abc import Set
from dataclasses import replace
from typing import Protocol

import numpy as np

from quire.attn.batch import AdapterRows, Batch
from quire.runner.sampler.stage import Tenancy
from quire.types.errors import EngineError
from quire.types.plan import Admission, Ints, StepPlan


class RowPart(Tenancy, Protocol):
    """`admission.extras` say what a tenant brings."""

    def active(self, slots: Ints) -> bool:
        """Has any of these? Their step is not replayed: graphs know tokens only."""

    def attach(self, batch: Batch, plan: StepPlan) -> Batch:
        """The batch of all the step's tokens -> the same with what the rows bring."""


class AdapterPart:
    """The adapters that tenants have asked for, by place."""

    def __init__(self, slots: int, filled: Set[int]) -> None:
        """`filled`: places that have one, at any time."""
        self._places, self._filled = np.zeros(slots, np.int64), filled
        self._adapted: set[int] = set()  # slots that have one

    def admit(self, slot: int, admission: Admission) -> None:
        self.retire(slot)
        if admission.extras.adapter:
            self._places[slot] = admission.extras.adapter
            self._adapted.add(slot)

    def retire(self, slot: int) -> None:
        self._places[slot] = 0
        self._adapted.discard(slot)

    def active(self, slots: Ints) -> bool:
        return bool(self._adapted) and not self._adapted.isdisjoint(slots.tolist())

    def attach(self, batch: Batch, plan: StepPlan) -> Batch:
        places = self._places[plan.slot]
        for place in {*places.tolist()} - {0}:
            if place not in self._filled:
                raise EngineError(f"a row asks for the adapter in place {place}, where there is none")
        return replace(batch, adapters=AdapterRows(np.repeat(places, plan.count), batch.ids.device))


def make_parts(slots: int, adapters: Set[int]) -> tuple[RowPart, ...]:
    """`adapters`: places that have one, at any time."""
    return (AdapterPart(slots, adapters),)
