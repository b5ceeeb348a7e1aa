"""One engine in virtual time: the loop of `engine/core.py` and `engine/process.py`, with the real scheduler and a device
that only takes time.

    turn     admits new requests, plans and starts a step      (processor time: `host`)
    landing  commits the results of a step                   (when the device has finished it)

It has no clock: the caller passes the time.
"""

from collections import deque
from collections.abc import Sequence
from math import ceil
from typing import NamedTuple, Protocol

import numpy as np

from quire.engine.plan_deadline import PlanDeadline
from quire.sched.plan_builder import Scheduled
from quire.sched.scheduler import Scheduler
from quire.sim.analytic import HostTime, StepShape, Window, shape_of
from quire.sim.tiers import SimulatedTiers
from quire.types.errors import EngineError, RequestError
from quire.types.outputs import TokenDelta
from quire.types.plan import Ints, StepPlan, StepResult
from quire.types.request import EngineRequest

ADMISSION_S = 0.0015  # as in `engine/process.py`: a step with new requests is planned earlier by this time
ARRIVAL_WAIT_S = 0.0005  # as in `engine/core.py`: between looks for pages that a request waits for
MAX_WAIT_S = 0.1  # between turns while requests wait for pages


class SimulatedTiming(Protocol):
    @property
    def host(self) -> HostTime: ...

    def seconds(self, shape: StepShape) -> float:
        """Return how long a step of this shape occupies the device, or the slowest pipeline stage."""

    def latency(self, shape: StepShape) -> float:
        """Return the time from the start of a step to its result; with pipeline stages, steps follow each other sooner."""


class StepRecord(NamedTuple):
    at: float  # its end
    seconds: float
    rows: int
    tokens: int
    waiting: int  # requests
    used: int  # pages


class SimulatedDevice:
    """A device that samples the same token for all of an answer: the `echo` of the request in the slot."""

    def __init__(self, max_seqs: int, timing: SimulatedTiming, windows: Sequence[Window]) -> None:
        self._timing, self._windows = timing, windows
        self._echo: Ints = np.zeros(max_seqs, np.int32)
        self._ones: Ints = np.ones(max_seqs, np.int32)

    def run(self, plan: StepPlan, keys: int) -> tuple[StepResult, float, float]:
        """Return the result of a step, how long it occupies the device, and its latency. `keys`: in all used pages."""
        for admission in plan.admitted:
            self._echo[admission.slot] = admission.seed
        if len(plan.outputs.sample_after) == len(plan.slot) == plan.tokens:  # most steps
            result = StepResult(plan.step, self._ones[: len(plan.slot)], self._echo[plan.slot])
        else:
            result = StepResult(plan.step, plan.sample.astype(np.int32), self._echo[plan.slot[plan.sample_row]])
        shape = shape_of(plan, self._windows, keys)
        return result, self._timing.seconds(shape), self._timing.latency(shape)


class Replica:
    """An engine. `due`: when `advance` must be called next; None if idle. `pages`: of its cache; the scheduler may have fewer,
    since pages that no request will use do not change its decisions. `tiers`: copies to host memory and disk."""

    def __init__(
        self,
        scheduler: Scheduler,
        page_size: int,
        device: SimulatedDevice,
        host: HostTime,
        depth: int,
        pages: int | None = None,
        tiers: SimulatedTiers | None = None,
    ) -> None:
        self.pages = scheduler.pool.pages if pages is None else pages
        self.scheduler, self._page_size, self._device, self._host, self._depth = scheduler, page_size, device, host, depth
        self.tiers = tiers
        self.due: float | None = None
        self.steps: list[StepRecord] = []
        self.refused: list[tuple[str, str]] = []  # id, why
        self.ended: list[tuple[str, int]] = []  # id, tokens of the answer, which the context may limit
        self.turns = 0
        self.joined: dict[str, int] = {}  # the turn in which a request was admitted
        self._inbox: list[EngineRequest] = []
        self._flights: deque[tuple[Scheduled, StepResult, float]] = deque()  # with the time at which the device finishes
        self._free_at = 0.0  # the device
        self._busy_since = 0.0
        self._landing = False  # whether `due` is the end of a step
        self._deadline = PlanDeadline()
        self._began = 0.0  # of the current turn
        self._host_until = 0.0
        self._planned: Scheduled | None = None

    @property
    def unfinished(self) -> int:
        return len(self.scheduler.roster.live) + len(self._inbox)

    def add(self, request: EngineRequest, now: float) -> None:
        """Queue a request for the next turn, which it may bring forward."""
        self._inbox.append(request)
        if self.due is None:
            self.due = now
        elif not self._landing:
            self.due = min(self.due, _whole_milliseconds(now, self._deadline.due - ADMISSION_S))

    def advance(self, now: float) -> list[TokenDelta]:
        """Do what is due now."""
        if not self._landing:
            self._turn(now)
            deltas: list[TokenDelta] = []
        else:
            deltas = self._land(now)
        if len(self._flights) > self._depth or (self._flights and self._planned is None):
            self._landing, self.due = True, max(self._host_until, self._flights[0][2])
            return deltas
        self._end_turn(max(now, self._host_until))
        return deltas

    def _turn(self, now: float) -> None:
        for request in self._inbox:
            try:
                self.scheduler.add(request)
                self.joined[request.id] = self.turns
            except RequestError as error:
                self.refused.append((request.id, str(error)))
        self._inbox.clear()
        self.turns += 1
        self._began = now
        self._exchange(now)
        scheduled = self._planned = self.scheduler.schedule(now + 1.0)  # at 0 would mean never
        if scheduled is None:
            self._host_until = now
            if not self._flights and self.scheduler.has_unfinished and not self._waits:
                raise EngineError("requests wait, but none of them can be planned")
            return
        self._host_until = now + self._host.seconds(len(scheduled.requests), len(scheduled.plan.admitted))
        if not self._flights:
            self._busy_since = self._host_until
        pool = self.scheduler.pool
        result, seconds, latency = self._device.run(scheduled.plan, (pool.pages - pool.free) * self._page_size)
        begins = max(self._free_at, self._host_until)
        if not scheduled.requests:
            seconds = latency = 0.0  # it moves pages only
        if self.tiers is not None:
            begins = self.tiers.move(scheduled.plan, begins)
        self._free_at = begins + seconds
        self._flights.append((scheduled, result, begins + latency))
        self.scheduler.publish()

    def _land(self, now: float) -> list[TokenDelta]:
        scheduled, result, _ = self._flights.popleft()
        busy, self._busy_since = now - self._busy_since, now
        self.scheduler.record_step_time(scheduled, busy)
        left = len(self.scheduler.roster.live)
        deltas = self.scheduler.results.commit(scheduled, result)
        if len(self.scheduler.roster.live) < left:
            finished = (request for request in scheduled.requests if request.finished is not None)
            self.ended += [(request.spec.id, len(request.tokens) - len(request.spec.prompt)) for request in finished]
        pool, live, running = self.scheduler.pool, self.scheduler.roster.live, self.scheduler.roster.running
        if not scheduled.requests:
            return deltas
        self.steps.append(
            StepRecord(
                now, busy, len(scheduled.requests), scheduled.plan.tokens, len(live) - len(running), pool.pages - pool.free
            )
        )
        return deltas

    def _end_turn(self, now: float) -> None:
        self._landing = False
        plan, waited = self._planned, now - self._host_until
        rows, tokens = (len(plan.requests), plan.plan.tokens) if plan is not None and self._flights else (0, 0)
        self._deadline.turned(self._began, now, waited, rows, tokens)
        arrivals = self.scheduler.arrivals
        if plan is None and self.scheduler.has_unfinished and not self._inbox and self._waits:
            self.due = self._next_arrival(now)
        elif self.scheduler.has_unfinished or self._inbox or (arrivals is not None and arrivals.busy):
            self.due = _whole_milliseconds(now, self._deadline.due - (ADMISSION_S if self._inbox else 0.0))
        else:
            self.due = None

    @property
    def _waits(self) -> bool:
        """Return whether requests may wait for pages that are copied, read or written, now or from the next turn on."""
        arrivals = self.scheduler.arrivals
        if arrivals is None or self.tiers is None:
            return False
        return arrivals.waits and (arrivals.busy or self.tiers.due is not None)

    def _exchange(self, now: float) -> None:
        if self.tiers is not None and self.scheduler.arrivals is not None:
            self.tiers.now = now
            self.scheduler.arrivals.exchange(self.tiers.call, lambda: now)

    def _next_arrival(self, now: float) -> float:
        """Return when the engine, which looks regularly, notices the next copy that ends."""
        arrivals, due = self.scheduler.arrivals, None if self.tiers is None else self.tiers.due
        soon = due is None or arrivals is None or arrivals.busy
        wait = 0.0 if soon or due is None else min(MAX_WAIT_S, due - now)
        return now + ARRIVAL_WAIT_S * max(1, ceil(wait / ARRIVAL_WAIT_S))


def _whole_milliseconds(now: float, due: float) -> float:
    """Round a wait as the loop of an engine does: down to whole milliseconds."""
    return now + max(0, int(1000 * (due - now))) / 1000
