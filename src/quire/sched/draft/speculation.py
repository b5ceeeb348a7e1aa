"""Choose how many drafts the rows of the next step get: the number with the most expected tokens per second, or none.

    tokens expected   1 of every row, and of its drafts   first, first · later, first · later², ...    (acceptance rates)
    seconds           measured, by rows and drafts (`costs`)

Drafts that are not run are compared with the sampled tokens, too, so acceptance rates are known without cost.
The cost of drafts is measured by running some. That is a trial if no such step has been measured, or if drafts did not
pay before; its cost must be covered by a small share of the time spent (`Account`).

With async scheduling there are no drafts: they depend on the tokens of the last step, and waiting for these is part of
their cost. Meanwhile drafts are made for some requests as a sample. When drafts pay, planning `waits` for the tokens in
flight, as long as they pay.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

from quire.sched.draft.costs import A_CPU, Account, Prior, StepCosts, bucket_ends
from quire.sched.draft.drafters import HostDrafter, Text
from quire.sched.plan_builder import Scheduled
from quire.types.plan import StepResult
from quire.types.request import Drafting, Request

MIN_SPEEDUP_ASYNC = 1.15  # expected speedup by drafts with async scheduling
MIN_SPEEDUP = 1.1  # to continue, or without async scheduling: requests that end at different times reduce it
NEAR_BEST = 0.99  # of the best rate is enough, with fewer drafts
REQUEST_WEIGHT = 0.1  # of the latest outcome, in the rates of a request
COMMON_WEIGHT = 0.01  # in the rates of all requests, which new ones start from
PRIOR_OUTCOMES = 4  # weight of the initial rates
TRIAL_INTERVAL = 400  # steps without drafts before a trial
MIN_TRIAL_RATE = 0.3  # expected acceptance rate of a trial
STORE_INTERVAL, MIN_STORED = 256, 32  # measured steps between two stores; before the store at the end
INITIAL_SHARE = 4  # at first one draft for 4 rows, then twice as many
MAX_STEP_DRAFTS = 512
SAMPLED_REQUESTS = 8  # per step with async scheduling
IDLE_STEPS = 16  # without a draft: then only a sample of requests is drafted for
Schedule = Sequence[tuple[int, int, int]]


class Speculation:
    """Speculation with a drafter of the host whose time is negligible. Maintains `Request.drafting`."""

    by_host = True  # drafts come with the plans
    credit = 0.9  # step times that it may lose initially

    def __init__(
        self,
        drafter: HostDrafter | None,
        max_drafts: int,
        *,
        adaptive: bool = True,
        largest_batch: int | None = None,
        schedule: Schedule = (),
        prior: Prior = A_CPU,
        known: Mapping[str, Any] | None = None,
        remember: Callable[[Mapping[str, Any]], None] | None = None,
    ) -> None:
        """Create the policy.

        drafter: of the host; None: drafts come from elsewhere
        max_drafts: of a row; largest_batch: no drafts with more requests
        schedule: (from requests, to requests, maximum of drafts)
        prior: see `StepCosts`; known: measurements of an earlier engine, passed to `remember`
        """
        known = known or {}
        self.max_drafts, self._drafter, self._adaptive = max_drafts, drafter, adaptive
        self._largest_batch, self._schedule = largest_batch, tuple(schedule)
        self._costs = StepCosts(prior, known.get("costs"))
        self._account = Account(self.credit)
        self._remember, self._stored = remember, 0  # measured steps at the latest store
        self._common, self._outcomes = Drafting(first=0.5, later=0.5), 0  # outcomes in the common rates
        self._seconds = 0.0  # of the committed step; 0: not usable
        self._landed: tuple[Scheduled, StepResult] | None = None  # the latest, until it is accounted
        self._idle = TRIAL_INTERVAL  # steps without drafts although some were possible
        self._in_vain = False  # planning waited for the step, but it had no drafts
        self._trial = False  # run drafts once, as a measurement
        self._turn = 0  # of the sampling of requests
        self._steps_without = 0  # steps since the last drafts
        self._in_flight = self._was_in_flight = False  # is a step in flight at commit, and was one ever
        self.granted: dict[Request, int] = {}  # drafts of the next step
        self.next_drafts = 0  # drafts that a drafter with weights makes after each row
        self.guesses: dict[Request, int] = {}  # exceptions
        self.waits = drafter is not None and not adaptive  # plan the next step when all tokens are known

    # ---- before a step

    def grant(self, running: Iterable[Request], turn: Sequence[Request] | None = None) -> None:
        """Choose the drafts of the next step. `turn`: the requests that may have a row in it, if not all."""
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
            for _, request in gains[: self._best_count(len(rows), gains)]:
                self.granted[request] = self.granted.get(request, 0) + 1
            self.waits, self._trial = bool(self.granted), False

    def tokens(self, request: Request, count: int) -> Sequence[int]:
        """Return the request's first drafts."""
        return request.drafting.tokens[:count]

    def _up_to_date(self, request: Request) -> bool:
        """Return whether the drafts belong to the current text: nothing is in flight or was added."""
        return request.sampled and request.drafting.at == len(request.tokens) == request.computed + 1

    def _limit(self, requests: int) -> int:
        if self._largest_batch is not None and requests > self._largest_batch:
            return 0
        return min([self.max_drafts, *(count for low, high, count in self._schedule if low <= requests <= high)])

    def _gains(self, able: list[Request], limit: int) -> list[tuple[float, Request]]:
        """Return probabilities that drafts are accepted, with their requests, highest first."""
        gains: list[tuple[float, Request]] = []
        for request in able:
            chance, later = self._chances(request.drafting)
            for _ in range(min(limit, len(request.drafting.tokens))):
                gains.append((chance, request))
                chance *= later
        return sorted(gains, key=lambda gain: -gain[0])

    def _best_count(self, rows: int, gains: list[tuple[float, Request]], share: float = 1.0) -> int:
        """Return how many of the likeliest drafts to run in a step. `share`: of its rows that were sampled."""
        costs, plain = self._costs, self._costs.seconds(rows, 0)
        if not self._account.covers(0.0, plain):
            return 0
        sums = list(accumulate(chance for chance, _ in gains[: max(1, round(share * MAX_STEP_DRAFTS))]))
        paces = {
            count: (rows + sums[count - 1] / share) / costs.seconds(rows, round(count / share))
            for count in bucket_ends(len(sums))
        }
        best, enough = 0, NEAR_BEST * max(paces.values(), default=0.0)
        careful = max(1, round(share * self._most_now(rows, plain)))
        if enough > NEAR_BEST * (MIN_SPEEDUP_ASYNC if self._in_flight else MIN_SPEEDUP) * rows / plain:
            best = min(careful, next(count for count, pace in paces.items() if pace >= enough))
        self._idle = 0 if best else self._idle + 1
        if not best and gains:
            tried = min(careful, len({id(request) for _, request in gains}))
            if self._trial or self._may_try(costs.seconds(rows, round(tried / share)) - plain, plain, gains[0][0]):
                best, self._idle = tried, 0
                self._trial = self._in_flight  # then it is tried when all tokens have come
        return best

    def _most_now(self, rows: int, plain: float) -> int:
        """Return the maximum of drafts now: few at first, then twice as many, since expected costs may be wrong."""
        known = self._costs.most
        return max(2 * known + 1, rows // INITIAL_SHARE) if self._account.covers(self._account.lost, plain) else known

    def _may_try(self, cost: float, plain: float, chance: float) -> bool:
        """Return whether a trial of drafts that are not expected to pay is due."""
        return self._idle >= TRIAL_INTERVAL and chance > MIN_TRIAL_RATE and self._account.covers(cost, plain)

    def _chances(self, drafting: Drafting) -> tuple[float, float]:
        """Return acceptance rates of the first and of later drafts: the mean of the request's and the common ones."""
        first, later = self._common.first, self._common.later
        return (first + own(drafting.first, first)) / 2, (later + own(drafting.later, later)) / 2

    # ---- after a step

    def record_step_time(self, scheduled: Scheduled, seconds: float, synchronous: bool = False) -> None:
        """Record the duration of a step. `synchronous`: it was planned after the tokens of the last one were known."""
        self.evaluate()
        plan, drafts = scheduled.plan, scheduled.plan.shapes.drafted
        self._account.spend(seconds)
        self._seconds = 0.0
        if seconds > 0 and plan.tokens - drafts == len(plan.slot) and not len(plan.masked):
            self._seconds, self._in_vain = seconds, synchronous and self._was_in_flight and not drafts

    def evaluate(self) -> None:
        """Evaluate the latest committed step. While drafts pay, that can wait until the next step has started."""
        if self._landed is None:
            return
        (scheduled, result), self._landed = self._landed, None
        drafts = scheduled.plan.shapes.drafted
        if self._seconds and not self._in_vain:
            self._costs.took(len(scheduled.requests), drafts, self._seconds)
        if drafts or self._in_vain:
            self._book(scheduled, result, drafts)

    def _book(self, scheduled: Scheduled, result: StepResult, drafts: int) -> None:
        """Account what a step with drafts, or one delayed for them, has won or lost."""
        seconds, self._seconds, rows = self._seconds, 0.0, len(scheduled.requests)
        if seconds and (plain := self._costs.plain(rows)) is not None:
            self._account.book(seconds, plain * int(result.lengths.sum()) / rows, self._costs.seconds(rows, drafts), plain)

    def landed(self, scheduled: Scheduled, result: StepResult) -> list[Request]:
        """Update acceptance rates after a commit and make new drafts; return the requests that have some."""
        fruitful: list[Request] = []
        if self._drafter is None:
            return fruitful
        self._landed = scheduled, result
        if self._adaptive and self._account.lost >= 0:  # no gain is left that another such step could cost
            self.evaluate()
        enabled, rows = self._limit(len(scheduled.requests)) > 0, list[Request]()
        for request, length in zip(scheduled.requests, result.lengths.tolist(), strict=True):
            if length:
                self._update_rates(request)
                request.drafting.tokens, request.drafting.at = (), -1
            if request.finished is None and length and enabled:
                rows.append(request)
        self._in_flight = any(request.pending for request in rows)
        self._was_in_flight |= self._in_flight
        self._steps_without = 0 if self.granted else self._steps_without + 1
        few = self._in_flight or (self._adaptive and self._steps_without > IDLE_STEPS and not self.waits)
        sampled = self._some(rows) if few else rows
        for request in sampled:
            drafting = request.drafting
            drafting.tokens, drafting.at = self._drafter.propose(text_of(request), self.max_drafts), len(request.tokens)
            if drafting.tokens:
                fruitful.append(request)
        if self._adaptive:
            self._decide(rows, sampled, fruitful)
        return [] if self._in_flight else fruitful

    def _some(self, rows: list[Request]) -> list[Request]:
        """Return a sample of the rows, others each time."""
        turns = max(1, -(-len(rows) // SAMPLED_REQUESTS))
        self._turn += 1
        return rows[self._turn % turns :: turns]

    def _decide(self, rows: list[Request], sampled: list[Request], fruitful: list[Request]) -> None:
        """Decide whether planning waits for the tokens in flight."""
        count = len(rows)
        if not fruitful or self._costs.plain(count) is None:
            self.waits = self.waits and bool(fruitful)
            return
        if self._in_flight:
            self.waits = self._best_count(count, self._gains(fruitful, self._limit(count)), len(sampled) / count) > 0

    def forget(self, request: Request) -> None:
        """Handle the end of a request."""
        if self._drafter is not None and request.finished != "error" and len(request.tokens) > len(request.spec.prompt):
            self._drafter.finished(text_of(request))

    def idle(self) -> bool:
        """Use idle time. Return False if there is nothing to prepare."""
        self.evaluate()
        if self._costs.taken >= self._stored + STORE_INTERVAL:
            self._store()
        return False

    def close(self) -> None:
        """Store measurements and free memory."""
        self.evaluate()
        if self._costs.taken >= self._stored + MIN_STORED:
            self._store()

    def _store(self) -> None:
        self._stored = self._costs.taken
        if self._remember is not None and (measured := self._measured()):
            self._remember(measured)

    def _measured(self) -> dict[str, Any]:
        """Return the costs of drafts for later engines. Acceptance rates depend on the texts and are not stored."""
        costs = self._costs.measured()
        return {"costs": costs} if any(costs.values()) else {}

    def _update_rates(self, request: Request) -> None:
        """Compare drafts, run or not, with the sampled tokens."""
        drafting = request.drafting
        came = request.tokens[drafting.at :] if drafting.at >= 0 else ()
        outcomes, more = _compare(drafting.tokens, came), _compare(drafting.rest, came)
        for right in outcomes[:1]:
            drafting.first = moved(drafting.first, self._common.first, right, REQUEST_WEIGHT)
            self._outcomes += 1
            self._common.first = moved(self._common.first, 0.0, right, self._weight())
        for right in outcomes[1:] + more:
            drafting.later = moved(drafting.later, self._common.later, right, REQUEST_WEIGHT)
            self._common.later = moved(self._common.later, 0.0, right, self._weight())
        if outcomes and all(outcomes):
            drafting.rest = drafting.tokens[len(came) :]
        else:
            drafting.rest = drafting.rest[len(came) :] if more and all(more) else ()

    def _weight(self) -> float:
        """Return the weight of an outcome in the common rates."""
        return max(COMMON_WEIGHT, 1 / (self._outcomes + PRIOR_OUTCOMES))


def text_of(request: Request) -> Text:
    spec = request.spec
    return Text(request.tokens, len(spec.prompt), (spec.tenant, *spec.salt))


def _compare(expected: Sequence[int], came: Sequence[int]) -> list[bool]:
    """Return which of the expected tokens came, up to the first that did not."""
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
