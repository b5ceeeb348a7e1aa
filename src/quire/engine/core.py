"""The engine core: the loop that joins a scheduler with an executor.

It has no thread, and its clock is an argument: the caller runs it by `step`. It knows no text, models or sockets.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from quire.engine.executor.base import Executor, Flight
from quire.engine.watch import Watch
from quire.features.logits_processors.loading import refuse_extra_args
from quire.features.lora.manager import LoRAManager
from quire.features.structured.constraints import Constraints, GrammarLanes
from quire.sched.draft.speculation import Speculation
from quire.sched.plan_builder import Scheduled
from quire.sched.scheduler import Scheduler
from quire.types.errors import EngineDead
from quire.types.outputs import TokenDelta
from quire.types.plan import StepResult, Words
from quire.types.request import EngineRequest, Request
from quire.types.sampling import SamplingParams
from quire.types.stats import Stats

logger = logging.getLogger(__name__)
ARRIVAL_WAIT_S = 0.0005  # between polls while there is nothing to run
PLANNING_S = 0.01  # shorter pauses of the device are planning, not waiting for work


class EngineCore:
    """An engine: scheduler, executor, grammars and LoRA adapters."""

    number = 0  # of several engines; here there is one

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        depth: int,
        grammars: GrammarLanes | None = None,
        clock: Callable[[], float] = time.monotonic,
        adapters: tuple[int, int] = (0, 0),
        validate: Callable[[SamplingParams], None] = refuse_extra_args,
    ) -> None:
        """validate: raises RequestError for parameters that logits processors refuse."""
        self.scheduler, self.executor, self.depth, self._clock = scheduler, executor, depth, clock
        self._validate = validate
        self.constraints = Constraints(scheduler, grammars, self._queue_deltas)
        self.adapters = LoRAManager(scheduler.roster, executor, *adapters, self.constraints.refuse)
        # per step: whether another was in flight at its launch, and whether kernels or graphs were made for it
        self._flights: deque[tuple[Scheduled, Flight, bool, bool]] = deque()
        self._prepared = 0  # kernels and graphs so far
        self._deltas: list[TokenDelta] = []  # returned by the next step
        self._busy_since = 0.0  # when the device began the first flight
        self._landed_at = 0.0  # when the latest flight ended
        self._guessed = 0.0  # seconds after it, until draft tokens were ready
        self.tokens = self.rows = 0  # of the latest step
        self.waited = 0.0  # seconds that the latest step waited for the device
        self.watch: Watch | None = None  # None without viewers
        self.before_admission: Callable[[list[str]], None] | None = (
            None  # called with the running requests before new ones join
        )

    def add(self, request: EngineRequest) -> None:
        """Add a request. It runs once its grammar is compiled and its LoRA adapter is on the device.

        If the grammar cannot be compiled or followed in time, or the adapter cannot be read, `constraints.on_refused` is
        called or a last delta reports it.
        """
        self._validate(request.params)
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
        """End requests now; the next step returns their last deltas. Unknown and finished ids are ignored."""
        self._queue_deltas(self.scheduler.abort(ids))

    def release(self, ids: Iterable[str]) -> None:
        self.scheduler.roster.release(ids)

    def reset_prefix_cache(self, preempt_running: bool = False) -> bool:
        done = self.scheduler.reset_prefix_cache(preempt_running)
        if done and self.scheduler.arrivals is not None and self.scheduler.arrivals.disk is not None:
            self._call_tiers("clear_disk")
        return done

    def retire_adapter(self, version: str) -> None:
        """Release an adapter that no request will use again."""
        self.adapters.retire(version)

    def expect_adapter(self, path: str, stamp: str) -> None:
        """Read an adapter ahead, unless its files have changed."""
        self.adapters.expect(path, stamp)

    def call_all(self, method: str, *args: Any) -> list[Any]:
        """Call a method on every rank; return the results in their order."""
        return self.executor.call_all(method, *args)

    def be_watched(self, watched: bool) -> None:
        if self.watch is not None:
            self.watch.stop()
        self.watch = Watch(self.scheduler.roster, self.scheduler.pool, self._clock) if watched else None

    @property
    def has_unfinished(self) -> bool:
        arrivals = self.scheduler.arrivals
        busy = self.adapters.busy or (arrivals is not None and arrivals.busy)
        return self.scheduler.has_unfinished or bool(self._deltas) or busy

    @property
    def step_in_flight(self) -> bool:
        """Whether a step is in flight."""
        return bool(self._flights)

    @property
    def stats(self) -> Stats:
        return msgspec.structs.replace(
            self.scheduler.stats, device=self.executor.counts, grammar_losses=self.constraints.losses,
            adapter_reads=self.adapters.reads, adapter_puts=self.adapters.puts,
        )  # fmt: skip

    def step(self) -> list[TokenDelta]:
        """Run one turn of the loop: plan and submit a step, take the results that are due."""
        while self._flights and self.scheduler.waits:
            self._land(*self._flights.popleft())
        if self.constraints.begun:
            self.constraints.before_plan(self.depth, self.step_in_flight)
        if self.adapters.slots:
            self.adapters.turn()
        if self.scheduler.arrivals is not None:
            self.scheduler.arrivals.exchange(self._call_tiers, self._clock)
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
        elif not self._flights and not self._deltas and self.scheduler.arrivals is not None and self.scheduler.arrivals.waits:
            time.sleep(ARRIVAL_WAIT_S)
        elif not self._flights and not self._deltas:
            (self.adapters if self.adapters.reading else self.constraints).wait()
        while len(self._flights) > self.depth or (self._flights and scheduled is None):
            self._land(*self._flights.popleft())
        deltas, self._deltas = self._deltas, []
        return deltas

    def idle(self) -> bool:
        """Prepare for later steps in idle time. Return False if nothing is left to prepare."""
        speculation = self.scheduler.speculation
        more = self.executor.idle()
        self._has_prepared()
        return more or (speculation is not None and speculation.idle())

    def check(self) -> None:
        """Raise EngineDead if the executor is lost. Called in idle time."""
        self.executor.check()

    def stop(self) -> None:
        """Stop the executor. Unfinished requests get no more deltas."""
        self._flights.clear()
        self.constraints.stop()
        self.adapters.stop()
        if self.scheduler.speculation is not None:
            self.scheduler.speculation.close()
        self.executor.stop()

    def _call_tiers(self, method: str, *args: Any) -> list[Any]:
        return self.executor.call_all("call_part", "tiers", method, *args)

    def _submit(self, scheduled: Scheduled) -> None:
        in_flight = bool(self._flights)
        if not in_flight:
            self._busy_since = self._clock()
        try:
            flight = self.executor.submit(scheduled.plan)
            if len(scheduled.plan.masked):
                self._sample_masked(scheduled, flight)
            self._flights.append((scheduled, flight, in_flight, self._has_prepared()))
        except EngineDead:
            raise
        except Exception as error:
            self._fail(scheduled, error)

    def _has_prepared(self) -> bool:
        """Return whether kernels or graphs were made since the last call: the time of such a step is not representative."""
        counts, before = self.executor.counts, self._prepared
        self._prepared = counts.captures + counts.compilations
        return self._prepared != before

    def _sample_masked(self, scheduled: Scheduled, flight: Flight) -> None:
        while self._flights:  # masks depend on the tokens of earlier steps
            self._land(*self._flights.popleft())
        flight.sample(self._masks(scheduled))

    def _masks(self, scheduled: Scheduled) -> Words:
        if self.watch is None:
            return self.constraints.masks(scheduled)
        began = self._clock()
        masks = self.constraints.masks(scheduled)
        self.watch.waited_for_masks(scheduled.plan.step, self._clock() - began)
        return masks

    def _queue_deltas(self, deltas: list[TokenDelta]) -> None:
        """Return deltas with the next step."""
        self._deltas += deltas
        if self.constraints.begun:
            self.constraints.note(deltas)

    def _land(self, scheduled: Scheduled, flight: Flight, in_flight: bool, prepared: bool) -> None:
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
            gap = self._busy_since - self._landed_at - guessed  # idle time of the device before this step
            busy, self._busy_since = ended - self._busy_since, ended
            idle_before = guessed + (gap if not in_flight and 0 < gap < PLANNING_S else 0.0)
            seconds, idle_before = (0.0, 0.0) if prepared else (busy, idle_before)
            self.scheduler.record_step_time(scheduled, seconds, idle_before=idle_before, synchronous=not in_flight)
            self._landed_at = ended
            if self.watch is not None:
                self.watch.landing(scheduled, result, busy, ended)
            self._queue_deltas(self.scheduler.results.commit(scheduled, result))
            if self.watch is not None:
                self.watch.landed()
            speculation = self.scheduler.speculation
            drafted = () if speculation is None else self._guess(speculation, scheduled, result)
            if self.constraints.begun:
                self.constraints.expect(scheduled, result, drafted)

    def _guess(self, speculation: Speculation, scheduled: Scheduled, result: StepResult) -> list[Request]:
        """Draft on the host. It counts as a wait of the device, unless the drafter only looks at text."""
        began = self._clock()
        drafted = speculation.landed(scheduled, result)
        if speculation.next_drafts:
            self._guessed = self._clock() - began
        return drafted

    def _fail(self, scheduled: Scheduled, error: Exception) -> None:
        """End the requests of a failed step, and no others."""
        logger.error("step %d failed", scheduled.plan.step, exc_info=error)
        self._queue_deltas(self.scheduler.results.fail(scheduled, f"{type(error).__name__}: {error}"))
        arrivals = self.scheduler.arrivals
        if arrivals is not None and (pages := arrivals.of_step(scheduled.plan.step)):
            self._call_tiers("abandon", pages)
            arrivals.lost(pages)
