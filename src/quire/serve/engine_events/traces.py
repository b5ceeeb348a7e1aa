"""What viewers may know of single requests: what engines saw of them, joined with what the server knows.

An engine knows when a request was added and what became of its time since. The server knows when it arrived, when its answer
received the end, and when an engine was lost. Together that is all of a request's life.
"""

import math
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from msgspec.structs import replace

from quire.serve.generation import answer_of
from quire.text.outputs import RequestAnswer
from quire.types import engine_snapshot as snapshots
from quire.types.engine_snapshot import PARTS, RequestSnapshot
from quire.types.stats import Finished

MOST_ENDED = 4096  # answers that ended, and whose engine has not said so yet
KEPT = 256  # finished requests, for those who come to look later
PATIENCE = 60.0  # seconds for an engine to report the end of a finished request: a step may be long
# states -> what the time is that an engine lost in them
_LOST = {
    "grammar": snapshots.GRAMMAR,
    "waiting": snapshots.QUEUE,
    "prompt": snapshots.PROMPT,
    "decode": snapshots.DECODE,
    "preempted": snapshots.PREEMPTED,
}
# what is taken back first where the engine was notified of the end later than the client
_TAKEN_BACK = (
    snapshots.DECODE, snapshots.OTHERS, snapshots.MASKS, snapshots.PREEMPTED, snapshots.PROMPT, snapshots.QUEUE,
    snapshots.GRAMMAR, snapshots.RESTART, snapshots.UNSEEN, snapshots.PREPARE,
)  # fmt: skip


@dataclass(frozen=True)
class _Ended:
    name: str
    choice: int
    arrived: float
    finished: float
    ttft: float | None
    reason: str
    generated: int


@dataclass(slots=True)
class RequestTrace:
    """`before`: seconds by part that earlier engines saw, and what is known from here."""

    seen: RequestSnapshot
    name: str
    choice: int
    arrived: float
    engine: int = 0  # who has it, of several
    before: list[float] = field(default_factory=lambda: [0.0] * len(PARTS))
    end: _Ended | None = None
    end_at: float = 0.0  # of the finished

    def as_event(self) -> dict[str, Any]:
        """As docs/events.md has it."""
        seen = self.seen
        answer, index = answer_of(self.name)
        parts = zip(PARTS, self.before, seen.parts, strict=True)
        event = {
            "key": seen.key, "id": answer, "index": index, "choice": self.choice, "engine": self.engine, "state": seen.state,
            "since": seen.since, "arrived": self.arrived, "prompt": seen.prompt, "cached": seen.cached,
            "drawn": seen.drawn, "drafted": seen.drafted, "accepted": seen.accepted, "max_tokens": seen.max_tokens,
            "grammar": seen.grammar, "adapter": seen.adapter or None, "preemptions": seen.preemptions,
            "parts": {name: before + now for name, before, now in parts if before or now},
        }  # fmt: skip
        if seen.state == "finished":
            event["wall"] = self.end_at - self.arrived
            event["ttft"] = None if self.end is None else self.end.ttft
            event["reason"] = seen.reason if self.end is None else self.end.reason
        return event


class RequestTraces:
    def __init__(self, owner: Callable[[str], RequestAnswer | None]) -> None:
        self._owner = owner
        self.open: dict[str, RequestTrace] = {}  # by key
        self.finished: deque[RequestTrace] = deque(maxlen=KEPT)
        self._ended: OrderedDict[str, _Ended] = OrderedDict()  # by key
        self._lost: dict[str, float] = {}  # key -> when its engine was lost
        self._down: dict[int, tuple[float, float]] = {}  # engine -> from when to when it was not there, the latest time
        self.changed: list[RequestTrace] = []  # since `take` was called

    def take(self) -> list[RequestTrace]:
        changed, self.changed = self.changed, []
        return changed

    # ---- events ----------------------------------------------------------------------------------------------------------

    def see(self, requests: Iterable[RequestSnapshot], engine: int = 0) -> None:
        for seen in requests:
            trace = self.open.get(seen.key)
            if trace is None:
                trace = self._begin(seen, engine)
                if trace is None:
                    continue
            elif seen.key in self._lost:
                trace.before[snapshots.RESTART] += max(0.0, seen.seen - self._lost.pop(seen.key))
            trace.seen = seen
            if seen.state == "finished":
                self._finish(trace, self._ended.pop(seen.key, None))
            else:
                self.changed.append(trace)

    def end(self, request: Finished) -> None:
        """An answer has finished. Its engine will report that, unless it is lost."""
        metrics = request.metrics
        ttft = metrics.first_token_latency if metrics.first_token_ts else None
        for choice, key in enumerate(request.engine_ids):
            ended = _Ended(
                request.request_id, choice, metrics.queued_ts, metrics.finished_ts, ttft, request.reasons[choice],
                request.generated[choice],
            )  # fmt: skip
            trace = self.open.get(key)
            if trace is not None and trace.seen.state == "restart":
                trace.before[snapshots.RESTART] += max(0.0, ended.finished - self._lost.pop(key))
                trace.seen = replace(trace.seen, since=ended.finished)
                self._finish(trace, ended)
            else:
                self._ended[key] = ended
        while len(self._ended) > MOST_ENDED:
            self._ended.popitem(last=False)

    def lose(self, now: float, engine: int = 0) -> None:
        """An engine is gone, and with it what it had seen since its latest snapshot."""
        self._down[engine] = (now, math.inf)
        for key, trace in list(self.open.items()):
            seen = trace.seen
            if seen.state == "restart" or trace.engine != engine:
                continue
            spent = list(seen.parts)
            spent[_LOST[seen.state]] += max(0.0, now - seen.since)
            trace.before = [a + b for a, b in zip(trace.before, spent, strict=True)]
            trace.seen = replace(seen, state="restart", since=now, parts=[0.0] * len(PARTS))
            self._lost[key] = now
            ended = self._ended.pop(key, None)
            if ended is None:
                self.changed.append(trace)
            else:
                self._finish(trace, ended)

    def regain(self, now: float, engine: int = 0) -> None:
        self._down[engine] = (self._down.get(engine, (0.0, 0.0))[0], now)

    def tidy(self, now: float) -> None:
        """Forgets what no engine will speak of again."""
        for key, trace in list(self.open.items()):
            if now - trace.seen.since > PATIENCE and self._owner(key) is None:
                ended = self._ended.pop(key, None)
                if ended is None or now - ended.finished > PATIENCE:
                    self._drop(key)
                else:
                    self._ended[key] = ended
        while self._ended and now - next(iter(self._ended.values())).finished > PATIENCE:
            self._ended.popitem(last=False)

    def of(self, tenant: str | None) -> Iterator[RequestTrace]:
        """A tenant's open requests, newest first; None: everybody's."""
        return (trace for trace in reversed(self.open.values()) if tenant is None or trace.seen.tenant == tenant)

    def finished_of(self, tenant: str | None, most: int) -> list[RequestTrace]:
        mine = (trace for trace in reversed(self.finished) if tenant is None or trace.seen.tenant == tenant)
        return list(islice(mine, most))

    # ---- inside ----------------------------------------------------------------------------------------------------------

    def _begin(self, seen: RequestSnapshot, engine: int) -> RequestTrace | None:
        answer, ended = self._owner(seen.key), self._ended.get(seen.key)
        if answer is not None:
            choices = answer.prepared.requests
            choice = 0 if len(choices) == 1 else [request.id for request in choices].index(seen.key)
            trace = RequestTrace(seen, answer.prepared.id, choice, answer.metrics.queued_ts, engine)
        elif ended is not None:
            trace = RequestTrace(seen, ended.name, ended.choice, ended.arrived, engine)
        else:
            return None  # finished before its tenant was known
        lost, back = self._down.get(engine, (0.0, 0.0))
        if not seen.fresh or trace.arrived >= back or seen.seen < lost:
            trace.before[snapshots.PREPARE if seen.fresh else snapshots.UNSEEN] = max(0.0, seen.seen - trace.arrived)
        else:  # it came to another engine, or while there was none
            trace.before[snapshots.UNSEEN] = max(0.0, lost - trace.arrived)
            trace.before[snapshots.RESTART] = seen.seen - max(lost, trace.arrived)
        self.open[seen.key] = trace
        return trace

    def _finish(self, trace: RequestTrace, ended: _Ended | None) -> None:
        """`ended` is not there for one of several choices while others go on: the end is then the engine's."""
        trace.end, seen = ended, trace.seen
        parts = list(seen.parts)
        trace.end_at = seen.since if ended is None else ended.finished
        gap = trace.end_at - seen.since
        if gap >= 0:
            parts[snapshots.DELIVER] += gap
        else:
            _take_back(-gap, parts, trace.before)
        drawn = seen.drawn if ended is None else ended.generated
        trace.seen = replace(seen, state="finished", since=trace.end_at, parts=parts, drawn=drawn)
        self._drop(seen.key)
        self.finished.append(trace)
        self.changed.append(trace)

    def _drop(self, key: str) -> None:
        del self.open[key]
        self._lost.pop(key, None)


def _take_back(seconds: float, *tables: list[float]) -> None:
    for parts in tables:
        for part in _TAKEN_BACK:
            taken = min(seconds, parts[part])
            parts[part] -= taken
            seconds -= taken
