"""How many drafts the rows of the next step get: as many as bring the most tokens per second, none if none do.

    tokens expected   1 of every row, and of its drafts   first, first · later, first · later², ...    as often as right
    seconds           measured, by rows and drafts (`costs`)

A guess that is not run is compared with what comes all the same, so it costs nothing to learn that a drafter has become good.
What drafts cost is learnt by running some; where they are not worth it, that is tried again once in a while.
"""

from collections.abc import Iterable, Sequence

from quire.sched.draft.base import HostDrafter, Text
from quire.sched.draft.costs import StepCosts
from quire.sched.plan_builder import Scheduled
from quire.types.plan import StepResult
from quire.types.request import Drafting, Request

WORTH = 1.03  # times the pace without drafts: what they have to bring to be run
RECENT = 0.2  # weight of the latest outcome, of a request
COMMON = 0.02  # of all requests: what is expected of a new one
TRIED_EVERY = 200  # steps in which nothing was worth it
LIKELY = 0.3  # a draft that is tried is right that often, at least
MOST_TOGETHER = 512  # drafts of a step
Schedule = Sequence[tuple[int, int, int]]


class Speculation:
    """Keeps `Request.drafting`."""

    def __init__(
        self,
        drafter: HostDrafter | None,
        most: int,
        *,
        adaptive: bool = True,
        largest_batch: int | None = None,
        schedule: Schedule = (),
    ) -> None:
        """`drafter`: None = the device drafts, and all rows have `most` drafts. `largest_batch`: with more requests there are
        none. `schedule`: from so many requests to so many, at most so many drafts of a row."""
        self.most, self._drafter, self._adaptive = most, drafter, adaptive
        self._largest_batch, self._schedule = largest_batch, tuple(schedule)
        self._costs = StepCosts()
        self._common = Drafting(first=0.5, later=0.5)
        self._idle = 0  # steps since drafts were run that could have been
        self.granted: dict[Request, int] = {}  # drafts of the next step

    @property
    def by_host(self) -> bool:
        """Do drafts come with the plans?"""
        return self._drafter is not None

    # ---- before a step

    def grant(self, running: Iterable[Request]) -> None:
        """Decides about the next step."""
        self.granted = {}
        rows = [request for request in running if request.known == 1]
        limit = self._limit(len(rows))
        if self._drafter is None:
            self.granted = {request: limit for request in rows if limit and request.drew}
            return
        able = [request for request in rows if limit and request.drafting.tokens and self._up_to_date(request)]
        if not able:
            return
        if not self._adaptive:
            self.granted = {request: min(limit, len(request.drafting.tokens)) for request in able}
        elif self._costs.plain(len(rows)) is not None:
            self._choose(len(rows), able, limit)

    def tokens(self, request: Request, count: int) -> Sequence[int]:
        """Its first drafts."""
        return request.drafting.tokens[:count]

    def _up_to_date(self, request: Request) -> bool:
        """Nothing of it is in flight, and nothing was added since it was looked at."""
        return request.drew and request.drafting.at == len(request.tokens) == request.computed + 1

    def _limit(self, requests: int) -> int:
        if self._largest_batch is not None and requests > self._largest_batch:
            return 0
        return min([self.most, *(count for low, high, count in self._schedule if low <= requests <= high)])

    def _choose(self, rows: int, able: list[Request], limit: int) -> None:
        gains: list[tuple[float, Request]] = []  # that the next draft of a request is right, most likely first
        for request in able:
            chance, later = self._chances(request.drafting)
            for _ in range(min(limit, len(request.drafting.tokens))):
                gains.append((chance, request))
                chance *= later
        gains.sort(key=lambda gain: -gain[0])
        best, expected, pace = 0, float(rows), WORTH * rows / self._costs.seconds(rows, 0)
        for count, (chance, _) in enumerate(gains[: min(MOST_TOGETHER, 2 * self._costs.most(rows) + 1)], 1):
            expected += chance
            if (reached := expected / self._costs.seconds(rows, count)) > pace:
                best, pace = count, reached
        self._idle = 0 if best else self._idle + 1
        if self._idle >= TRIED_EVERY and gains[0][0] > LIKELY:
            best, self._idle = min(len(gains), len(able)), 0
        for _, request in gains[:best]:
            self.granted[request] = self.granted.get(request, 0) + 1

    def _chances(self, drafting: Drafting) -> tuple[float, float]:
        common = self._common
        return (drafting.first if drafting.first >= 0 else common.first), (
            drafting.later if drafting.later >= 0 else common.later
        )

    # ---- after a step

    def took(self, scheduled: Scheduled, seconds: float) -> None:
        plan, drafts = scheduled.plan, int(scheduled.plan.drafts.sum())
        if seconds > 0 and plan.tokens - drafts == len(plan.slot) and not len(plan.masked):
            self._costs.took(len(plan.slot), drafts, seconds)

    def landed(self, scheduled: Scheduled, result: StepResult) -> list[Request]:
        """The tokens of a step have been taken in: how good were the guesses, and what are the next? Those that have some."""
        fruitful: list[Request] = []
        if self._drafter is None:
            return fruitful
        wanted = self._limit(len(scheduled.requests)) > 0
        for request, length in zip(scheduled.requests, result.lengths.tolist(), strict=True):
            if length:
                self._learn(request)
            if request.finished is not None or not length or request.pending or not wanted:
                continue
            drafting = request.drafting
            drafting.tokens, drafting.at = self._drafter.propose(text_of(request), self.most), len(request.tokens)
            if drafting.tokens:
                fruitful.append(request)
        return fruitful

    def forget(self, request: Request) -> None:
        """It has ended."""
        if self._drafter is not None and request.finished != "error" and len(request.tokens) > len(request.spec.prompt):
            self._drafter.finished(text_of(request))

    def _learn(self, request: Request) -> None:
        """Whether its guesses were run or not: they are compared with the tokens that came."""
        drafting = request.drafting
        came = request.tokens[drafting.at :] if drafting.at >= 0 else ()
        outcomes, more = _compare(drafting.tokens, came), _compare(drafting.rest, came)
        for right in outcomes[:1]:
            drafting.first = _moved(drafting.first, self._common.first, right, RECENT)
            self._common.first = _moved(self._common.first, 0.0, right, COMMON)
        for right in outcomes[1:] + more:
            drafting.later = _moved(drafting.later, self._common.later, right, RECENT)
            self._common.later = _moved(self._common.later, 0.0, right, COMMON)
        if outcomes and all(outcomes):
            drafting.rest = drafting.tokens[len(came) :]
        else:
            drafting.rest = drafting.rest[len(came) :] if more and all(more) else ()


def text_of(request: Request) -> Text:
    spec = request.spec
    return Text(request.tokens, len(spec.prompt), (spec.tenant, *spec.salt))


def _compare(expected: Sequence[int], came: Sequence[int]) -> list[bool]:
    """Which of the expected tokens came, up to the first that did not."""
    outcomes = []
    for guess, token in zip(expected, came, strict=False):
        outcomes.append(guess == token)
        if guess != token:
            break
    return outcomes


def _moved(value: float, unknown: float, right: bool, weight: float) -> float:
    value = value if value >= 0 else unknown
    return value + weight * (right - value)
