"""Replicas and arrivals, in the order of time: one queue of moments, and no waiting.

Requests that come at the same moment as something else happens come first.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Protocol

from quire.sched.balancer import Balancer
from quire.sim.replica import Replica
from quire.sim.trace import Arrival, Trace
from quire.types.outputs import TokenDelta
from quire.types.request import EngineRequest
from quire.types.sampling import SamplingParams


@dataclass(frozen=True)
class FrontTime:
    """Seconds; `request` is part of `way`."""

    way: float = 0.0
    request: float = 0.0
    token: float = 0.0
    finish: float = 0.0


NO_FRONT = FrontTime()
USUAL_FRONT = FrontTime(0.0025, 0.001, 0.000045)  # of cores like an H200's host


class FrontEnds:
    """As many API processes as engines, whose clients are shared out evenly."""

    def __init__(self, count: int, time: FrontTime) -> None:
        self._time, self._rest = time, max(0.0, time.way - time.request)
        self._free = [0.0] * count  # when each has done all there was

    def arrive(self, number: int, now: float) -> float:
        """When the engine has a request that comes now."""
        front = number % len(self._free)
        done = self._free[front] = max(now, self._free[front]) + self._time.request
        return done + self._rest

    def tell(self, numbers: Sequence[int], last: Sequence[bool], now: float) -> tuple[list[float], list[float]]:
        """When the clients have the tokens of a step, one for each of these requests, and those for whom it is the `last`
        know that they have all."""
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


class Router(Protocol):
    def place(self, request: EngineRequest) -> int:
        """The number of the replica that is to have a request which has just come."""

    def heard(self, deltas: Sequence[TokenDelta]) -> None:
        """What a step brought."""

    def refused(self, name: str) -> None:
        """The replica did not take it."""


class RoundRobin:
    def __init__(self, replicas: int) -> None:
        self._replicas, self._next = replicas, 0

    def place(self, request: EngineRequest) -> int:  # noqa: ARG002
        self._next += 1
        return (self._next - 1) % self._replicas

    def heard(self, deltas: Sequence[TokenDelta]) -> None:
        """It does not matter here."""

    def refused(self, name: str) -> None:
        """Nor does that."""


class Balanced:
    """As `quire serve` places requests; by load alone without `caching`."""

    def __init__(self, replicas: int, pages: int, page_size: int, slots: int, caching: bool) -> None:
        self._balancer, self._all = Balancer(replicas), range(replicas)
        for replica in self._all:
            self._balancer.begin(replica, pages, page_size, slots, caching)

    def place(self, request: EngineRequest) -> int:
        return self._balancer.place(request, self._all)

    def heard(self, deltas: Sequence[TokenDelta]) -> None:
        add_tokens, end = self._balancer.add_tokens, self._balancer.end
        for delta in deltas:
            if delta.token_ids:
                add_tokens(delta.request_id, len(delta.token_ids))
            if delta.finish_reason is not None:
                end(delta.request_id)

    def refused(self, name: str) -> None:
        self._balancer.end(name)


ROUTERS = ("balancer", "load", "round-robin")
MakeRouter = Callable[[int], Router]


def router_maker(name: str, pages: int, page_size: int, slots: int, caching: bool = True) -> MakeRouter:
    """Return a factory of routers by number of replicas, each with `pages` of cache and `slots` requests at once."""
    if name == "round-robin":
        return RoundRobin
    return lambda replicas: Balanced(replicas, pages, page_size, slots, caching and name == "balancer")


NOBODY: frozenset[int] = frozenset()


@dataclass(slots=True)
class Visit:
    """What became of a request. Times are seconds after the first arrival; -1: it did not come to that."""

    at: float
    prompt: int
    output: int
    replica: int = -1
    first: float = -1.0  # its first token
    last: float = -1.0
    cached: int = 0  # tokens of the prompt that were found
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
        """Seconds for each token after the first; 0 where there is none."""
        return (self.last - self.first) / (self.output - 1) if self.output > 1 else 0.0


@dataclass(frozen=True)
class Run:
    visits: list[Visit]
    replicas: list[Replica]
    complete: bool  # otherwise it was given up
    end: float


class Fleet:
    """`max_concurrency`: so many requests are open at most, and who comes when they are waits outside. `front`: what is between
    clients and engines."""

    def __init__(
        self,
        replicas: Sequence[Replica],
        router: Router,
        max_concurrency: int | None = None,
        front: FrontTime = NO_FRONT,
    ) -> None:
        self._replicas, self._router, self._most = list(replicas), router, max_concurrency
        self._fronts = FrontEnds(len(self._replicas), front)
        self._coming: list[tuple[float, int]] = []  # a heap: when an engine has a request, and its number
        self._leaving: list[float] = []  # a heap: when clients know that they have all
        self._end = 0.0  # the last thing that a client heard
        self._params: dict[int, SamplingParams] = {}
        self._moments: list[tuple[float, int]] = []  # a heap; of a replica's, the one that is its `due` counts
        self._visits: list[Visit] = []

    def run(self, trace: Trace, wanted: Callable[[Visit], bool] = lambda _: True) -> Run:
        """`wanted` hears of every request that ends; where it says no, the run is given up."""
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
                continue  # it is due at another time by now
            now = moment
            if not all(map(wanted, self._advance(index, now))):
                complete = False
                break
        return Run(self._visits, self._replicas, complete, max(now, self._end))

    def _deliver(self, number: int, arrival: Arrival, now: float) -> None:
        params = self._params.get(arrival.output)
        if params is None:
            params = self._params[arrival.output] = SamplingParams(temperature=0.0, max_tokens=arrival.output, ignore_eos=True)
        request = EngineRequest(
            str(number), arrival.prompt(), params, arrival.echo, stop_ids=NOBODY, eos_ids=NOBODY, arrival=now
        )
        visit, index = self._visits[number], self._router.place(request)
        visit.replica = index
        before = self._replicas[index].due
        self._replicas[index].add(request, now)
        self._remember(index, before)

    def _advance(self, index: int, now: float) -> list[Visit]:
        """Returns who has ended."""
        replica, visits, ended = self._replicas[index], self._visits, list[Visit]()
        deltas = replica.advance(now)
        numbers = [int(delta.request_id) for delta in deltas]
        times, ends = self._fronts.tell(numbers, [delta.finish_reason is not None for delta in deltas], now)
        for end in ends:
            heapq.heappush(self._leaving, end)
        for delta, number, heard in zip(deltas, numbers, times, strict=True):
            if delta.finish_reason is not None or delta.scheduled_at:  # neither is said of tokens in the middle
                visit = visits[number]
                if visit.first < 0 and delta.token_ids:
                    visit.first, visit.cached = heard, delta.cached_tokens
                if delta.finish_reason is not None:
                    visit.last, visit.preemptions = heard, delta.preemptions
                    ended.append(visit)
        self._end = max(self._end, times[-1] if times else 0.0)
        for name, tokens in replica.ended:  # a row of one that ended may still be in flight: it is told again
            visits[int(name)].output = tokens
        replica.ended.clear()
        if deltas:
            self._router.heard(deltas)
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
