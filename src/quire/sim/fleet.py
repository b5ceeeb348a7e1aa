"""Replicas and arrivals, in the order of time: one queue of moments, and no waiting.

Requests that come at the same moment as something else happens come first.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

from quire.sim.front import NO_FRONT, FrontEnds, FrontTime
from quire.sim.replica import Replica
from quire.sim.router import Router
from quire.sim.trace import Arrival, Trace
from quire.types.request import EngineRequest
from quire.types.sampling import SamplingParams

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
