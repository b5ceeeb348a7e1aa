"""Collect one step in lists and build a StepPlan. No decisions are made here.

Nearly every row is a decode row, for which only request and end are recorded. The other rows are `odd`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np

from quire.cache.tables import Entries
from quire.cache.tiers import Fetch, Store
from quire.types.plan import NOTHING, Admission, Ints, Longs, Outputs, RowShapes, StepPlan, spans
from quire.types.request import Request


@dataclass(frozen=True)
class Scheduled:
    """A plan, and the requests of its rows, which the device does not know."""

    plan: StepPlan
    requests: tuple[Request, ...]  # [rows]
    odd: tuple[int, ...]  # rows that may return something else than one token
    embeddings: int = 0  # that the step encodes


Moves = tuple[Sequence[Store], Sequence[Fetch]]


class Odd(NamedTuple):
    """A row that is not a plain decode row: more or fewer tokens or samples than one, or scores, or pooling."""

    tokens: int
    samples: int
    scores: range  # prompt positions of the row whose next token's logprobs are requested
    pool: int  # hidden states of this many tokens at its end are pooled


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
        self._forgotten: list[str] = []
        self._encoded: list[tuple[int, int]] = []
        self._embeddings = 0
        self._moves: Moves = ((), ())

    def admit(self, request: Request, start: int) -> None:
        """Add a request to the device. End-of-text ids of a constrained request are left to its grammar."""
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
                extras=replace(spec.extras, adapter_slot=request.adapter_slot) if request.adapter_slot else spec.extras,
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
        """Send the request's tokens from position `start` on, which the device does not have."""
        self._forced += [(request.slot, start + i, token) for i, token in enumerate(request.tokens[start:])]

    def draft(self, tokens: Iterable[int]) -> None:
        """Add the draft tokens of the latest row."""
        self._drafts += tokens

    def copy(self, source: int, target: int) -> None:
        self.sources.append(source)
        self._targets.append(target)

    def load(self, entry: int, slot: int) -> None:
        """Load the slot's recurrent state from an entry."""
        self._loads.append((entry, slot))

    def save(self, slot: int, entry: int) -> None:
        """Save the slot's recurrent state after this step's rows to an entry."""
        self._saves.append((slot, entry))

    def forget(self, digests: Iterable[str]) -> None:
        """Free embeddings of the encoder cache."""
        self._forgotten += digests

    def encode(self, slot: int, index: int, embeddings: int) -> None:
        """Encode an image or video of the slot's request."""
        self._encoded.append((slot, index))
        self._embeddings += embeddings

    def move(self, moves: Moves) -> None:
        """Store and fetch pages of the host tier."""
        self._moves = moves

    def row(self, request: Request, count: int, end: int, samples: int, masked: bool) -> None:
        scores, spec = range(0), request.spec
        if spec.params.prompt_logprobs is not None:
            scores = range(max(end - count, request.scored), min(end, len(spec.prompt) - 1))
        pool = 0
        if (pooling := spec.extras.pooling) is not None:
            pool = count if pooling.reads_all else int(end == len(spec.prompt))
        if masked:
            self._masked.append(len(self.requests))
        if count != 1 or samples != 1 or scores or pool:
            self._odd[len(self.requests)] = Odd(count, samples, scores, pool)
        self.requests.append(request)
        self.ends.append(end)

    @property
    def tokens(self) -> int:
        return len(self.requests) + sum(row.tokens - 1 for row in self._odd.values())

    @property
    def has_prompts(self) -> bool:
        """Whether a row has tokens that are neither sampled ones nor drafts."""
        return any(row.tokens > row.samples for row in self._odd.values())

    def written(self, request: Request) -> int:
        """Return the positions of a request whose content is written before this step's copies run."""
        if request.admitted == self.step:
            return 0
        if request not in self.requests:
            return request.computed
        odd = self._odd.get(self.requests.index(request))
        return request.computed - (1 if odd is None else odd.tokens)

    def build(
        self, retired: list[int], last: Scheduled | None, next_drafts: int = 0, guesses: Mapping[Request, int] | None = None
    ) -> Scheduled | None:
        """Return the step; None if it has no rows and moves no pages. Arrays that equal those of the `last` step are reused.

        next_drafts: tokens to draft after each row; guesses: exceptions by request
        """
        if not self.requests and not any(self._moves):
            return None
        requests, slots = tuple(self.requests), None
        if last is not None and not self._admitted and last.requests == requests:
            requests, slots = last.requests, last.plan.slot
        shapes = self._shapes()
        plan = StepPlan(
            step=self.step,
            admitted=tuple(self._admitted),
            slot=_ints([request.slot for request in requests]) if slots is None else slots,
            end=_ints(self.ends),
            shapes=shapes,
            draft_token=_ints(self._drafts),
            guesses=_guesses(requests, next_drafts, guesses),
            masked=self._masks(shapes) if self._masked else NOTHING,
            **self._changes(retired),
        )
        odd = tuple(i for i, odd in self._odd.items() if odd.samples != 1)
        return Scheduled(plan, requests, odd, self._embeddings)

    def _changes(self, retired: list[int]) -> dict[str, Any]:
        """Return the fields of a plan that are empty in most steps."""
        changes: dict[str, Any] = {}
        if retired:
            changes["retired"] = _ints(retired)
        if self._page:
            changes |= {"entry_group": _ints(self._group), "entry_slot": _ints(self._slot)}
            changes |= {"entry_index": _ints(self._index), "entry_page": _ints(self._page)}
        if self.sources:
            changes |= {"copy_from": _ints(self.sources), "copy_to": _ints(self._targets)}
        if self._forced:
            changes |= zip(("given_slot", "given_position", "given_token"), _table(self._forced), strict=True)
        if self._loads:
            changes |= zip(("load_entry", "load_slot"), _table(self._loads), strict=True)
        if self._forgotten or self._encoded:
            changes |= {"forget": tuple(self._forgotten), "encode": tuple(self._encoded)}
        stores, fetches = self._moves
        if stores:
            changes |= zip(("store_page", "store_record", "store_tag"), _moves(stores), strict=True)
        if fetches:
            changes |= zip(("fetch_record", "fetch_page", "fetch_tag"), _moves(fetches), strict=True)
        if self._saves:
            changes |= zip(("save_slot", "save_entry"), _table(self._saves), strict=True)
        return changes

    def _shapes(self) -> RowShapes:
        odd = tuple(self._odd.items())
        scoring = [i for i, row in odd if row.scores]
        if not scoring:
            return _shapes(len(self.requests), odd)
        shapes = _shapes.__wrapped__(len(self.requests), odd)
        after = np.cumsum(shapes.count)[scoring] - _ints(self.ends)[scoring]  # + position = index among the tokens
        scores = [self._odd[i].scores for i in scoring]
        first = after + _ints([positions.start for positions in scores])
        outputs = replace(shapes.outputs, prompt_logprobs=spans(first, _ints([len(positions) for positions in scores])))
        return RowShapes(shapes.count, shapes.drafts, outputs)

    def _masks(self, shapes: RowShapes) -> Ints:
        rows = _ints(self._masked)
        return spans(shapes.first_sample[rows], 1 + shapes.drafts[rows])


@lru_cache(64)  # the next step usually has one of the latest shapes
def _shapes(rows: int, odd: tuple[tuple[int, Odd], ...]) -> RowShapes:
    """Return the shapes of `rows` rows, of which some are odd; without prompt logprobs."""
    count, samples = np.ones((2, rows), np.int32)
    for i, row in odd:
        count[i], samples[i] = row.tokens, row.samples
    outputs = Outputs.last(count, samples)
    if pooling := [i for i, row in odd if row.pool]:
        pooled = _ints([row.pool for _, row in odd if row.pool])
        outputs = replace(outputs, pool=spans(np.cumsum(count)[pooling] - pooled, pooled))
    return RowShapes(count, np.maximum(samples - 1, 0), outputs)


def _guesses(requests: tuple[Request, ...], next_drafts: int, other: Mapping[Request, int] | None) -> Ints:
    if not other:
        return _equal_guesses(len(requests), next_drafts)
    return _ints([other.get(request, next_drafts) for request in requests])


@lru_cache(64)
def _equal_guesses(rows: int, next_drafts: int) -> Ints:
    return np.full(rows, next_drafts, np.int32)


def _table(rows: Sequence[tuple[int, ...]]) -> list[Ints]:
    """Return the columns of a table."""
    return list(np.array(rows, np.int32).T)


def _moves(rows: Sequence[tuple[int, int, int]]) -> tuple[Ints, Ints, Longs]:
    """Return the columns of stores or fetches; the last one has tags."""
    first, second, tags = zip(*rows, strict=True)
    return np.array(first, np.int32), np.array(second, np.int32), np.array(tags, np.int64)


def _ints(values: list[int]) -> Ints:
    return np.array(values, dtype=np.int32) if values else NOTHING
