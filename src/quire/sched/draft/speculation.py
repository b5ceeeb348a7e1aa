"""How many drafts the rows of the next step get: as many as bring the most tokens per second, none if none do.

    tokens expected   1 of every row, and of its drafts   first, first · later, first · later², ...    as often as right
    seconds           measured, by rows and drafts (`costs`)

A guess that is not run is compared with what comes all the same, so it costs nothing to learn that a drafter has become good.
What drafts cost is learnt by running some. That is a trial as long as nobody has measured such a step, and where they were not
worth it before; it has to be covered by a small share of the time spent (`account`).

Where steps are planned ahead of the tokens of the last one, there are no drafts: guessing needs these tokens, and waiting for
them is part of what drafts cost. Meanwhile the texts of some requests are looked at, as far as they have come. When drafts are
worth it, the engine `waits` for what is in flight, and goes on so as long as they are.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

from quire.sched.draft.costs import A_CPU, Account, Prior, StepCosts, bucket_ends
from quire.sched.draft.drafters import HostDrafter, Text
from quire.sched.plan_builder import Scheduled
from quire.types.plan import StepResult
from quire.types.request import Drafting, Request

WORTH = 1.15  # times the pace without drafts: what they have to promise where steps are planned ahead
STILL_WORTH = 1.1  # and to go on, or where nobody plans ahead: requests that end at different times take a part of it
ENOUGH = 0.99  # of the best pace, if that takes fewer drafts
RECENT = 0.1  # weight of the latest outcome, of a request
COMMON = 0.01  # of all requests: what is expected of a new one
QUICKLY = 4  # and as if so many outcomes had been seen before the first
TRIED_EVERY = 400  # steps in which nothing was worth it, at least
LIKELY = 0.3  # a draft that is tried is right that often, at least
REMEMBERED_EVERY, WORTH_REMEMBERING = 256, 32  # steps measured; at the end
FIRST_OF = 4  # rows: so many times fewer drafts are run at first, then twice as many
MOST_TOGETHER = 512  # drafts of a step
LOOKED_AT = 8  # requests of a step that is planned ahead
DULL = 16  # steps without a draft: then no more are looked at either
Schedule = Sequence[tuple[int, int, int]]


class Speculation:
    """By a drafter of the host that takes next to no time. Keeps `Request.drafting`."""

    by_host = True  # drafts come with the plans
    credit = 0.9  # steps that it may lose to begin with

    def __init__(
        self,
        drafter: HostDrafter | None,
        most: int,
        *,
        adaptive: bool = True,
        largest_batch: int | None = None,
        schedule: Schedule = (),
        prior: Prior = A_CPU,
        known: Mapping[str, Any] | None = None,
        remember: Callable[[Mapping[str, Any]], None] | None = None,
    ) -> None:
        """`drafter`: None = whoever drafts, there is nobody to ask here. `largest_batch`: with more requests there are
        none. `schedule`: from so many requests to so many, at most so many drafts of a row. `prior`: see `StepCosts`. `known`:
        what an earlier engine had this one `remember`."""
        known = known or {}
        self.most, self._drafter, self._adaptive = most, drafter, adaptive
        self._largest_batch, self._schedule = largest_batch, tuple(schedule)
        self._costs = StepCosts(prior, known.get("costs"))
        self._account = Account(self.credit)
        self._remember, self._remembered = remember, 0  # steps measured by then
        self._common, self._outcomes = Drafting(first=0.5, later=0.5), 0  # that this is made of
        self._seconds = 0.0  # of the step that landed, as far as it says something
        self._landed: tuple[Scheduled, StepResult] | None = None  # the latest, until it is booked
        self._idle = TRIED_EVERY  # steps since drafts were run that could have been
        self._in_vain = False  # that was waited for, and had no drafts
        self._trial = False  # drafts are run once, worth it or not
        self._turn = 0  # of those who are looked at
        self._dull = 0  # steps since one had a draft
        self._ahead = self._ahead_once = False  # is a step in flight when another lands, and was one ever?
        self.granted: dict[Request, int] = {}  # drafts of the next step
        self.ahead = 0  # that a drafter with weights makes behind each of its rows
        self.guesses: dict[Request, int] = {}  # but for these
        self.waits = drafter is not None and not adaptive  # the next step is planned when all tokens are known

    # ---- before a step

    def grant(self, running: Iterable[Request], turn: Sequence[Request] | None = None) -> None:
        """Decides about the next step. `turn`: who may have a row in it, if not all."""
        self.granted = {}
        rows = [request for request in running if request.known == 1]
        limit = self._limit(len(rows))
        if turn is not None:
            rows = [request for request in turn if request.known == 1]
        self.waits = not self._adaptive and limit > 0
        able = [request for request in rows if limit and request.drafting.tokens and self._up_to_date(request)]
        if not able:
            return
        if not self._adaptive:
            self.granted = {request: min(limit, len(request.drafting.tokens)) for request in able}
        elif self._costs.plain(len(rows)) is not None:
            gains = self._gains(able, limit)
            for _, request in gains[: self._worth(len(rows), gains)]:
                self.granted[request] = self.granted.get(request, 0) + 1
            self.waits, self._trial = bool(self.granted), False

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

    def _gains(self, able: list[Request], limit: int) -> list[tuple[float, Request]]:
        """That the next draft of a request is right, most likely first."""
        gains: list[tuple[float, Request]] = []
        for request in able:
            chance, later = self._chances(request.drafting)
            for _ in range(min(limit, len(request.drafting.tokens))):
                gains.append((chance, request))
                chance *= later
        return sorted(gains, key=lambda gain: -gain[0])

    def _worth(self, rows: int, gains: list[tuple[float, Request]], share: float = 1.0) -> int:
        """How many of the likeliest drafts are run, in a step of so many rows. `share`: of which so many were looked at."""
        costs, plain = self._costs, self._costs.seconds(rows, 0)
        if not self._account.covers(0.0, plain):
            return 0
        sums = list(accumulate(chance for chance, _ in gains[: max(1, round(share * MOST_TOGETHER))]))
        paces = {
            count: (rows + sums[count - 1] / share) / costs.seconds(rows, round(count / share))
            for count in bucket_ends(len(sums))
        }
        best, enough = 0, ENOUGH * max(paces.values(), default=0.0)
        careful = max(1, round(share * self._most_now(rows, plain)))
        if enough > ENOUGH * (WORTH if self._ahead else STILL_WORTH) * rows / plain:
            best = min(careful, next(count for count, pace in paces.items() if pace >= enough))
        self._idle = 0 if best else self._idle + 1
        if not best and gains:
            tried = min(careful, len({id(request) for _, request in gains}))
            if self._trial or self._may_try(costs.seconds(rows, round(tried / share)) - plain, plain, gains[0][0]):
                best, self._idle = tried, 0
                self._trial = self._ahead  # then it is tried when all tokens have come
        return best

    def _most_now(self, rows: int, plain: float) -> int:
        """What drafts cost may be wrong: few at first, then twice as many, unless that could lose too much."""
        known = self._costs.most
        return max(2 * known + 1, rows // FIRST_OF) if self._account.covers(self._account.lost, plain) else known

    def _may_try(self, cost: float, plain: float, chance: float) -> bool:
        """Are drafts run that are not worth it by what is known?"""
        return self._idle >= TRIED_EVERY and chance > LIKELY and self._account.covers(cost, plain)

    def _chances(self, drafting: Drafting) -> tuple[float, float]:
        """That its next draft is right, and any behind that: by half as its own were of late, by half as all requests'."""
        first, later = self._common.first, self._common.later
        return (first + own(drafting.first, first)) / 2, (later + own(drafting.later, later)) / 2

    # ---- after a step

    def took(self, scheduled: Scheduled, seconds: float, waited: bool = False) -> None:
        """`waited`: the step was planned when the last one's tokens had come. Without drafts none has to be."""
        self.settle()
        plan, drafts = scheduled.plan, scheduled.plan.shapes.drafted
        self._account.spend(seconds)
        self._seconds = 0.0
        if seconds > 0 and plan.tokens - drafts == len(plan.slot) and not len(plan.masked):
            self._seconds, self._in_vain = seconds, waited and self._ahead_once and not drafts

    def settle(self) -> None:
        """Learns from the step that landed last. While drafts win, that can wait until the next one is on its way."""
        if self._landed is None:
            return
        (scheduled, result), self._landed = self._landed, None
        drafts = scheduled.plan.shapes.drafted
        if self._seconds and not self._in_vain:
            self._costs.took(len(scheduled.requests), drafts, self._seconds)
        if drafts or self._in_vain:
            self._book(scheduled, result, drafts)

    def _book(self, scheduled: Scheduled, result: StepResult, drafts: int) -> None:
        """What a step with drafts, or one that was held up by them, has won or lost."""
        seconds, self._seconds, rows = self._seconds, 0.0, len(scheduled.requests)
        if seconds and (plain := self._costs.plain(rows)) is not None:
            self._account.book(seconds, plain * int(result.lengths.sum()) / rows, self._costs.seconds(rows, drafts), plain)

    def landed(self, scheduled: Scheduled, result: StepResult) -> list[Request]:
        """The tokens of a step have been taken in: how good were the guesses, and what are the next? Those that have some."""
        fruitful: list[Request] = []
        if self._drafter is None:
            return fruitful
        self._landed = scheduled, result
        if self._adaptive and self._account.lost >= 0:  # nothing was won that another such step may cost
            self.settle()
        wanted, rows = self._limit(len(scheduled.requests)) > 0, list[Request]()
        for request, length in zip(scheduled.requests, result.lengths.tolist(), strict=True):
            if length:
                self._learn(request)
                request.drafting.tokens, request.drafting.at = (), -1
            if request.finished is None and length and wanted:
                rows.append(request)
        self._ahead = any(request.pending for request in rows)
        self._ahead_once |= self._ahead
        self._dull = 0 if self.granted else self._dull + 1
        few = self._ahead or (self._adaptive and self._dull > DULL and not self.waits)
        looked_at = self._some(rows) if few else rows
        for request in looked_at:
            drafting = request.drafting
            drafting.tokens, drafting.at = self._drafter.propose(text_of(request), self.most), len(request.tokens)
            if drafting.tokens:
                fruitful.append(request)
        if self._adaptive:
            self._decide(rows, looked_at, fruitful)
        return [] if self._ahead else fruitful

    def _some(self, rows: list[Request]) -> list[Request]:
        """Of many, a few: others the next time."""
        turns = max(1, -(-len(rows) // LOOKED_AT))
        self._turn += 1
        return rows[self._turn % turns :: turns]

    def _decide(self, rows: list[Request], looked_at: list[Request], fruitful: list[Request]) -> None:
        """Is the next step worth waiting for the tokens of those in flight?"""
        count = len(rows)
        if not fruitful or self._costs.plain(count) is None:
            self.waits = self.waits and bool(fruitful)
            return
        if self._ahead:
            self.waits = self._worth(count, self._gains(fruitful, self._limit(count)), len(looked_at) / count) > 0

    def forget(self, request: Request) -> None:
        """It has ended."""
        if self._drafter is not None and request.finished != "error" and len(request.tokens) > len(request.spec.prompt):
            self._drafter.finished(text_of(request))

    def idle(self) -> bool:
        """Uses a moment without work. False = there is nothing to prepare."""
        self.settle()
        if self._costs.taken >= self._remembered + REMEMBERED_EVERY:
            self._keep()
        return False

    def close(self) -> None:
        """Gives memory back."""
        self.settle()
        if self._costs.taken >= self._remembered + WORTH_REMEMBERING:
            self._keep()

    def _keep(self) -> None:
        self._remembered = self._costs.taken
        if self._remember is not None and (learnt := self._learnt()):
            self._remember(learnt)

    def _learnt(self) -> dict[str, Any]:
        """For engines to come: what drafts cost. How often they are right is a matter of the texts."""
        costs = self._costs.learnt()
        return {"costs": costs} if any(costs.values()) else {}

    def _learn(self, request: Request) -> None:
        """Whether its guesses were run or not: they are compared with the tokens that came."""
        drafting = request.drafting
        came = request.tokens[drafting.at :] if drafting.at >= 0 else ()
        outcomes, more = _compare(drafting.tokens, came), _compare(drafting.rest, came)
        for right in outcomes[:1]:
            drafting.first = moved(drafting.first, self._common.first, right, RECENT)
            self._outcomes += 1
            self._common.first = moved(self._common.first, 0.0, right, self._weight())
        for right in outcomes[1:] + more:
            drafting.later = moved(drafting.later, self._common.later, right, RECENT)
            self._common.later = moved(self._common.later, 0.0, right, self._weight())
        if outcomes and all(outcomes):
            drafting.rest = drafting.tokens[len(came) :]
        else:
            drafting.rest = drafting.rest[len(came) :] if more and all(more) else ()

    def _weight(self) -> float:
        """Of an outcome, in what is expected of new requests."""
        return max(COMMON, 1 / (self._outcomes + QUICKLY))


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


def own(value: float, unknown: float) -> float:
    return value if value >= 0 else unknown


def moved(value: float, unknown: float, right: bool, weight: float) -> float:
    value = own(value, unknown)
    return value + weight * (right - value)
