"""Collects one step in lists and turns them into a StepPlan. It decides nothing.

Nearly every row is one token that is drawn after: of those only request and end are noted. The other rows are `odd`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import repeat

import numpy as np

from quire.cache.tables import Entries
from quire.types.plan import NOTHING, Admission, Ints, Outputs, StepPlan, spans
from quire.types.request import Request

NO_ROWS: Ints = np.empty((0, 3), np.int32)


@dataclass(frozen=True)
class Scheduled:
    """A plan, and what only the deciding half knows of it: whose rows they are."""

    plan: StepPlan
    requests: tuple[Request, ...]  # [rows]
    odd: tuple[int, ...]  # the rows that may bring something else than one token


@dataclass(frozen=True)
class Odd:
    count: int
    draws: int
    scores: range  # the prompt positions of the row that logprobs are wanted behind
    pool: bool  # the hidden state of its last token is wanted


class PlanBuilder:
    def __init__(self, step: int) -> None:
        self.step = step
        self.owed = 0  # pages that requests in this plan still need for tokens they have
        self.sources: list[int] = []  # pages with a reference until the plan is complete: they will be copied from
        self.requests: list[Request] = []  # [rows]
        self.ends: list[int] = []  # [rows]
        self._odd: dict[int, Odd] = {}
        self._masked: list[int] = []
        self._admitted: list[Admission] = []
        self._group: list[int] = []
        self._slot: list[int] = []
        self._index: list[int] = []
        self._page: list[int] = []
        self._targets: list[int] = []
        self._forced: list[tuple[int, int, int]] = []
        self._drafts: list[int] = []
        self._loads: list[tuple[int, int]] = []
        self._saves: list[tuple[int, int]] = []

    def admit(self, request: Request, start: int) -> None:
        """The end-of-text ids of a constrained request are its grammar's matter."""
        spec = request.spec
        self._admitted.append(
            Admission(
                slot=request.slot,
                tokens=np.array(request.tokens),
                prompt_length=len(spec.prompt),
                start=start,
                params=spec.params,
                seed=spec.seed,
                stop_ids=tuple(sorted(spec.stop_ids - spec.eos_ids if request.constrained else spec.stop_ids)),
                bad_words=spec.bad_words,
                extras=replace(spec.extras, adapter=request.place) if request.place else spec.extras,
            )
        )

    def enter(self, slot: int, entries: list[Entries]) -> None:
        for group, first, pages in entries:
            count = len(pages)
            if count == 1:  # the next page of a growing request
                self._group.append(group)
                self._slot.append(slot)
                self._index.append(first)
                self._page.append(pages[0])
                continue
            self._group.extend(repeat(group, count))
            self._slot.extend(repeat(slot, count))
            self._index.extend(range(first, first + count))
            self._page.extend(pages)

    def give(self, request: Request, start: int) -> None:
        """The device has not seen the request's tokens from position `start` on."""
        self._forced += [(request.slot, start + i, token) for i, token in enumerate(request.tokens[start:])]

    def draft(self, tokens: Iterable[int]) -> None:
        """What the latest row is expected to draw."""
        self._drafts += tokens

    def copy(self, source: int, target: int) -> None:
        self.sources.append(source)
        self._targets.append(target)

    def load(self, entry: int, slot: int) -> None:
        """The slot's state begins as what the entry holds."""
        self._loads.append((entry, slot))

    def save(self, slot: int, entry: int) -> None:
        """What the slot's state is behind this step's rows goes to the entry."""
        self._saves.append((slot, entry))

    def row(self, request: Request, count: int, end: int, draws: int, masked: bool) -> None:
        scores, spec = range(0), request.spec
        if spec.params.prompt_logprobs is not None:
            scores = range(max(end - count, request.scored), min(end, len(spec.prompt) - 1))
        pool = spec.extras.pool and end == len(spec.prompt) == len(request.tokens)
        if masked:
            self._masked.append(len(self.requests))
        if count != 1 or draws != 1 or scores or pool:
            self._odd[len(self.requests)] = Odd(count, draws, scores, pool)
        self.requests.append(request)
        self.ends.append(end)

    def settled(self, request: Request) -> int:
        """Positions whose content is in place before this step's copies run."""
        if request.admitted == self.step:
            return 0
        if request not in self.requests:
            return request.computed
        odd = self._odd.get(self.requests.index(request))
        return request.computed - (1 if odd is None else odd.count)

    def build(
        self, retired: list[int], last: Scheduled | None, ahead: int = 0, guesses: Mapping[Request, int] | None = None
    ) -> Scheduled | None:
        """None if nothing is to be run. What has not changed since the `last` step is taken from there. `ahead`: tokens that
        are to be guessed behind each row, but for those of `guesses`."""
        if not self.requests:
            return None
        requests, slots = tuple(self.requests), None
        if last is not None and not self._admitted and last.requests == requests:
            requests, slots = last.requests, last.plan.slot
        count, draws = np.ones((2, len(requests)), np.int32)
        for i, odd in self._odd.items():
            count[i], draws[i] = odd.count, odd.draws
        given, loads, saves = _table(self._forced, 3), _table(self._loads, 2), _table(self._saves, 2)
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
            slot=_ints([request.slot for request in requests]) if slots is None else slots,
            count=count,
            drafts=np.maximum(draws - 1, 0) if self._odd else np.zeros_like(count),
            end=_ints(self.ends),
            outputs=self._outputs(count, draws),
            masked=self._masks(draws),
            given_slot=given[:, 0],
            given_position=given[:, 1],
            given_token=given[:, 2],
            draft_token=_ints(self._drafts),
            load_entry=loads[:, 0],
            load_slot=loads[:, 1],
            save_slot=saves[:, 0],
            save_entry=saves[:, 1],
            guesses=_guesses(requests, ahead, guesses),
        )
        return Scheduled(plan, requests, tuple(i for i, odd in self._odd.items() if odd.draws != 1))

    def _outputs(self, count: Ints, draws: Ints) -> Outputs:
        if not self._odd:
            return Outputs(np.arange(len(count), dtype=np.int32))
        outputs, behind = Outputs.last(count, draws), np.cumsum(count)
        if scoring := [i for i, odd in self._odd.items() if odd.scores]:
            after = behind[scoring] - _ints(self.ends)[scoring]  # + position = index among the tokens
            scores = [self._odd[i].scores for i in scoring]
            first = after + _ints([positions.start for positions in scores])
            outputs = replace(outputs, prompt_logprobs=spans(first, _ints([len(positions) for positions in scores])))
        if pooling := [i for i, odd in self._odd.items() if odd.pool]:
            outputs = replace(outputs, pool=(behind[pooling] - 1).astype(np.int32))
        return outputs

    def _masks(self, draws: Ints) -> Ints:
        rows = _ints(self._masked)
        return spans((np.cumsum(draws) - draws)[rows], draws[rows]) if len(rows) else rows


def _guesses(requests: tuple[Request, ...], ahead: int, other: Mapping[Request, int] | None) -> Ints:
    if not other:
        return np.full(len(requests), ahead, np.int32)
    return _ints([other.get(request, ahead) for request in requests])


def _table(rows: Sequence[tuple[int, ...]], width: int) -> Ints:
    return np.array(rows, np.int32) if rows else NO_ROWS[:, :width]


def _ints(values: list[int]) -> Ints:
    return np.array(values, dtype=np.int32) if values else NOTHING
