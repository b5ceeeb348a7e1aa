"""Commit or fail a step: append tokens, end requests, publish pages; a lost step costs only its own rows.

Rows of requests that have left meanwhile are dropped here, and nowhere else.
"""

from collections.abc import Iterable
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from quire.cache.tables import Tables
from quire.sched.encoding import Encoding
from quire.sched.limits import finish, next_check
from quire.sched.plan_builder import Scheduled
from quire.sched.roster import Roster
from quire.types.errors import EngineError
from quire.types.outputs import TokenDelta
from quire.types.plan import Floats, StepResult, TopLogprobs
from quire.types.request import FinishReason, Request
from quire.types.stats import NO_DRAFTS, DraftCounts


class RowExtras(NamedTuple):
    """The results of a row besides its tokens, in the order of a delta's fields."""

    logprobs: tuple[TopLogprobs, ...] = ()
    prompt_logprobs: tuple[TopLogprobs, ...] = ()
    pooled: Floats | None = None  # [1, size], or [tokens, size]


NOTHING = RowExtras()


class Results:
    def __init__(self, tables: Tables, roster: Roster, encoding: Encoding) -> None:
        self._tables, self._roster, self._encoding = tables, roster, encoding
        self._rows = self._drafted = 0  # with drafts
        self._accepted: list[int] = []  # by position in the row

    @property
    def drafts(self) -> DraftCounts:
        return DraftCounts(self._rows, self._drafted, sum(self._accepted), tuple(self._accepted)) if self._rows else NO_DRAFTS

    def commit(self, scheduled: Scheduled, result: StepResult) -> list[TokenDelta]:
        """Commit a step and return a delta for each of its requests."""
        deltas: list[TokenDelta] = []
        if self._tables.tier is not None:
            self._tables.tier.landed(scheduled.plan.step)
        requests, ids = scheduled.requests, result.ids.tolist()
        more = {*result.logprobs, *result.prompt_logprobs, *result.failed, *result.pooled}
        special = {*scheduled.odd, *more}
        if self._roster.discarded:
            special.update(range(len(requests)))
        rows: Iterable[tuple[Request, int]] = zip(requests, ids, strict=not special)
        if special:
            ends = list(accumulate(result.lengths.tolist(), initial=0))
            rows = [(request, ids[ends[i]]) for i, request in enumerate(requests) if i not in special]
            for i in sorted(special):
                deltas += self._commit_row(i, scheduled, result, ids[ends[i] : ends[i + 1]], not more)
        for request, token in rows:
            if request.finished is None:
                tokens = request.tokens
                tokens.append(token)
                if token in request.spec.stop_ids or len(tokens) >= request.inspect_at:
                    deltas.append(self._append_checked(request, [token], finish(request, token)))
                else:
                    deltas.append(TokenDelta(request.spec.id, [token]))
        return deltas

    def _commit_row(self, i: int, scheduled: Scheduled, result: StepResult, ids: list[int], quick: bool) -> list[TokenDelta]:
        """Commit a row with more or less than one token. `quick`: it has no other results."""
        request, plan = scheduled.requests[i], scheduled.plan
        sample, drafts = plan.shapes.each[i]
        useful = self._note_returned(request, sample, drafts)
        if i in result.failed:
            self._tables.forget(request)
            self._encoding.forget(request.spec.extras.media)
        if not useful:
            return []
        if drafts:
            self._count(request, drafts, max(0, len(ids) - 1))
        if quick and ids and len(request.tokens) + len(ids) < request.inspect_at and request.spec.stop_ids.isdisjoint(ids):
            request.tokens.extend(ids)
            request.land(drafts, len(ids))
            return [TokenDelta(request.spec.id, ids, drafts=drafts_of(request))]
        scores: tuple[TopLogprobs, ...] = ()
        if i in result.prompt_logprobs:
            scores = (result.prompt_logprobs[i],)
            request.scored = max(request.scored, int(plan.end[i] - plan.count[i])) + len(scores[0].rank)
        ending, taken = None, list[int]()
        for token in ids:
            request.tokens.append(token)
            taken.append(token)
            ending = finish(request, token)
            if ending is not None:
                break
        if sample:
            request.land(drafts, len(taken))
        extras = RowExtras(_each_token(result.logprobs.get(i), len(taken)), scores)
        if i in result.failed and ending is None:
            self._roster.leave(request, "error")
            return [delta(request, taken, error=result.failed[i], extras=extras)]
        if not request.spec.samples:
            return self._pool(request, int(plan.end[i]), int(plan.count[i]), result.pooled.get(i))
        if not sample:
            return [delta(request, [], extras=extras)] if scores else []
        return [self._append_checked(request, taken, ending, extras)]

    def _pool(self, request: Request, end: int, count: int, pooled: Floats | None) -> list[TokenDelta]:
        """Keep the pooled states of a pooling request's row. The row of the last prompt token ends the request."""
        if pooled is not None:  # of a preempted request, rows may come a second time
            request.pooled = [*((at, each) for at, each in request.pooled if at < end - count), (end - count, pooled)]
        if end < len(request.spec.prompt):
            return []
        parts = [each for _, each in request.pooled]
        request.pooled = []
        if not parts:
            raise EngineError(f"nothing was pooled of request {request.spec.id!r}")
        self._roster.leave(request, "stop")
        return [delta(request, [], extras=RowExtras(pooled=parts[0] if len(parts) == 1 else np.concatenate(parts)))]

    def _count(self, request: Request, drafts: int, accepted: int) -> None:
        drafting = request.drafting
        drafting.rows += 1
        drafting.drafted += drafts
        drafting.accepted += accepted
        self._rows += 1
        self._drafted += drafts
        self._accepted += [0] * (drafts - len(self._accepted))
        for position in range(accepted):
            self._accepted[position] += 1

    def _append_checked(
        self, request: Request, tokens: list[int], ending: tuple[FinishReason, int | None] | None, extras: RowExtras = NOTHING
    ) -> TokenDelta:
        """Handle new tokens completely: publish full pages, and end the request if required."""
        self._tables.publish(request)
        if ending is None:
            request.inspect_at = min(next_check(request), self._tables.next_publication(request))
            return delta(request, tokens, extras=extras)
        self._roster.leave(request, ending[0])
        return delta(request, tokens, stop=ending[1], extras=extras)

    def fail(self, scheduled: Scheduled, reason: str) -> list[TokenDelta]:
        """Fail a lost step: the requests with rows in it end, and the content of the cache is unknown.

        Requests admitted in later steps may have read pages that this step should have written: they start again.
        """
        plan, roster = scheduled.plan, self._roster
        deltas = []
        for request, (sample, drafts) in zip(scheduled.requests, plan.shapes.each, strict=True):
            self._note_returned(request, sample, drafts)
            if request.finished is None:
                roster.leave(request, "error")
                deltas.append(delta(request, [], error=reason))
            elif roster.forks.held.get(request.spec.id) is request:
                roster.release([request.spec.id])
        self._tables.lose()
        if self._tables.tier is not None:
            self._tables.tier.failed(plan.step)
        self._encoding.forget_all(plan.forget)
        given = set(plan.given_slot.tolist())  # the device may not have their tokens: all are sent again
        for request in list(roster.live.values()):
            if request.slot in given or (request.rows and request.admitted > plan.step):
                if request.rows:
                    roster.discarded.add(request)
                if request.slot >= 0:
                    roster.preempt(request)
        roster.retired += [slot for slot in plan.retired.tolist() if slot in roster.slots and slot not in roster.retired]
        return deltas

    def _note_returned(self, request: Request, sample: bool, drafts: int) -> bool:
        """Record that a row has returned. Return False if its result is not used; its tokens are then not pending any more."""
        request.chunks -= not sample
        useful = request.finished is None and request not in self._roster.discarded
        if sample and not useful:
            request.land(drafts, 0)
        if not request.rows:
            self._roster.discarded.discard(request)
        return useful


def delta(
    request: Request, tokens: list[int], *, stop: int | None = None, error: str | None = None, extras: RowExtras = NOTHING
) -> TokenDelta:
    """Return the delta of a request."""
    return TokenDelta(
        request.spec.id, tokens, request.finished, stop, error, *extras,
        request.cached, request.scheduled_at, request.preemptions, drafts_of(request),
    )  # fmt: skip


def drafts_of(request: Request) -> tuple[int, int, int] | None:
    drafting = request.drafting
    return (drafting.rows, drafting.drafted, drafting.accepted) if drafting.rows else None


def _each_token(scores: TopLogprobs | None, count: int) -> tuple[TopLogprobs, ...]:
    """Return the logprobs of the first `count` positions, one by one."""
    if scores is None:
        return ()
    ids, values, rank = scores.ids, scores.values, scores.rank
    return tuple(TopLogprobs(ids[i : i + 1], values[i : i + 1], rank[i : i + 1]) for i in range(count))
