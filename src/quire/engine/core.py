"""The engine core: the one loop that joins a scheduler with an executor.

It has no thread and no clock but the one it is given: the caller turns it with `step`. It knows no text, models or sockets.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from quire.engine.executor.base import Executor, Flight
from quire.engine.watch import Watch
from quire.features.lora.manager import LoRAManager
from quire.features.structured.constraints import Constraints, GrammarLanes
from quire.sched.draft.speculation import Speculation
from quire.sched.plan_builder import Scheduled
from quire.sched.scheduler import Scheduler
from quire.types.errors import EngineDead
from quire.types.outputs import TokenDelta
from quire.types.plan import StepResult, Words
from quire.types.request import EngineRequest, Request
from quire.types.stats import Stats

logger = logging.getLogger(__name__)
SHORT = 0.01  # seconds without a step that are planning, and not waiting for work


class EngineCore:
    """`depth` is how many steps may be in flight while the next one is planned: 0 is synchronous, 1 overlaps CPU and device.
    `adapters`: how many there may be on the device, and in the host's memory."""

    number = 0  # of several engines; this is one

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        depth: int,
        grammars: GrammarLanes | None = None,
        clock: Callable[[], float] = time.monotonic,
        adapters: tuple[int, int] = (0, 0),
    ) -> None:
        self.scheduler, self.executor, self.depth, self._clock = scheduler, executor, depth, clock
        self.constraints = Constraints(scheduler, grammars, self._tell)
        self.adapters = LoRAManager(scheduler.roster, executor, *adapters, self.constraints.refuse)
        # whether it was launched behind another, and whether something had to be prepared for it
        self._flights: deque[tuple[Scheduled, Flight, bool, bool]] = deque()
        self._prepared = 0  # kernels and graphs so far
        self._deltas: list[TokenDelta] = []  # to be handed out by the next step
        self._busy_since = 0.0  # the device with the first of them
        self._landed_at = 0.0  # the latest
        self._guessed = 0.0  # seconds behind it, until drafts were there
        self.tokens = self.rows = 0  # run by the latest step
        self.waited = 0.0  # seconds, by the latest step, for the device
        self.watch: Watch | None = None  # for viewers, while there are any
        self.before_admission: Callable[[list[str]], None] | None = None  # told who runs when new ones join, before they do

    def add(self, request: EngineRequest) -> None:
        """A request with a grammar runs when that is compiled, one with an adapter when that is on the device. If the grammar
        cannot be compiled or followed in reasonable time, or the adapter be read, `constraints.on_refused` is told, or a last
        delta tells."""
        masked, adapted = request.params.needs_masks, request.extras.lora is not None
        if masked:
            self.constraints.supported()
        if adapted:
            self.adapters.supported()
        self.scheduler.add(request)
        if masked:
            self.constraints.open(request)
        if adapted:
            self.adapters.open(request)

    def abort(self, ids: Iterable[str]) -> None:
        """Ends requests now; the next step says so with their last delta. Unknown and finished ids are ignored."""
        self._tell(self.scheduler.abort(ids))

    def release(self, ids: Iterable[str]) -> None:
        self.scheduler.release(ids)

    def reset_prefix_cache(self, preempt_running: bool = False) -> bool:
        return self.scheduler.reset_prefix_cache(preempt_running)

    def retire_adapter(self, version: str) -> None:
        """No request will ask for it any more."""
        self.adapters.retire(version)

    def expect_adapter(self, path: str, stamp: str) -> None:
        """It will be asked for soon, unless its files have changed by then."""
        self.adapters.expect(path, stamp)

    def call_all(self, method: str) -> list[Any]:
        """On every rank, the answers in their order."""
        return self.executor.call_all(method)

    def be_watched(self, watched: bool) -> None:
        if self.watch is not None:
            self.watch.stop()
        self.watch = Watch(self.scheduler.roster, self.scheduler.pool, self._clock) if watched else None

    @property
    def has_unfinished(self) -> bool:
        return self.scheduler.has_unfinished or bool(self._deltas) or self.adapters.busy

    @property
    def ahead(self) -> bool:
        """Is a step in flight?"""
        return bool(self._flights)

    @property
    def stats(self) -> Stats:
        return msgspec.structs.replace(
            self.scheduler.stats, device=self.executor.counts, grammar_losses=self.constraints.losses,
            adapter_reads=self.adapters.reads, adapter_puts=self.adapters.puts,
        )  # fmt: skip

    def step(self) -> list[TokenDelta]:
        """One turn of the loop: plan and submit a step, take in those that are due."""
        while self._flights and self.scheduler.waits:
            self._land(*self._flights.popleft())
        if self.constraints.begun:
            self.constraints.before_plan(self.depth, self.ahead)
        if self.adapters.places:
            self.adapters.turn()
        scheduled = self.scheduler.schedule(self._clock())
        self.tokens, self.rows = (0, 0) if scheduled is None else (scheduled.plan.tokens, len(scheduled.plan.slot))
        self.waited = 0.0
        if scheduled is not None:
            if self.before_admission is not None and scheduled.plan.admitted:
                self.before_admission(self.scheduler.running)
            if self.watch is not None:
                self.watch.planned(scheduled)
            self._submit(scheduled)
            self.scheduler.catch_up()
        elif not self._flights and not self._deltas:
            (self.adapters if self.adapters.reading else self.constraints).wait()
        while len(self._flights) > self.depth or (self._flights and scheduled is None):
            self._land(*self._flights.popleft())
        deltas, self._deltas = self._deltas, []
        return deltas

    def idle(self) -> bool:
        """For moments without work: lets the executor prepare for some. False = it has nothing left to prepare."""
        speculation = self.scheduler.speculation
        more = self.executor.idle()
        self._has_prepared()
        return more or (speculation is not None and speculation.idle())

    def check(self) -> None:
        """For moments without work: raises EngineDead if the executor is lost."""
        self.executor.check()

    def stop(self) -> None:
        """Lets the executor go. Requests that are not finished by now get no answer."""
        self._flights.clear()
        self.constraints.stop()
        self.adapters.stop()
        if self.scheduler.speculation is not None:
            self.scheduler.speculation.close()
        self.executor.stop()

    def _submit(self, scheduled: Scheduled) -> None:
        ahead = bool(self._flights)
        if not ahead:
            self._busy_since = self._clock()
        try:
            flight = self.executor.submit(scheduled.plan)
            if len(scheduled.plan.masked):
                self._draw_masked(scheduled, flight)
            self._flights.append((scheduled, flight, ahead, self._has_prepared()))
        except EngineDead:
            raise
        except Exception as error:
            self._fail(scheduled, error)

    def _has_prepared(self) -> bool:
        """Since this was asked last: what then took long says nothing of the next time."""
        counts, before = self.executor.counts, self._prepared
        self._prepared = counts.captures + counts.compilations
        return self._prepared != before

    def _draw_masked(self, scheduled: Scheduled, flight: Flight) -> None:
        while self._flights:  # masks depend on their tokens
            self._land(*self._flights.popleft())
        flight.draw(self._masks(scheduled))

    def _masks(self, scheduled: Scheduled) -> Words:
        if self.watch is None:
            return self.constraints.masks(scheduled)
        began = self._clock()
        masks = self.constraints.masks(scheduled)
        self.watch.waited_for_masks(scheduled.plan.step, self._clock() - began)
        return masks

    def _tell(self, deltas: list[TokenDelta]) -> None:
        """To be handed out."""
        self._deltas += deltas
        if self.constraints.begun:
            self.constraints.note(deltas)

    def _land(self, scheduled: Scheduled, flight: Flight, ahead: bool, prepared: bool) -> None:
        began = self._clock()
        try:
            result = flight.result()
        except EngineDead:
            raise
        except Exception as error:
            self._fail(scheduled, error)
        else:
            ended = self._clock()
            self.waited += ended - began
            guessed, self._guessed = self._guessed, 0.0
            paused = self._busy_since - self._landed_at - guessed  # the device, before this step
            busy, self._busy_since = ended - self._busy_since, ended
            waited = guessed + (paused if not ahead and 0 < paused < SHORT else 0.0)
            self.scheduler.took(scheduled, *((0.0, 0.0) if prepared else (busy, waited)), not ahead)
            self._landed_at = ended
            if self.watch is not None:
                self.watch.landing(scheduled, result, busy, ended)
            self._tell(self.scheduler.commit(scheduled, result))
            if self.watch is not None:
                self.watch.landed()
            speculation = self.scheduler.speculation
            drafted = () if speculation is None else self._guess(speculation, scheduled, result)
            if self.constraints.begun:
                self.constraints.expect(scheduled, result, drafted)

    def _guess(self, speculation: Speculation, scheduled: Scheduled, result: StepResult) -> list[Request]:
        """Drafts by the host, which count as a wait of the device if they are more than a look at a text."""
        began = self._clock()
        drafted = speculation.landed(scheduled, result)
        if speculation.ahead:
            self._guessed = self._clock() - began
        return drafted

    def _fail(self, scheduled: Scheduled, error: Exception) -> None:
        """A lost step ends its own requests and no others."""
        logger.error("step %d failed", scheduled.plan.step, exc_info=error)
        self._tell(self.scheduler.fail(scheduled, f"{type(error).__name__}: {error}"))
