"""Drafters with weights: on the device, behind each step, or one that is asked here. `choice` says for how many tokens.

Where steps are planned ahead of the last one's tokens, that goes on while nobody is asked. A step behind which there are
guesses, or that has drafts, is waited for.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from quire.sched.draft.choice import Choice
from quire.sched.draft.costs import Prior
from quire.sched.draft.drafters import BatchDrafter, Text
from quire.sched.draft.speculation import QUICKLY, RECENT, Speculation, moved, text_of
from quire.sched.plan_builder import Scheduled
from quire.types.plan import StepPlan, StepResult
from quire.types.request import Drafting, Request

GUESS = Prior(guess=0.2, each=0.2)
OLD = 16  # rows with drafts: no more is known of how they were, when they are tried again
FURTHER = 64  # tokens of each text that are counted on, if there may be so many


class SpeculationAhead(Speculation):
    credit = 1.7  # one runs before there are drafts

    def __init__(self, companion: BatchDrafter | None, most: int, *, prior: Prior = GUESS, **options: Any) -> None:
        """`companion`: None = the device drafts. `options`: as those of `Speculation`."""
        super().__init__(None, most, prior=prior, **options)
        self.by_host, self._companion = companion is not None, companion
        known = options.get("known") or {}
        first, later, self._outcomes = known.get("right", (0.7, 0.7, 0))
        self._common = Drafting(first=first, later=later)
        self._choice = Choice(self._costs, self._account, prior)
        self._before = 0  # guesses behind the latest step
        self._fresh = 0  # tokens of texts that were read behind it
        self._odd = False  # the step that lands has drafts, or the one before had guesses

    def grant(self, running: Iterable[Request], turn: Sequence[Request] | None = None) -> None:  # noqa: ARG002
        rows = [request for request in running if request.known == 1]
        limit = self._limit(len(rows))
        self.granted = {}
        if self.ahead:  # behind the last step
            for request in rows:
                drafting = request.drafting
                offered = min(limit, len(drafting.tokens) if self.by_host else drafting.offered)
                if offered and self._up_to_date(request):
                    self.granted[request] = offered
        self.ahead, self.guesses = limit, {}
        if self._adaptive:
            unread = [max(0, len(request.tokens) - request.drafting.read) for request in rows]
            further = sum(min(FURTHER, request.limit - len(request.tokens)) for request in rows) // max(1, len(rows))
            drafting_of = [request.drafting for request in rows]
            counts, self.ahead = self._choice.choose(drafting_of, self._common, self._outcomes, limit, unread, further)
            self.guesses = {request: count for request, count in zip(rows, counts, strict=True) if count != self.ahead}
            if self._choice.tries:
                self._outcomes = min(self._outcomes, OLD)
        self.waits = self.ahead > 0 or bool(self.granted)

    def took(self, scheduled: Scheduled, seconds: float, waited: bool = False) -> None:  # noqa: ARG002
        plan, drafts, rows = scheduled.plan, scheduled.plan.shapes.drafted, len(scheduled.plan.slot)
        before, self._before = self._before, plan.ahead
        fresh, self._fresh = self._fresh, 0
        self._account.spend(seconds)
        self._seconds, self._odd = 0.0, bool(before or drafts)
        if seconds <= 0 or len(plan.masked):
            return
        if plan.tokens - drafts != rows:
            self._with_prompts(plan, before, drafts, seconds)
            return
        self._seconds = seconds
        if plan.ahead:
            asked = zip(scheduled.requests, plan.guesses.tolist(), strict=True)
            self._fresh = sum(max(0, len(request.tokens) - request.drafting.read) for request, guesses in asked if guesses)
        if plan.ahead == before and (plan.ahead or not drafts):
            self._choice.took(rows, plan.ahead, int(plan.guesses.sum()), fresh, seconds)

    def _with_prompts(self, plan: StepPlan, before: int, drafts: int, seconds: float) -> None:
        if plan.ahead:  # it reads them, too
            self._account.lose(self._choice.reading(plan.tokens - drafts - len(plan.slot)))
        elif not before and not drafts:
            self._choice.prompt(plan.tokens, seconds)

    def landed(self, scheduled: Scheduled, result: StepResult) -> list[Request]:
        plan = scheduled.plan
        if self._odd:
            self._book(scheduled, result, len(plan.slot) * plan.ahead)
        if not plan.ahead and not plan.shapes.drafted:
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
        if self._companion is None or not rows:
            return []
        texts: dict[str, Text] = {request.spec.id: text_of(request) for request in rows}
        drafts_of = self._companion.propose_all(texts, plan.ahead)
        for request in rows:
            request.drafting.tokens = drafts_of.get(request.spec.id, ())[: request.drafting.offered]
        return [request for request in rows if request.drafting.tokens]

    def _note(self, drafting: Drafting, right: int, drafts: int) -> None:
        """Of so many drafts, the first few were right."""
        common, recent = self._common, max(RECENT, 1 / (drafting.rows + QUICKLY))
        self._outcomes += 1
        drafting.first = moved(drafting.first, common.first, right > 0, recent)
        common.first = moved(common.first, 0.0, right > 0, self._weight())
        for place in range(1, min(right + 1, drafts)):
            drafting.later = moved(drafting.later, common.later, place < right, recent)
            common.later = moved(common.later, 0.0, place < right, self._weight())

    def _learnt(self) -> dict[str, Any]:
        learnt, common = super()._learnt(), self._common
        return learnt and {**learnt, "right": (common.first, common.later, min(self._outcomes, 64))}

    def forget(self, request: Request) -> None:
        if self._companion is not None:
            self._companion.leave(request.spec.id)

    def idle(self) -> bool:
        super().idle()
        return self._companion is not None and self._companion.idle()

    def close(self) -> None:
        super().close()
        if self._companion is not None:
            self._companion.close()
