"""What rows bring to a batch beside tokens and pages: each kind is a part, asked only where a slot of the step has any of it.

A new part is a class, and a line in `make_parts`.
"""

from dataclasses import replace
from typing import Protocol

import numpy as np

from quire.attn.batch import AdapterRows, Batch
from quire.ops.adapters import tile
from quire.runner.adapters import Shelf
from quire.runner.sampler.stage import Tenancy
from quire.runner.transfer import Longs
from quire.types.errors import EngineError
from quire.types.plan import Admission, Ints, StepRows


class RowPart(Tenancy, Protocol):
    """`admission.extras` say what a tenant brings."""

    def active(self, slots: Ints) -> bool:
        """Has any of these?"""

    def replayed(self, slots: Ints) -> Longs | None:
        """[R] what graphs are to know of these; None = this cannot be replayed."""

    def attach(self, batch: Batch, plan: StepRows) -> Batch:
        """The batch of all the step's tokens -> the same with what the rows bring."""


class AdapterPart:
    """The adapters that tenants have asked for, by place."""

    def __init__(self, slots: int, shelf: Shelf | None) -> None:
        self._places, self._shelf = np.zeros(slots, np.int64), shelf
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

    def attach(self, batch: Batch, plan: StepRows) -> Batch:
        places, by_kernels = self._find(plan.slot)
        each, device = np.repeat(places, plan.count), batch.ids.device
        return replace(batch, adapters=AdapterRows(each, device, tile(each, device) if by_kernels else None))

    def replayed(self, slots: Ints) -> Longs | None:
        places, by_kernels = self._find(slots)
        return places if by_kernels else None

    def _find(self, slots: Ints) -> tuple[Longs, bool]:
        """[R] places, and whether kernels can do what is in them."""
        places = self._places[slots]
        asked = {*places.tolist()} - {0}
        for place in asked:
            if self._shelf is None or place not in self._shelf.filled:
                raise EngineError(f"a row asks for the adapter in place {place}, where there is none")
        return places, self._shelf is not None and self._shelf.has_kernels_for(asked)


def make_parts(slots: int, shelf: Shelf | None) -> tuple[RowPart, ...]:
    """`shelf`: of adapters, if there is room for any."""
    return (AdapterPart(slots, shelf),)
