"""One engine in virtual time: the loop of `engine/core.py` as `engine/process.py` turns it, with a scheduler that is real and a
device that is a number of seconds.

    turn     takes in who has come, plans a step, starts it       (the processor: `host` seconds)
    landing  the results of a step are taken in                   (when the device is through with it)

It has no clock: whoever calls says what time it is.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from quire.engine.plan_deadline import PlanDeadline
from quire.sched.plan_builder import Scheduled
from quire.sched.scheduler import Scheduler
from quire.sim.analytic import HostTime, StepShape, Window, shape_of
from quire.types.errors import EngineError, RequestError
from quire.types.outputs import TokenDelta
from quire.types.plan import Ints, StepPlan, StepResult
from quire.types.request import EngineRequest

ADMISSION = 0.0015  # seconds, as in `engine/process.py`: a step with newcomers is planned so much earlier


class Timing(Protocol):
    @property
    def host(self) -> HostTime: ...

    def seconds(self, shape: StepShape) -> float:
        """How long a step of this shape keeps the device busy."""


class StepRecord(NamedTuple):
    at: float  # its end
    seconds: float
    rows: int
    tokens: int
    waiting: int  # requests
    used: int  # pages


class Device:
    """Knows of each slot what its answer repeats."""

    def __init__(self, max_seqs: int, timing: Timing, windows: Sequence[Window]) -> None:
        self._timing, self._windows = timing, windows
        self._echo: Ints = np.zeros(max_seqs, np.int32)
        self._ones: Ints = np.ones(max_seqs, np.int32)

    def run(self, plan: StepPlan, keys: int) -> tuple[StepResult, float]:
        """`keys` lie in all pages that are in use."""
        for admission in plan.admitted:
            self._echo[admission.slot] = admission.seed
        if len(plan.outputs.draw) == len(plan.slot) == plan.tokens:  # most steps
            result = StepResult(plan.step, self._ones[: len(plan.slot)], self._echo[plan.slot])
        else:
            result = StepResult(plan.step, plan.sample.astype(np.int32), self._echo[plan.slot[plan.draw_row]])
        return result, self._timing.seconds(shape_of(plan, self._windows, keys))


class Replica:
    """`due` is when it wants to be called next, None while it has nothing to do. `pages` are what its cache has, of which the
    scheduler need not know those that no request will ever reach."""

    def __init__(
        self, scheduler: Scheduler, page_size: int, device: Device, host: HostTime, depth: int, pages: int | None = None
    ) -> None:
        self.pages = scheduler.pool.pages if pages is None else pages
        self.scheduler, self._page_size, self._device, self._host, self._depth = scheduler, page_size, device, host, depth
        self.due: float | None = None
        self.steps: list[StepRecord] = []
        self.refused: list[tuple[str, str]] = []  # id, why
        self.ended: list[tuple[str, int]] = []  # id, tokens of the answer, which the context may have cut short
        self.turns = 0
        self.joined: dict[str, int] = {}  # the turn in which a request was taken in
        self._inbox: list[EngineRequest] = []
        self._flights: deque[tuple[Scheduled, StepResult, float]] = deque()  # with when the device is through
        self._free_at = 0.0  # the device
        self._busy_since = 0.0
        self._landing = False  # what `due` is for
        self._deadline = PlanDeadline()
        self._began = 0.0  # of the present turn
        self._host_until = 0.0
        self._planned: Scheduled | None = None

    @property
    def unfinished(self) -> int:
        return len(self.scheduler.roster.live) + len(self._inbox)

    def add(self, request: EngineRequest, now: float) -> None:
        """It is taken in by the next turn, which need not wait as long as it was to."""
        self._inbox.append(request)
        if self.due is None:
            self.due = now
        elif not self._landing:
            self.due = min(self.due, _whole_milliseconds(now, self._deadline.due - ADMISSION))

    def advance(self, now: float) -> list[TokenDelta]:
        """What is due now."""
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
        scheduled = self._planned = self.scheduler.schedule(now + 1.0)  # at 0 would mean never
        if scheduled is None:
            self._host_until = now
            if not self._flights and self.scheduler.has_unfinished:
                raise EngineError("requests wait, but none of them can be planned")
            return
        self._host_until = now + self._host.seconds(len(scheduled.requests), len(scheduled.plan.admitted))
        if not self._flights:
            self._busy_since = self._host_until
        pool = self.scheduler.pool
        result, seconds = self._device.run(scheduled.plan, (pool.pages - pool.free) * self._page_size)
        self._free_at = max(self._free_at, self._host_until) + seconds
        self._flights.append((scheduled, result, self._free_at))
        self.scheduler.publish()

    def _land(self, now: float) -> list[TokenDelta]:
        scheduled, result, _ = self._flights.popleft()
        busy, self._busy_since = now - self._busy_since, now
        self.scheduler.took(scheduled, busy)
        left = len(self.scheduler.roster.live)
        deltas = self.scheduler.commit(scheduled, result)
        if len(self.scheduler.roster.live) < left:
            finished = (request for request in scheduled.requests if request.finished is not None)
            self.ended += [(request.spec.id, len(request.tokens) - len(request.spec.prompt)) for request in finished]
        pool, live, running = self.scheduler.pool, self.scheduler.roster.live, self.scheduler.roster.running
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
        if self.scheduler.has_unfinished or self._inbox:
            self.due = _whole_milliseconds(now, self._deadline.due - (ADMISSION if self._inbox else 0.0))
        else:
            self.due = None


def _whole_milliseconds(now: float, due: float) -> float:
    """The loop of an engine waits for so many, and less than one it does not wait."""
    return now + max(0, int(1000 * (due - now))) / 1000
