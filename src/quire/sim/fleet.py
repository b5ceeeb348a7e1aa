"""Replicas and arrivals in virtual time: one queue of events, and no waiting; and the search for the fewest replicas.

An arrival precedes other events of the same time.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Protocol

from quire.sched.balancer import Balancer
from quire.sim.replica import Replica
from quire.sim.trace import Arrival, Trace
from quire.types.errors import ConfigError
from quire.types.outputs import TokenDelta
from quire.types.request import EngineRequest
from quire.types.sampling import SamplingParams


@dataclass(frozen=True)
class FrontTime:
    """Seconds of an API process.

    way: from the client to the engine; request: the part of it that occupies the process
    token, finish: for each output token, and at the end of a request
    """

    way: float = 0.0
    request: float = 0.0
    token: float = 0.0
    finish: float = 0.0


NO_FRONT = FrontTime()
USUAL_FRONT = FrontTime(0.0025, 0.001, 0.000045)  # on cores such as those of an H200's host


class FrontEnds:
    """API processes, one for each engine; clients are distributed evenly."""

    def __init__(self, count: int, time: FrontTime) -> None:
        self._time, self._rest = time, max(0.0, time.way - time.request)
        self._free = [0.0] * count  # when each will be idle

    def arrive(self, number: int, now: float) -> float:
        """Return when the engine receives a request that comes now."""
        front = number % len(self._free)
        done = self._free[front] = max(now, self._free[front]) + self._time.request
        return done + self._rest

    def deliver(self, numbers: Sequence[int], last: Sequence[bool], now: float) -> tuple[list[float], list[float]]:
        """Return when clients receive the tokens of a step, one for each of these requests, and when finished requests end.

        last: whether the token is the last of its request
        """
        free, token, finish = self._free, self._time.token, self._time.finish
        if not token and not finish:
            return [now] * len(numbers), [now] * sum(last)
        times, ends, count = list[float](), list[float](), len(free)
        for number, is_last in zip(numbers, last, strict=True):
            front = number % count
            at = free[front]
            at = free[front] = (at if at > now else now) + token
            times.append(at)
            if is_last:
                at = free[front] = at + finish
                ends.append(at)
        return times, ends


class SimulatedRouter(Protocol):
    def place(self, request: EngineRequest) -> int:
        """Return the replica for a new request."""

    def observe(self, deltas: Sequence[TokenDelta]) -> None:
        """Record the deltas of a step."""

    def refused(self, name: str) -> None:
        """Record that the replica refused a request."""


class RoundRobin:
    def __init__(self, replicas: int) -> None:
        self._replicas, self._next = replicas, 0

    def place(self, request: EngineRequest) -> int:  # noqa: ARG002
        self._next += 1
        return (self._next - 1) % self._replicas

    def observe(self, deltas: Sequence[TokenDelta]) -> None:
        """Ignore: placement depends on the order only."""

    def refused(self, name: str) -> None:
        """Ignore."""


class Balanced:
    """The placement of `quire serve`; by load alone without `caching`."""

    def __init__(self, replicas: int, pages: int, page_size: int, slots: int, caching: bool) -> None:
        self._balancer, self._all = Balancer(replicas), range(replicas)
        for replica in self._all:
            self._balancer.begin(replica, pages, page_size, slots, caching)

    def place(self, request: EngineRequest) -> int:
        return self._balancer.place(request, self._all)

    def observe(self, deltas: Sequence[TokenDelta]) -> None:
        add_tokens, end = self._balancer.add_tokens, self._balancer.end
        for delta in deltas:
            if delta.token_ids:
                add_tokens(delta.request_id, len(delta.token_ids))
            if delta.finish_reason is not None:
                end(delta.request_id)

    def refused(self, name: str) -> None:
        self._balancer.end(name)


ROUTERS = ("balancer", "load", "round-robin")
MakeRouter = Callable[[int], SimulatedRouter]


def router_maker(name: str, pages: int, page_size: int, slots: int, caching: bool = True) -> MakeRouter:
    """Return a factory of routers by number of replicas, each with `pages` of cache and `slots` requests at once."""
    if name == "round-robin":
        return RoundRobin
    return lambda replicas: Balanced(replicas, pages, page_size, slots, caching and name == "balancer")


NO_IDS: frozenset[int] = frozenset()


@dataclass(slots=True)
class Visit:
    """The course of a request. Times are seconds after the first arrival; -1: did not happen."""

    at: float
    prompt: int
    output: int
    replica: int = -1
    first: float = -1.0  # its first token
    last: float = -1.0
    cached: int = 0  # prompt tokens in the prefix cache
    preemptions: int = 0
    refused: str = ""

    @property
    def done(self) -> bool:
        return self.last >= 0

    @property
    def ttft(self) -> float:
        return self.first - self.at

    @property
    def e2e(self) -> float:
        return self.last - self.at

    @property
    def tpot(self) -> float:
        """Return seconds per token after the first; 0 if there is none."""
        return (self.last - self.first) / (self.output - 1) if self.output > 1 else 0.0


@dataclass(frozen=True)
class Run:
    visits: list[Visit]
    replicas: list[Replica]
    complete: bool  # False: stopped early
    end: float


class Fleet:
    """Replicas with a router. `max_concurrency`: maximum of open requests, others wait outside; `front`: API process times."""

    def __init__(
        self,
        replicas: Sequence[Replica],
        router: SimulatedRouter,
        max_concurrency: int | None = None,
        front: FrontTime = NO_FRONT,
    ) -> None:
        self._replicas, self._router, self._most = list(replicas), router, max_concurrency
        self._fronts = FrontEnds(len(self._replicas), front)
        self._coming: list[tuple[float, int]] = []  # a heap: (when an engine receives a request, its number)
        self._leaving: list[float] = []  # a heap: when clients see the end of their requests
        self._end = 0.0  # when a client received the last token
        self._params: dict[int, SamplingParams] = {}
        self._moments: list[tuple[float, int]] = []  # a heap: (time, replica); only the entry of its `due` is valid
        self._visits: list[Visit] = []

    def run(self, trace: Trace, acceptable: Callable[[Visit], bool] = lambda _: True) -> Run:
        """Run a trace. `acceptable` is called with every request that ends; the run stops when it returns False."""
        arrivals, number, now, live, complete = trace.arrivals, 0, 0.0, 0, True
        self._visits = [Visit(arrival.at, arrival.length, arrival.output) for arrival in arrivals]
        moments, coming, leaving = self._moments, self._coming, self._leaving
        while True:
            due = min(moments[0][0] if moments else inf, coming[0][0] if coming else inf, leaving[0] if leaving else inf)
            if number < len(arrivals) and (self._most is None or live < self._most):
                at = max(arrivals[number].at, now)
                if at <= due:
                    now = self._visits[number].at = at
                    heapq.heappush(coming, (self._fronts.arrive(number, at), number))
                    number += 1
                    live += 1
                    continue
            if due == inf:
                break
            if leaving and leaving[0] <= due:
                now = heapq.heappop(leaving)
                live -= 1
                continue
            if coming and coming[0][0] <= due:
                now, first = heapq.heappop(coming)
                self._deliver(first, arrivals[first], now)
                continue
            moment, index = heapq.heappop(moments)
            if self._replicas[index].due != moment:
                continue  # its due time has changed
            now = moment
            if not all(map(acceptable, self._advance(index, now))):
                complete = False
                break
        return Run(self._visits, self._replicas, complete, max(now, self._end))

    def _deliver(self, number: int, arrival: Arrival, now: float) -> None:
        params = self._params.get(arrival.output)
        if params is None:
            params = self._params[arrival.output] = SamplingParams(temperature=0.0, max_tokens=arrival.output, ignore_eos=True)
        request = EngineRequest(
            str(number), arrival.prompt(), params, arrival.echo, stop_ids=NO_IDS, eos_ids=NO_IDS, arrival=now
        )
        visit, index = self._visits[number], self._router.place(request)
        visit.replica = index
        before = self._replicas[index].due
        self._replicas[index].add(request, now)
        self._remember(index, before)

    def _advance(self, index: int, now: float) -> list[Visit]:
        """Advance a replica; return the requests that have ended."""
        replica, visits, ended = self._replicas[index], self._visits, list[Visit]()
        deltas = replica.advance(now)
        numbers = [int(delta.request_id) for delta in deltas]
        times, ends = self._fronts.deliver(numbers, [delta.finish_reason is not None for delta in deltas], now)
        for end in ends:
            heapq.heappush(self._leaving, end)
        for delta, number, received in zip(deltas, numbers, times, strict=True):
            if delta.finish_reason is not None or delta.scheduled_at:  # other tokens have neither
                visit = visits[number]
                if visit.first < 0 and delta.token_ids:
                    visit.first, visit.cached = received, delta.cached_tokens
                if delta.finish_reason is not None:
                    visit.last, visit.preemptions = received, delta.preemptions
                    ended.append(visit)
        self._end = max(self._end, times[-1] if times else 0.0)
        for name, tokens in replica.ended:  # an ended request may still have a row in flight, which reports again
            visits[int(name)].output = tokens
        replica.ended.clear()
        if deltas:
            self._router.observe(deltas)
        for name, why in replica.refused:
            visits[int(name)].refused = why
            self._router.refused(name)
            ended.append(visits[int(name)])
            heapq.heappush(self._leaving, now)
        replica.refused.clear()
        self._remember(index, None)
        return ended

    def _remember(self, index: int, before: float | None) -> None:
        due = self._replicas[index].due
        if due is not None and due != before:
            heapq.heappush(self._moments, (due, index))


@dataclass(frozen=True)
class Objectives:
    """Latency objectives: for `percent` of the requests, TTFT is at most `ttft` and mean TPOT at most `tpot` milliseconds.

    A refused request misses them.
    """

    ttft: float | None = None
    tpot: float | None = None
    percent: float = 99.0

    def __post_init__(self) -> None:
        for flag, value in (("slo-ttft", self.ttft), ("slo-tpot", self.tpot)):
            if value is not None and not 0 < value < float("inf"):
                raise ConfigError(f"--{flag} must be above 0 milliseconds, got {value:g}")
        if not 0 < self.percent <= 100:
            raise ConfigError(f"--slo-percentile must be above 0 and at most 100, got {self.percent:g}")

    def met_by(self, visit: Visit) -> bool:
        if not visit.done:
            return False
        return (self.ttft is None or 1000 * visit.ttft <= self.ttft) and (self.tpot is None or 1000 * visit.tpot <= self.tpot)

    def allowed(self, requests: int) -> int:
        """Return how many requests may miss the objectives."""
        return int(requests * (100 - self.percent) / 100 + 1e-9)

    def __str__(self) -> str:
        parts = [f"{name} ≤ {most:g} ms" for name, most in (("TTFT", self.ttft), ("TPOT", self.tpot)) if most is not None]
        return f"{' and '.join(parts)} for {self.percent:g} % of the requests"


class MissLimit:
    """Counts misses during a run, which can stop as soon as there are too many."""

    def __init__(self, objectives: Objectives, most: int) -> None:
        self._objectives, self._left = objectives, most

    def __call__(self, visit: Visit) -> bool:
        self._left -= not self._objectives.met_by(visit)
        return self._left >= 0


@dataclass(frozen=True)
class Trial:
    replicas: int
    kept: bool
    share: float | None  # of requests within the objectives; None if the run was stopped early


@dataclass(frozen=True)
class Search:
    trials: list[Trial]
    replicas: int  # the fewest that meet the objectives, or the maximum that was tried
    kept: bool
    run: Run  # with this number of replicas


Simulate = Callable[[int, Callable[[Visit], bool]], Run]


def fewest_replicas(
    simulate: Simulate,
    objectives: Objectives,
    requests: int,
    max_replicas: int,
    report: Callable[[Trial], None] = lambda _: None,
) -> Search:
    """Find the fewest replicas that meet the objectives: double their number until it is enough, then bisect.

    More replicas are assumed never to be worse.
    """
    trials: list[Trial] = []

    def attempt(replicas: int) -> Run:
        run = simulate(replicas, MissLimit(objectives, objectives.allowed(requests)))
        share = sum(map(objectives.met_by, run.visits)) / requests if run.complete else None
        trials.append(Trial(replicas, run.complete, share))
        report(trials[-1])
        return run

    low, high, best = 0, 1, attempt(1)  # `low` are too few
    while not best.complete:
        if high == max_replicas:
            return Search(trials, max_replicas, False, simulate(max_replicas, lambda _: True))
        low, high = high, min(2 * high, max_replicas)
        best = attempt(high)
    while high - low > 1:
        middle = (low + high) // 2
        run = attempt(middle)
        if run.complete:
            high, best = middle, run
        else:
            low = middle
    return Search(trials, high, True, best)
