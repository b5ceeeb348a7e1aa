"""Collects one step in lists and turns them into a StepPlan. It decides nothing."""

from dataclasses import dataclass
from itertools import repeat

import numpy as np

from quire.cache.tables import Entries
from quire.types.plan import Admission, Ints, StepPlan
from quire.types.request import Request


@dataclass(frozen=True)
class Scheduled:
    """A plan, and what only the deciding half knows of it: whose rows they are."""

    plan: StepPlan
    requests: tuple[Request, ...]  # [rows]


class PlanBuilder:
    def __init__(self, step: int) -> None:
        self.step = step
        self.owed = 0  # pages that requests in this plan still need for tokens they have
        self.sources: list[int] = []  # pages with a reference until the plan is complete: they will be copied from
        self._rows: dict[Request, int] = {}  # → count
        self._end: list[int] = []
        self._sample: list[bool] = []
        self._admitted: list[Admission] = []
        self._group: list[int] = []
        self._slot: list[int] = []
        self._index: list[int] = []
        self._page: list[int] = []
        self._targets: list[int] = []

    def admit(self, request: Request, start: int) -> None:
        self._admitted.append(
            Admission(
                slot=request.slot,
                tokens=_ints(request.tokens),
                prompt_length=len(request.spec.prompt),
                start=start,
                params=request.spec.params,
                seed=request.spec.seed,
                stop_ids=tuple(sorted(request.spec.stop_ids)),
                bad_words=request.spec.bad_words,
            )
        )

    def enter(self, slot: int, entries: list[Entries]) -> None:
        for new in entries:
            count = len(new.pages)
            self._group.extend(repeat(new.group, count))
            self._slot.extend(repeat(slot, count))
            self._index.extend(range(new.first, new.first + count))
            self._page.extend(new.pages)

    def copy(self, source: int, target: int) -> None:
        self.sources.append(source)
        self._targets.append(target)

    def row(self, request: Request, count: int, end: int, sample: bool) -> None:
        self._rows[request] = count
        self._end.append(end)
        self._sample.append(sample)

    def settled(self, request: Request) -> int:
        """Positions whose content is in place before this step's copies run."""
        return 0 if request.admitted == self.step else request.computed - self._rows.get(request, 0)

    def build(self, retired: list[int]) -> Scheduled | None:
        """None if nothing is to be run."""
        if not self._rows:
            return None
        plan = StepPlan(
            step=self.step,
            retired=_ints(retired),
            admitted=tuple(self._admitted),
            entry_group=_ints(self._group),
            entry_slot=_ints(self._slot),
            entry_index=_ints(self._index),
            entry_page=_ints(self._page),
            copy_from=_ints(self.sources),
            copy_to=_ints(self._targets),
            slot=_ints([request.slot for request in self._rows]),
            count=_ints(list(self._rows.values())),
            end=_ints(self._end),
            sample=np.array(self._sample, dtype=np.bool_),
        )
        return Scheduled(plan, tuple(self._rows))


def _ints(values: list[int]) -> Ints:
    return np.array(values, dtype=np.int32)
