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
        self._masked: list[int] = []
        self._admitted: list[Admission] = []
        self._group: list[int] = []
        self._slot: list[int] = []
        self._index: list[int] = []
        self._page: list[int] = []
        self._targets: list[int] = []
        self._given: list[tuple[int, int, int]] = []

    def admit(self, request: Request, start: int) -> None:
        """The end-of-text ids of a constrained request are its grammar's matter."""
        spec = request.spec
        self._admitted.append(
            Admission(
                slot=request.slot,
                tokens=_ints(request.tokens),
                prompt_length=len(spec.prompt),
                start=start,
                params=spec.params,
                seed=spec.seed,
                stop_ids=tuple(sorted(spec.stop_ids - spec.eos_ids if request.constrained else spec.stop_ids)),
                bad_words=spec.bad_words,
            )
        )

    def enter(self, slot: int, entries: list[Entries]) -> None:
        for new in entries:
            count = len(new.pages)
            self._group.extend(repeat(new.group, count))
            self._slot.extend(repeat(slot, count))
            self._index.extend(range(new.first, new.first + count))
            self._page.extend(new.pages)

    def give(self, request: Request, start: int) -> None:
        """The device has not seen the request's tokens from position `start` on."""
        self._given += [(request.slot, start + i, token) for i, token in enumerate(request.tokens[start:])]

    def copy(self, source: int, target: int) -> None:
        self.sources.append(source)
        self._targets.append(target)

    def row(self, request: Request, count: int, end: int, sample: bool, masked: bool) -> None:
        if masked:
            self._masked.append(len(self._rows))
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
        given = np.array(self._given, np.int32).reshape(-1, 3)
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
            masked=_ints(self._masked),
            given_slot=given[:, 0],
            given_position=given[:, 1],
            given_token=given[:, 2],
        )
        return Scheduled(plan, tuple(self._rows))


def _ints(values: list[int]) -> Ints:
    return np.array(values, dtype=np.int32)
