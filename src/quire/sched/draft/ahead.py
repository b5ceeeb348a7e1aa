"""How many tokens a drafter with weights guesses behind the rows of a step: as many as bring the most tokens per second.

    tokens expected   1 of every row, and of its drafts   first, first · later, first · later², ...    as often as right
    seconds           of a step with so many drafts of every row and as many guesses behind it, measured, by rows

Its guesses cost time whether they are run or not, so where they do not pay it is not asked, and nothing is learnt. That is
tried again after a while, and after twice as long if it was in vain. Where they pay, a step without them is measured once in a
while. Texts that it has not read, it reads first: that is measured, too, and has to be won back by the tokens that are to come.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from quire.sched.draft.base import BatchDrafter, Text
from quire.sched.draft.costs import WEIGHT, StepCosts
from quire.sched.draft.speculation import COMMON, RECENT, TRIED_EVERY, WORTH, Speculation, moved, text_of
from quire.sched.plan_builder import Scheduled
from quire.types.plan import StepResult
from quire.types.request import Drafting, Request

UNMEASURED = 0.2  # of a step: what a guess and its verification cost before they were measured
LONGEST_WAIT = 32 * TRIED_EVERY  # steps between two trials
TRIAL = 4  # steps of one: behind the first there are guesses, the second waits for them, the others are measured
TRIAL_SHARE = 0.01  # of the time since the last: what reading for one may take
FURTHER = 128  # tokens of each text that are counted on, if there may be so many
PLAIN_EVERY = 256  # steps with drafts: then two without
HELD = 4  # steps for which a number is kept


class Choice:
    """Of a number of drafts."""

    def __init__(self, unmeasured: float) -> None:
        self._costs = StepCosts(unmeasured)
        self._count = 0
        self._fixed = 0  # steps for which the number stays, whatever is expected
        self._limit = 0  # that it was chosen under
        self._idle, self._wait = 0, TRIED_EVERY  # steps since drafts were tried, and until they are again
        self._busy = 0  # steps since one without drafts
        self._reading, self._tokens_read = 0.0, 0.0  # seconds of late, for so many tokens

    def choose(self, drafting: Sequence[Drafting], common: Drafting, limit: int, unread: int, further: int) -> int:
        """For rows of requests of which these are the ones that draw, at most `limit`. `unread`: tokens of all of them;
        `further`: that each may have."""
        self._idle, self._busy = self._idle + 1, self._busy + 1
        if self._fixed and drafting and limit == self._limit:
            self._fixed -= 1
            return min(self._count, limit)
        self._limit = limit
        self._count, self._fixed = self._best(drafting, common, limit, unread, further) if limit and drafting else (0, 0)
        return self._count

    def took(self, rows: int, count: int, seconds: float) -> None:
        """A step whose rows had so many drafts, and as many were guessed behind it."""
        self._costs.took(rows, rows * count, seconds)

    def read(self, rows: int, count: int, unread: int, seconds: float) -> None:
        """Two steps, of which the first had no drafts, and behind it so many tokens were read and so many guessed."""
        if (plain := self._costs.plain(rows)) is not None and unread > rows:
            more = max(0.0, seconds - plain - self._costs.seconds(rows, rows * count))
            self._reading = (1 - WEIGHT) * self._reading + more
            self._tokens_read = (1 - WEIGHT) * self._tokens_read + unread

    def _best(self, drafting: Sequence[Drafting], common: Drafting, limit: int, unread: int, further: int) -> tuple[int, int]:
        """And for how many more steps it is kept."""
        rows, costs = len(drafting), self._costs
        plain = costs.plain(rows)
        if plain is None:
            return 0, 1
        first = np.array([each.first if each.first >= 0 else common.first for each in drafting])
        later = np.array([each.later if each.later >= 0 else common.later for each in drafting])
        right = first[:, None] * later[:, None] ** np.arange(limit)
        expected = rows + right.sum(0).cumsum()
        paces = expected / [costs.seconds(rows, rows * count) for count in range(1, limit + 1)]
        best = int(paces.argmax())
        reading = self._reading / self._tokens_read * unread if self._tokens_read else 0.0
        if WORTH * (further * rows / paces[best] + reading) < further * plain:
            self._idle, self._wait = 0, TRIED_EVERY
            if self._busy >= PLAIN_EVERY:
                self._busy = 0
                return 0, 1
            return best + 1, HELD - 1 if costs.measured(rows, rows * (best + 1)) else 2
        self._busy = 0
        if self._idle >= self._wait and reading <= TRIAL_SHARE * self._idle * plain:
            self._idle, self._wait = 0, min(2 * self._wait, LONGEST_WAIT)
            return best + 1, TRIAL - 1
        return 0, HELD - 1


class SpeculationAhead(Speculation):
    """By a drafter with weights: on the device, behind each step, or one that is asked here."""

    def __init__(self, companion: BatchDrafter | None, most: int, **options: Any) -> None:
        """`companion`: None = the device drafts. `options`: as those of `Speculation`."""
        super().__init__(None, most, **options)
        self.by_host, self._companion = companion is not None, companion
        self._common = Drafting(first=0.7, later=0.7)
        self._choice = Choice(UNMEASURED)
        self._before = 0  # guesses behind the latest step
        self._waking: tuple[int, float] | None = None  # tokens read behind it, and its seconds, if it was the first of some

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
        self.ahead = limit
        if self._adaptive:
            unread = sum(max(0, len(request.tokens) - request.drafting.read) for request in rows)
            further = sum(min(FURTHER, request.limit - len(request.tokens)) for request in rows) // max(1, len(rows))
            self.ahead = self._choice.choose([request.drafting for request in rows], self._common, limit, unread, further)

    def took(self, scheduled: Scheduled, seconds: float, waited: bool = False) -> None:  # noqa: ARG002
        plan, drafts = scheduled.plan, int(scheduled.plan.drafts.sum())
        before, self._before = self._before, plan.ahead
        waking, self._waking = self._waking, None
        if seconds <= 0 or plan.tokens - drafts != len(plan.slot) or len(plan.masked):
            return
        if plan.ahead and not before and not drafts:
            unread = sum(max(0, len(request.tokens) - request.drafting.read) for request in scheduled.requests)
            self._waking = unread, seconds
        elif plan.ahead == before and waking is not None:
            self._choice.read(len(plan.slot), plan.ahead, waking[0], waking[1] + seconds)
        elif plan.ahead == before and (plan.ahead or not drafts):
            self._choice.took(len(plan.slot), plan.ahead, seconds)

    def landed(self, scheduled: Scheduled, result: StepResult) -> list[Request]:
        plan = scheduled.plan
        if not plan.ahead and not plan.drafts.any():
            return []
        rows: list[Request] = []
        for request, length, drafts in zip(scheduled.requests, result.lengths.tolist(), plan.drafts.tolist(), strict=True):
            if drafts and length:
                self._note(request.drafting, length - 1, drafts)
            if length and request.finished is None:
                drafting = request.drafting
                drafting.at, drafting.offered, drafting.tokens = len(request.tokens), plan.ahead, ()
                drafting.read = len(request.tokens) if plan.ahead else drafting.read
                rows.append(request)
        if self._companion is None or not plan.ahead or not rows:
            return []
        texts: dict[str, Text] = {request.spec.id: text_of(request) for request in rows}
        drafts_of = self._companion.propose_all(texts, plan.ahead)
        for request in rows:
            request.drafting.tokens = drafts_of.get(request.spec.id, ())
        return [request for request in rows if request.drafting.tokens]

    def _note(self, drafting: Drafting, right: int, drafts: int) -> None:
        """Of so many drafts, the first few were right."""
        common = self._common
        drafting.first = moved(drafting.first, common.first, right > 0, RECENT)
        common.first = moved(common.first, 0.0, right > 0, COMMON)
        for place in range(1, min(right + 1, drafts)):
            drafting.later = moved(drafting.later, common.later, place < right, RECENT)
            common.later = moved(common.later, 0.0, place < right, COMMON)

    def forget(self, request: Request) -> None:
        if self._companion is not None:
            self._companion.leave(request.spec.id)

    def idle(self) -> bool:
        return self._companion is not None and self._companion.idle()

    def close(self) -> None:
        if self._companion is not None:
            self._companion.close()
