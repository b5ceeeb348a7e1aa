"""What viewers may know of single requests: what engines saw of them, joined with what the server knows.

An engine knows when a request was added and what became of its time since. The server knows when it arrived, when its answer
was told the end, and when an engine was lost. Together that is all of a request's life.
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
from quire.types import sight
from quire.types.sight import PARTS, RequestSight
from quire.types.stats import Finished

MOST_ENDED = 4096  # answers that ended, and whose engine has not said so yet
KEPT = 256  # finished requests, for those who come to look later
PATIENCE = 60.0  # seconds for an engine to tell the end of a request that is over: a step may be long
# states -> what the time is that an engine lost in them
_LOST = {
    "grammar": sight.GRAMMAR,
    "waiting": sight.QUEUE,
    "prompt": sight.PROMPT,
    "decode": sight.DECODE,
    "preempted": sight.PREEMPTED,
}
# what is taken back first where the engine heard of the end later than the client
_TAKEN_BACK = (
    sight.DECODE, sight.OTHERS, sight.MASKS, sight.PREEMPTED, sight.PROMPT, sight.QUEUE, sight.GRAMMAR, sight.RESTART,
    sight.UNSEEN, sight.PREPARE,
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
class Entry:
    """`before`: seconds by part that earlier engines saw, and what is known from here."""

    seen: RequestSight
    name: str
    choice: int
    arrived: float
    engine: int = 0  # who has it, of several
    before: list[float] = field(default_factory=lambda: [0.0] * len(PARTS))
    end: _Ended | None = None
    end_at: float = 0.0  # of the finished

    def told(self) -> dict[str, Any]:
        """As docs/events.md has it."""
        seen = self.seen
        answer, index = answer_of(self.name)
        parts = zip(PARTS, self.before, seen.parts, strict=True)
        told = {
            "key": seen.key, "id": answer, "index": index, "choice": self.choice, "engine": self.engine, "state": seen.state,
            "since": seen.since, "arrived": self.arrived, "prompt": seen.prompt, "cached": seen.cached,
            "drawn": seen.drawn, "drafted": seen.drafted, "accepted": seen.accepted, "max_tokens": seen.max_tokens,
            "grammar": seen.grammar, "adapter": seen.adapter or None, "preemptions": seen.preemptions,
            "parts": {name: before + now for name, before, now in parts if before or now},
        }  # fmt: skip
        if seen.state == "finished":
            told["wall"] = self.end_at - self.arrived
            told["ttft"] = None if self.end is None else self.end.ttft
            told["reason"] = seen.reason if self.end is None else self.end.reason
        return told


class Ledger:
    def __init__(self, owner: Callable[[str], RequestAnswer | None]) -> None:
        self._owner = owner
        self.open: dict[str, Entry] = {}  # by key
        self.finished: deque[Entry] = deque(maxlen=KEPT)
        self._ended: OrderedDict[str, _Ended] = OrderedDict()  # by key
        self._lost: dict[str, float] = {}  # key -> when its engine was lost
        self._down: dict[int, tuple[float, float]] = {}  # engine -> from when to when it was not there, the latest time
        self.changed: list[Entry] = []  # since `take` was called

    def take(self) -> list[Entry]:
        changed, self.changed = self.changed, []
        return changed

    # ---- what is heard ---------------------------------------------------------------------------------------------------

    def see(self, requests: Iterable[RequestSight], engine: int = 0) -> None:
        for seen in requests:
            entry = self.open.get(seen.key)
            if entry is None:
                entry = self._begin(seen, engine)
                if entry is None:
                    continue
            elif seen.key in self._lost:
                entry.before[sight.RESTART] += max(0.0, seen.seen - self._lost.pop(seen.key))
            entry.seen = seen
            if seen.state == "finished":
                self._finish(entry, self._ended.pop(seen.key, None))
            else:
                self.changed.append(entry)

    def end(self, request: Finished) -> None:
        """An answer is over. Its engine will tell so, unless it is lost."""
        metrics = request.metrics
        ttft = metrics.first_token_latency if metrics.first_token_ts else None
        for choice, key in enumerate(request.engine_ids):
            ended = _Ended(
                request.request_id, choice, metrics.queued_ts, metrics.finished_ts, ttft, request.reasons[choice],
                request.generated[choice],
            )  # fmt: skip
            entry = self.open.get(key)
            if entry is not None and entry.seen.state == "restart":
                entry.before[sight.RESTART] += max(0.0, ended.finished - self._lost.pop(key))
                entry.seen = replace(entry.seen, since=ended.finished)
                self._finish(entry, ended)
            else:
                self._ended[key] = ended
        while len(self._ended) > MOST_ENDED:
            self._ended.popitem(last=False)

    def lose(self, now: float, engine: int = 0) -> None:
        """An engine is gone, and with it what it had seen since its latest sight."""
        self._down[engine] = (now, math.inf)
        for key, entry in list(self.open.items()):
            seen = entry.seen
            if seen.state == "restart" or entry.engine != engine:
                continue
            spent = list(seen.parts)
            spent[_LOST[seen.state]] += max(0.0, now - seen.since)
            entry.before = [a + b for a, b in zip(entry.before, spent, strict=True)]
            entry.seen = replace(seen, state="restart", since=now, parts=[0.0] * len(PARTS))
            self._lost[key] = now
            ended = self._ended.pop(key, None)
            if ended is None:
                self.changed.append(entry)
            else:
                self._finish(entry, ended)

    def regain(self, now: float, engine: int = 0) -> None:
        self._down[engine] = (self._down.get(engine, (0.0, 0.0))[0], now)

    def tidy(self, now: float) -> None:
        """Forgets what no engine will speak of again."""
        for key, entry in list(self.open.items()):
            if now - entry.seen.since > PATIENCE and self._owner(key) is None:
                ended = self._ended.pop(key, None)
                if ended is None or now - ended.finished > PATIENCE:
                    self._drop(key)
                else:
                    self._ended[key] = ended
        while self._ended and now - next(iter(self._ended.values())).finished > PATIENCE:
            self._ended.popitem(last=False)

    def of(self, tenant: str | None) -> Iterator[Entry]:
        """A tenant's open requests, newest first; None: everybody's."""
        return (entry for entry in reversed(self.open.values()) if tenant is None or entry.seen.tenant == tenant)

    def finished_of(self, tenant: str | None, most: int) -> list[Entry]:
        mine = (entry for entry in reversed(self.finished) if tenant is None or entry.seen.tenant == tenant)
        return list(islice(mine, most))

    # ---- inside ----------------------------------------------------------------------------------------------------------

    def _begin(self, seen: RequestSight, engine: int) -> Entry | None:
        answer, ended = self._owner(seen.key), self._ended.get(seen.key)
        if answer is not None:
            choices = answer.prepared.requests
            choice = 0 if len(choices) == 1 else [request.id for request in choices].index(seen.key)
            entry = Entry(seen, answer.prepared.id, choice, answer.metrics.queued_ts, engine)
        elif ended is not None:
            entry = Entry(seen, ended.name, ended.choice, ended.arrived, engine)
        else:
            return None  # over before anybody could tell whose it was
        lost, back = self._down.get(engine, (0.0, 0.0))
        if not seen.fresh or entry.arrived >= back or seen.seen < lost:
            entry.before[sight.PREPARE if seen.fresh else sight.UNSEEN] = max(0.0, seen.seen - entry.arrived)
        else:  # it came to another engine, or while there was none
            entry.before[sight.UNSEEN] = max(0.0, lost - entry.arrived)
            entry.before[sight.RESTART] = seen.seen - max(lost, entry.arrived)
        self.open[seen.key] = entry
        return entry

    def _finish(self, entry: Entry, ended: _Ended | None) -> None:
        """`ended` is not there for one of several choices while others go on: the end is then the engine's."""
        entry.end, seen = ended, entry.seen
        parts = list(seen.parts)
        entry.end_at = seen.since if ended is None else ended.finished
        gap = entry.end_at - seen.since
        if gap >= 0:
            parts[sight.DELIVER] += gap
        else:
            _take_back(-gap, parts, entry.before)
        drawn = seen.drawn if ended is None else ended.generated
        entry.seen = replace(seen, state="finished", since=entry.end_at, parts=parts, drawn=drawn)
        self._drop(seen.key)
        self.finished.append(entry)
        self.changed.append(entry)

    def _drop(self, key: str) -> None:
        del self.open[key]
        self._lost.pop(key, None)


def _take_back(seconds: float, *tables: list[float]) -> None:
    for parts in tables:
        for part in _TAKEN_BACK:
            taken = min(seconds, parts[part])
            parts[part] -= taken
            seconds -= taken
