"""The engine core: the one loop that joins a scheduler with an executor.

It has no thread and no clock but the one it is given: the caller turns it with `step`. It knows no text, models or sockets.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable

import msgspec

from quire.engine.executor.base import Executor, Flight
from quire.grammar.client import refusal
from quire.grammar.lanes import Lanes
from quire.sched.plan_builder import Scheduled
from quire.sched.scheduler import Scheduler
from quire.sched.thinking import forced_end
from quire.types.errors import EngineDead, NotSupported, RequestError
from quire.types.outputs import TokenDelta
from quire.types.plan import Words
from quire.types.request import EngineRequest
from quire.types.stats import Stats
from quire.types.structured import StructuredOutputsParams

logger = logging.getLogger(__name__)

GRAMMAR_WAIT = 0.005  # seconds, while there is nothing else to do
MASK_WAIT = 0.01  # seconds that a step waits for masks; rows whose masks come later sit it out
JUMP_PRICE = 2  # steps that a row of several tokens costs everyone


class EngineCore:
    """`depth` is how many steps may be in flight while the next one is planned: 0 is synchronous, 1 overlaps CPU and device."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        depth: int,
        grammars: Lanes | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.scheduler, self.executor, self.depth, self._clock = scheduler, executor, depth, clock
        self._grammars = grammars
        self._flights: deque[tuple[Scheduled, Flight]] = deque()
        self._deltas: list[TokenDelta] = []  # to be handed out by the next step
        self.tokens = self.rows = 0  # run by the latest step
        self.waited = 0.0  # seconds, by the latest step, for the device
        self.on_refused: Callable[[str, RequestError], None] | None = None  # told of requests whose grammar cannot be followed
        self.before_admission: Callable[[list[str]], None] | None = None  # told who runs when new ones join, before they do

    def add(self, request: EngineRequest) -> None:
        """A request with a grammar runs when that is compiled. If it cannot be, or cannot be followed in reasonable time,
        `on_refused` is told, or a last delta tells."""
        grammars = self._masking() if request.params.needs_masks else None
        self.scheduler.add(request)
        if grammars is not None and request.params.structured_outputs is not None:
            grammars.open(request)

    def check_grammar(self, params: StructuredOutputsParams) -> None:
        """Waits until it is known whether this can be compiled. Raises RequestError if not."""
        self._masking().check(params)

    def abort(self, ids: Iterable[str]) -> None:
        """Ends requests now; the next step says so with their last delta. Unknown and finished ids are ignored."""
        self._tell(self.scheduler.abort(ids))

    def release(self, ids: Iterable[str]) -> None:
        self.scheduler.release(ids)

    def reset_prefix_cache(self) -> bool:
        return self.scheduler.reset_prefix_cache()

    @property
    def has_unfinished(self) -> bool:
        return self.scheduler.has_unfinished or bool(self._deltas)

    @property
    def ahead(self) -> bool:
        """Is a step in flight?"""
        return bool(self._flights)

    @property
    def stats(self) -> Stats:
        losses = 0 if self._grammars is None else self._grammars.losses
        return msgspec.structs.replace(self.scheduler.stats, device=self.executor.counts, grammar_losses=losses)

    def step(self) -> list[TokenDelta]:
        """One turn of the loop: plan and submit a step, take in those that are due."""
        if self._grammars:
            self._hear(self._grammars)
            self._jump(self._grammars)
        scheduled = self.scheduler.schedule(self._clock())
        self.tokens, self.rows = (0, 0) if scheduled is None else (scheduled.plan.tokens, len(scheduled.plan.slot))
        self.waited = 0.0
        if scheduled is not None:
            if self.before_admission is not None and scheduled.plan.admitted:
                self.before_admission(self.scheduler.running)
            self._submit(scheduled)
            self.scheduler.publish()
        elif self._grammars and not self._flights and not self._deltas:
            self._grammars.wait(GRAMMAR_WAIT)
        while len(self._flights) > self.depth or (self._flights and scheduled is None):
            self._land(*self._flights.popleft())
        deltas, self._deltas = self._deltas, []
        return deltas

    def idle(self) -> bool:
        """For moments without work: lets the executor prepare for some. False = it has nothing left to prepare."""
        return self.executor.idle()

    def stop(self) -> None:
        """Lets the executor go. Requests that are not finished by now get no answer."""
        self._flights.clear()
        if self._grammars is not None:
            self._grammars.stop()
        self.executor.stop()

    def _masking(self) -> Lanes:
        if self._grammars is None:
            raise NotSupported("structured_outputs and thinking_token_budget cannot be used: this engine has no masks")
        return self._grammars

    def _submit(self, scheduled: Scheduled) -> None:
        try:
            flight = self.executor.submit(scheduled.plan)
            if len(scheduled.plan.masked):
                while self._flights:  # masks depend on their tokens
                    self._land(*self._flights.popleft())
                flight.draw(self._masks(scheduled, self._masking()))
            self._flights.append((scheduled, flight))
        except EngineDead:
            raise
        except Exception as error:
            self._fail(scheduled, error)

    def _masks(self, scheduled: Scheduled, grammars: Lanes) -> Words:
        """Of the masked rows. Those whose masks are late sit the step out: what they draw does not count."""
        requests = [scheduled.requests[row] for row in scheduled.plan.masked.tolist()]
        names = [request.spec.id for request in requests]
        for name in grammars.late(names, MASK_WAIT):
            self.scheduler.suspend(name)
        self._hear(grammars)
        masks = grammars.masks(names)
        for request, mask in zip(requests, masks, strict=True):
            token = forced_end(request)
            if token is not None:
                mask[:] = 0
                mask[token // 32] = 1 << token % 32
        return masks

    def _hear(self, grammars: Lanes) -> None:
        """Grammars that are compiled or cannot be, have to be compiled again, or failed later."""
        news = grammars.news()
        for name in news.lost:
            self.scheduler.suspend(name)
        for name in news.ready:
            self.scheduler.ready(name)
        for name, error in news.failed:
            self._tell(self.scheduler.end(name, error))
        for name, error in news.refused:
            why = refusal(error)
            ending = self.scheduler.end(name, str(why))
            if self.on_refused is None:
                self._tell(ending)
            else:
                grammars.close(name)
                self.on_refused(name, why)

    def _jump(self, grammars: Lanes) -> None:
        """Where a grammar leaves no choice, tokens are taken without being drawn.

        A step ahead, a request has to pause for that, and the longer row it gets then may slow the others' step down: only a
        number of tokens that makes up for it is worth that.
        """
        if not self._flights:
            grammars.settle(MASK_WAIT)
        for name, tokens in grammars.forced():
            left = len(tokens) - self.scheduler.in_flight(name)  # a row in flight draws the first of them
            if not self.depth or left > JUMP_PRICE * self.stats.running:
                self._tell(self.scheduler.extend(name, tokens))
        grammars.send()

    def _tell(self, deltas: list[TokenDelta]) -> None:
        """To be handed out; the grammars hear of it first."""
        self._deltas += deltas
        if self._grammars:
            for delta in deltas:
                if delta.finish_reason is not None:
                    self._grammars.close(delta.request_id)
                else:
                    self._grammars.tell(delta.request_id, delta.token_ids)

    def _land(self, scheduled: Scheduled, flight: Flight) -> None:
        began = self._clock()
        try:
            result = flight.result()
        except EngineDead:
            raise
        except Exception as error:
            self._fail(scheduled, error)
        else:
            self.waited += self._clock() - began
            self._tell(self.scheduler.commit(scheduled, result))
            if self._grammars:
                self._grammars.send()

    def _fail(self, scheduled: Scheduled, error: Exception) -> None:
        """A lost step ends its own requests and no others."""
        logger.error("step %d failed", scheduled.plan.step, exc_info=error)
        self._tell(self.scheduler.fail(scheduled, f"{type(error).__name__}: {error}"))
