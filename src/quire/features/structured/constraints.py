"""Structured outputs in the engine loop: masks for sampling, forced tokens, and grammars that are ready, lost or refused.

Grammars are followed in processes of their own (`grammar/`), which receive tokens from here. The scheduler learns here which
requests wait for a grammar.

There are two grammar processes, called lanes. Requests with slow grammars move to the second, where they delay only each other.
Slowness is measured as processor time of masks, so the load of the machine does not matter. All open requests with one grammar
share a budget in the first lane; when it is used up, all of them move. A step waits a few milliseconds for masks of the first
lane and never for masks of the second. The second process starts with the first request that needs it, ends with the last, and
runs at low priority. Slow grammars are remembered and start in the second lane.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from quire.features.structured.grammar import wire
from quire.features.structured.grammar.client import MAX_OPEN_GRAMMARS, Grammars, News, fingerprint, refusal
from quire.sched.limits import forced_end
from quire.sched.plan_builder import Scheduled
from quire.sched.scheduler import Scheduler
from quire.types.errors import NotSupported, RequestError
from quire.types.outputs import TokenDelta
from quire.types.plan import StepResult, Words
from quire.types.request import EngineRequest, Request
from quire.types.structured import StructuredOutputsParams

# ---- lanes

FIRST_LANE_CPU_S = 0.2  # processor time of slow masks in the first lane, for all open requests with one grammar
MAX_REMEMBERED = 1024


class GrammarLanes:
    def __init__(
        self,
        path: str,
        tokenizer: str | None,
        revision: str | None,
        vocab_size: int,
        eos_ids: Iterable[int],
        drafts: int = 0,
        backend: str = "guidance",
    ) -> None:
        """
        drafts: maximum draft tokens per request and step
        backend: "guidance" or "xgrammar"
        """
        start = wire.StartWorker(path, tokenizer, revision, vocab_size, sorted(eos_ids), MAX_OPEN_GRAMMARS, drafts, backend)
        self.first, self.second = Grammars(start), Grammars(start, gives_way=True)
        self._slow: OrderedDict[bytes, None] = OrderedDict()  # grammars

    def __contains__(self, name: str) -> bool:
        return name in self.first or name in self.second

    def __len__(self) -> int:
        return len(self.first) + len(self.second)

    @property
    def losses(self) -> int:
        return self.first.losses + self.second.losses

    def open(self, request: EngineRequest) -> None:
        params = request.params.structured_outputs
        slow = self._slow and params is not None and fingerprint(params) in self._slow
        (self.second if slow else self.first).open(request)

    def close(self, name: str) -> None:
        if name in self.second:
            self.second.close(name)
            if not len(self.second):
                self.second.stop()
        else:
            self.first.close(name)

    def check(self, params: StructuredOutputsParams) -> None:
        self.first.check(params)

    def prepare(self) -> None:
        self.first.prepare()

    def stop(self) -> None:
        self.first.stop()
        self.second.stop()

    def accept(self, name: str, tokens: Sequence[int]) -> None:
        (self.second if name in self.second else self.first).accept(name, tokens)

    def guess(self, name: str, drafts: Sequence[int]) -> None:
        (self.second if name in self.second else self.first).guess(name, drafts)

    def send(self) -> None:
        self.first.send()
        self.second.send()

    def wait(self, seconds: float) -> None:
        busy = [lane for lane in (self.first, self.second) if len(lane)]
        for lane in busy:
            lane.wait(seconds / len(busy))

    def news(self) -> News:
        news = self.first.news()
        for entry in self.first.take_slow(FIRST_LANE_CPU_S, self._slow):
            self._remember(entry.grammar)
            self.second.adopt(entry)
            news.move(entry.name or "")
        if len(self.second):
            news.add(self.second.news())
        return news

    def wait_forced(self, seconds: float) -> None:
        self.first.wait_forced(seconds)

    def forced(self) -> list[tuple[str, list[int]]]:
        return self.first.forced() + self.second.forced()

    def late(self, names: Sequence[str], seconds: float) -> list[str]:
        late = self.first.late(names, seconds)
        return late + self.second.late(names, 0.0) if len(self.second) else late

    def masks(self, names: Sequence[str], drafts: Sequence[int] | None = None) -> Words:
        masks = self.first.masks(names, drafts)
        for i, name in enumerate(names) if len(self.second) else ():
            if name in self.second:
                masks[i] = self.second.masks([name], [drafts[i] if drafts else 0])[0]
        return masks

    def _remember(self, grammar: bytes) -> None:
        self._slow[grammar] = None
        if len(self._slow) > MAX_REMEMBERED:
            self._slow.popitem(last=False)


# ---- constraints of the engine loop


GRAMMAR_WAIT = 0.005  # seconds, while there is nothing else to do
MASK_WAIT = 0.01  # seconds that a step waits for masks; rows whose masks are later are suspended
JUMP_PRICE = 2  # steps by which a row of several tokens delays the other requests


class Constraints:
    """`report` receives deltas that are decided here; it must call `note`. Before a request asks for masks (`begun`) there
    is nothing to note, to expect or to do before a plan."""

    def __init__(self, scheduler: Scheduler, grammars: GrammarLanes | None, report: Callable[[list[TokenDelta]], None]) -> None:
        self.grammars, self._scheduler, self._report = grammars, scheduler, report
        self.begun = False
        self.on_refused: Callable[[str, RequestError], None] | None = (
            None  # called for requests whose grammar or adapter is refused
        )

    @property
    def losses(self) -> int:
        return 0 if self.grammars is None else self.grammars.losses

    def supported(self) -> GrammarLanes:
        if self.grammars is None:
            raise NotSupported("structured_outputs and thinking_token_budget cannot be used: this engine has no masks")
        self.begun = True
        return self.grammars

    def prepare(self) -> None:
        """Start the grammar process before the first request needs it."""
        if self.grammars is not None:
            self.grammars.prepare()

    def check(self, params: StructuredOutputsParams) -> None:
        """Wait until the constraint is compiled. Raises RequestError if it cannot be."""
        self.supported().check(params)

    def open(self, request: EngineRequest) -> None:
        if request.params.structured_outputs is not None:
            self.supported().open(request)

    def note(self, deltas: list[TokenDelta]) -> None:
        """Pass new tokens on to the grammars, and close those of requests that ended."""
        for delta in deltas if self.grammars else ():
            if delta.finish_reason is not None:
                self.supported().close(delta.request_id)
            else:
                self.supported().accept(delta.request_id, delta.token_ids)

    def expect(self, scheduled: Scheduled, result: StepResult, drafted: Iterable[Request]) -> None:
        """Pass on draft tokens after the noted tokens, drafted on the device or on the host."""
        if not self.grammars:
            return
        for request in drafted:
            if request.constrained:
                self.grammars.guess(request.spec.id, request.drafting.tokens)
        for row, drafts in result.drafts.items():
            self.grammars.guess(scheduled.requests[row].spec.id, drafts.tolist())
        self.grammars.send()

    def wait(self) -> None:
        if self.grammars:
            self.grammars.wait(GRAMMAR_WAIT)

    def stop(self) -> None:
        if self.grammars is not None:
            self.grammars.stop()

    def before_plan(self, depth: int, in_flight: bool) -> None:
        """Apply the grammars' news and forced tokens. in_flight: a step is in flight."""
        if self.grammars:
            self._take_news(self.grammars)
            self._jump(self.grammars, depth, in_flight)

    def masks(self, scheduled: Scheduled) -> Words:
        """Return the masks of the masked samples. Rows whose masks are late are suspended: their tokens do not count."""
        grammars, plan = self.supported(), scheduled.plan
        rows = plan.sample_row[plan.masked]
        requests = [scheduled.requests[row] for row in rows.tolist()]
        names = [request.spec.id for request in requests]
        for name in grammars.late(list(dict.fromkeys(names)), MASK_WAIT):
            self._scheduler.roster.suspend(name)
        self._take_news(grammars)
        drafts = plan.masked - np.searchsorted(plan.sample_row, rows)  # before each sample
        masks = grammars.masks(names, drafts.tolist())
        for request, mask in zip(requests, masks, strict=True):
            token = forced_end(request)
            if token is not None:
                mask[:] = 0
                mask[token // 32] = 1 << token % 32
        return masks

    def _take_news(self, grammars: GrammarLanes) -> None:
        """Apply which grammars were compiled, refused, lost or have failed."""
        news = grammars.news()
        for name in news.lost:
            self._scheduler.roster.suspend(name)
        for name in news.ready:
            self._scheduler.roster.mark_ready(name)
        for name, error in news.failed:
            self._report(self._scheduler.end(name, error))
        for name, error in news.refused:
            self.refuse(name, refusal(error))

    def refuse(self, name: str, why: RequestError) -> None:
        """End a request that was added and is refused afterwards."""
        ending = self._scheduler.end(name, str(why))
        if self.on_refused is None:
            self._report(ending)
            return
        if self.grammars:
            self.grammars.close(name)
        self.on_refused(name, why)

    def _jump(self, grammars: GrammarLanes, depth: int, in_flight: bool) -> None:
        """Where a grammar leaves no choice, tokens are taken without being sampled.

        With a step in flight, a request has to pause for that, and its longer row may slow down the step of the others: only
        a number of tokens that makes up for it is worth that.
        """
        if not in_flight:
            grammars.wait_forced(MASK_WAIT)
        for name, tokens in grammars.forced():
            left = len(tokens) - self._scheduler.in_flight(name)  # a row in flight samples the first of them
            if not depth or left > JUMP_PRICE * self._scheduler.stats.running:
                self._report(self._scheduler.extend(name, tokens))
        grammars.send()
