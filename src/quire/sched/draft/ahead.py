"""Drafters with weights: on the device, after each step, or a batch drafter of the host. `choice` limits their tokens.

Async scheduling continues while there are no drafts. Planning waits for a step after which drafts are made, or that has
drafts.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from quire.sched.draft.choice import Choice
from quire.sched.draft.costs import Prior
from quire.sched.draft.drafters import BatchDrafter, Text
from quire.sched.draft.speculation import PRIOR_OUTCOMES, REQUEST_WEIGHT, Speculation, moved, text_of
from quire.sched.plan_builder import Scheduled
from quire.types.plan import StepPlan, StepResult
from quire.types.request import Drafting, Request

GUESS = Prior(guess=0.2, each=0.2)
TRIAL_OUTCOMES = 16  # weight of earlier outcomes in a new trial
EXPECTED_TOKENS = 64  # of each answer, at most


class SpeculationAhead(Speculation):
    credit = 1.7  # one step runs before there are drafts

    def __init__(self, drafter: BatchDrafter | None, max_drafts: int, *, prior: Prior = GUESS, **options: Any) -> None:
        """Create the policy. drafter: None: the device drafts; options: of `Speculation`."""
        super().__init__(None, max_drafts, prior=prior, **options)
        self.by_host, self._batch_drafter = drafter is not None, drafter
        known = options.get("known") or {}
        first, later, self._outcomes = known.get("right", (0.7, 0.7, 0))
        self._common = Drafting(first=first, later=later)
        self._choice = Choice(self._costs, self._account, prior)
        self._before = 0  # drafts after the latest step
        self._fresh = 0  # tokens of texts that were processed after it
        self._odd = False  # the committed step has drafts, or drafts were made after the one before

    def grant(self, running: Iterable[Request], turn: Sequence[Request] | None = None) -> None:  # noqa: ARG002
        rows = [request for request in running if request.known == 1]
        limit = self._limit(len(rows))
        self.granted = {}
        if self.next_drafts:  # drafts of the last step
            for request in rows:
                drafting = request.drafting
                offered = min(limit, len(drafting.tokens) if self.by_host else drafting.offered)
                if offered and self._up_to_date(request):
                    self.granted[request] = offered
        self.next_drafts, self.guesses = limit, {}
        if self._adaptive:
            unread = [max(0, len(request.tokens) - request.drafting.read) for request in rows]
            further = sum(min(EXPECTED_TOKENS, request.limit - len(request.tokens)) for request in rows) // max(1, len(rows))
            drafting_of = [request.drafting for request in rows]
            counts, self.next_drafts = self._choice.choose(drafting_of, self._common, self._outcomes, limit, unread, further)
            self.guesses = {request: count for request, count in zip(rows, counts, strict=True) if count != self.next_drafts}
            if self._choice.tries:
                self._outcomes = min(self._outcomes, TRIAL_OUTCOMES)
        self.waits = self.next_drafts > 0 or bool(self.granted)

    def record_step_time(self, scheduled: Scheduled, seconds: float, synchronous: bool = False) -> None:  # noqa: ARG002
        plan, drafts, rows = scheduled.plan, scheduled.plan.shapes.drafted, len(scheduled.plan.slot)
        before, self._before = self._before, plan.next_drafts
        fresh, self._fresh = self._fresh, 0
        self._account.spend(seconds)
        self._seconds, self._odd = 0.0, bool(before or drafts)
        if seconds <= 0 or len(plan.masked):
            return
        if plan.tokens - drafts != rows:
            self._with_prompts(plan, before, drafts, seconds)
            return
        self._seconds = seconds
        if plan.next_drafts:
            asked = zip(scheduled.requests, plan.guesses.tolist(), strict=True)
            self._fresh = sum(max(0, len(request.tokens) - request.drafting.read) for request, guesses in asked if guesses)
        if plan.next_drafts == before and (plan.next_drafts or not drafts):
            self._choice.took(rows, plan.next_drafts, int(plan.guesses.sum()), fresh, seconds)

    def _with_prompts(self, plan: StepPlan, before: int, drafts: int, seconds: float) -> None:
        if plan.next_drafts:  # the drafter processes the prompts, too
            self._account.lose(self._choice.reading(plan.tokens - drafts - len(plan.slot)))
        elif not before and not drafts:
            self._choice.prompt(plan.tokens, seconds)

    def landed(self, scheduled: Scheduled, result: StepResult) -> list[Request]:
        plan = scheduled.plan
        if self._odd:
            self._book(scheduled, result, len(plan.slot) * plan.next_drafts)
        if not plan.next_drafts and not plan.shapes.drafted:
            return []
        rows: list[Request] = []
        each = zip(scheduled.requests, result.lengths.tolist(), plan.drafts.tolist(), plan.guesses.tolist(), strict=True)
        for request, length, drafts, guesses in each:
            if drafts and length:
                self._note(request.drafting, length - 1, drafts)
            if length and request.finished is None:
                drafting = request.drafting
                drafting.at, drafting.offered, drafting.tokens = len(request.tokens), guesses, ()
                if guesses:
                    drafting.read = len(request.tokens)
                    rows.append(request)
        if self._batch_drafter is None or not rows:
            return []
        texts: dict[str, Text] = {request.spec.id: text_of(request) for request in rows}
        drafts_of = self._batch_drafter.propose_all(texts, plan.next_drafts)
        for request in rows:
            request.drafting.tokens = drafts_of.get(request.spec.id, ())[: request.drafting.offered]
        return [request for request in rows if request.drafting.tokens]

    def _note(self, drafting: Drafting, right: int, drafts: int) -> None:
        """Record that the first `right` of a row's drafts were accepted."""
        common, recent = self._common, max(REQUEST_WEIGHT, 1 / (drafting.rows + PRIOR_OUTCOMES))
        self._outcomes += 1
        drafting.first = moved(drafting.first, common.first, right > 0, recent)
        common.first = moved(common.first, 0.0, right > 0, self._weight())
        for position in range(1, min(right + 1, drafts)):
            drafting.later = moved(drafting.later, common.later, position < right, recent)
            common.later = moved(common.later, 0.0, position < right, self._weight())

    def _measured(self) -> dict[str, Any]:
        measured, common = super()._measured(), self._common
        return measured and {**measured, "right": (common.first, common.later, min(self._outcomes, 64))}

    def forget(self, request: Request) -> None:
        if self._batch_drafter is not None:
            self._batch_drafter.leave(request.spec.id)

    def idle(self) -> bool:
        super().idle()
        return self._batch_drafter is not None and self._batch_drafter.idle()

    def close(self) -> None:
        super().close()
        if self._batch_drafter is not None:
            self._batch_drafter.close()
