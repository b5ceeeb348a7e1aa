"""The events of docs/events.md as plain objects, for the viewers of one tenant. `tenant` None: all tenants.

A request's trace joins two sources. The engine knows when a request was added and how its time was spent after that. The
server knows when the request arrived, when its answer ended, and when an engine was lost.
"""

import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from msgspec.structs import replace

from quire import __version__
from quire.async_llm import AsyncLLM
from quire.engine.handle import OneEngine
from quire.features.pooling.host import supported_tasks
from quire.obs.metrics import FIRST_TOKEN, PER_TOKEN, Metrics
from quire.serve.generation import answer_of
from quire.text.outputs import RequestAnswer
from quire.types import engine_snapshot as snapshots
from quire.types.engine_snapshot import PARTS, EngineSnapshot, RequestSnapshot
from quire.types.stats import NO_TIERS, Finished, TierCounts

# ---- traces of requests

MAX_ENDED = 4096  # answers that have ended before their engine reported it
MAX_FINISHED_TRACES = 256  # for viewers that connect later
END_TIMEOUT_S = 60.0  # for an engine to report the end of a finished request: a step may be long
# state -> the part to which time in a lost engine counts
_LOST = {
    "grammar": snapshots.GRAMMAR,
    "waiting": snapshots.QUEUE,
    "prompt": snapshots.PROMPT,
    "decode": snapshots.DECODE,
    "preempted": snapshots.PREEMPTED,
}
# parts that are shortened first if the client received the end before the engine
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
    engine: int = 0  # that runs it, of several
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
        self.finished: deque[RequestTrace] = deque(maxlen=MAX_FINISHED_TRACES)
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
        while len(self._ended) > MAX_ENDED:
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
        """Forget requests that no engine will report again."""
        for key, trace in list(self.open.items()):
            if now - trace.seen.since > END_TIMEOUT_S and self._owner(key) is None:
                ended = self._ended.pop(key, None)
                if ended is None or now - ended.finished > END_TIMEOUT_S:
                    self._drop(key)
                else:
                    self._ended[key] = ended
        while self._ended and now - next(iter(self._ended.values())).finished > END_TIMEOUT_S:
            self._ended.popitem(last=False)

    def of(self, tenant: str | None) -> Iterator[RequestTrace]:
        """Return a tenant's open requests, newest first; None: those of all tenants."""
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


# ---- events

VERSION = 1
STATS_EVERY = 1.0  # seconds
MAX_ROWS = 1024  # running requests in one event
MAX_REQUESTS = 256  # changed ones
MAX_OPEN, MAX_FINISHED = 1024, 64  # in a snapshot
_IN_USE = b"oO"  # by the viewer's own requests
_STRANGE = b"xX"

Event = dict[str, Any]


def cells_of(pages: int) -> int:
    """Cells of the map of this number of pages."""
    each = snapshots.pages_per_cell(pages)
    return -(-pages // each) if each else 0


def moment(t: float) -> float:
    return round(t, 6)


def hello(llm: AsyncLLM, several: bool) -> Event:
    config, pages = llm.config, [each.pages for each in llm.engines]
    return {
        "version": VERSION,
        "t": moment(time.monotonic()),
        "unix": moment(time.time()),
        "server": __version__,
        "model": config.served_names[0],
        "device": config.device if config.world == 1 else f"{config.device} × {config.world}",
        "dtype": config.dtype,
        "ranks": config.world,
        "stages": config.stages,
        "tasks": list(supported_tasks(config)),
        "max_model_len": llm.max_model_len,
        "max_seqs": config.max_seqs,
        "max_batched_tokens": config.max_batched_tokens,
        "keys": several,
        "engines": len(pages),
        "pages": sum(pages),
        "page_size": config.page_size,
        "cells": sum(map(cells_of, pages)),
        "pages_per_cell": max(map(snapshots.pages_per_cell, pages)),
        "parts": snapshots.PARTS,
        "step_columns": snapshots.STEP_COLUMNS,
        "ttft_bounds": FIRST_TOKEN,
        "itl_bounds": PER_TOKEN,
        "every": {"step": snapshots.SNAPSHOT_INTERVAL_S, "stats": STATS_EVERY},
    }


def engine(one: OneEngine, number: int, draining: bool) -> Event:
    return {
        "t": moment(time.monotonic()),
        "engine": number,
        "state": "draining" if draining and one.state != "dead" else one.state,
        "restarts": one.restarts,
        "replayed": one.replayed,
        "reason": one.last_loss,
        "pid": one.pid,
    }


def requests(changed_traces: list[RequestTrace], tenant: str | None) -> Event | None:
    mine = [trace for trace in changed_traces if tenant is None or trace.seen.tenant == tenant]
    if not mine:
        return None
    events = list({trace.seen.key: trace for trace in mine}.values())  # each once, as it is now
    shown = [trace.as_event() for trace in events[-MAX_REQUESTS:]]
    return {"t": moment(time.monotonic()), "requests": shown, "more": len(events) - len(shown)}


def step(seen: EngineSnapshot, llm: AsyncLLM, traces: RequestTraces, tenant: str | None, everywhere: Iterable[str]) -> Event:
    """`everywhere`: keys of what runs in any engine."""
    stats = llm.stats
    running, waiting = (0, 0) if stats is None else (stats.running, stats.waiting)
    lists: dict[str, list[Any]] = {"keys": seen.keys}
    lists |= {"row": seen.row.tolist(), "computed": seen.computed.tolist(), "drawn": seen.drawn.tolist()}
    if seen.guesses is not None:
        lists["drafted"], lists["accepted"] = (column.tolist() for column in seen.guesses)
    own_running, own_waiting = running, waiting
    if tenant is not None:
        mine = {trace.seen.key for trace in traces.of(tenant)}
        places = [i for i, key in enumerate(seen.keys) if key in mine]
        lists = {name: [column[i] for i in places] for name, column in lists.items()}
        own_running, own_waiting = len(mine.intersection(everywhere)), len(mine.difference(everywhere))
    rows = len(lists["keys"])
    return {
        "t": moment(seen.t),
        "engine": seen.engine,
        "steps": [[*each[:1], round(each[1], 3), *each[2:10], round(each[10], 3), *each[11:]] for each in seen.steps],
        "skipped": seen.skipped,
        "running": running,
        "waiting": waiting,
        "own_running": own_running,
        "own_waiting": own_waiting,
        **{name: column[:MAX_ROWS] for name, column in lists.items()},
        "more": max(0, rows - MAX_ROWS),
    }


class PageView:
    """One engine's page map, from its latest snapshots. The letter of a cell depends on the viewer's tenant."""

    def __init__(self, pages: int) -> None:
        self.cells = bytearray(cells_of(pages))
        self._tenants: list[str] = []
        self._tables: dict[str | None, bytes] = {}  # tenant -> the letter of every value of a cell
        self.pages, self.blank, self.cached = pages, pages, 0

    def see(self, seen: EngineSnapshot) -> None:
        self.cells[seen.first : seen.first + len(seen.cells)] = seen.cells
        self.blank, self.cached = seen.blank, seen.cached
        if seen.tenants != self._tenants:
            self._tenants, self._tables = seen.tenants, {}

    def letters(self, tenant: str | None, cells: bytes) -> str:
        return cells.translate(self._letters(tenant)).decode()

    def _letters(self, tenant: str | None) -> bytes:
        table = self._tables.get(tenant)
        if table is None:
            number = None if tenant is None or tenant not in self._tenants else self._tenants.index(tenant)
            used = [
                (_IN_USE if tenant is None or (value - snapshots.USED) // 2 == number else _STRANGE)[value % 2]
                for value in range(snapshots.USED, 256)
            ]
            table = self._tables[tenant] = bytes([ord("."), ord("-"), *used])
        return table


class PoolView:
    """The page maps of all engines, one after the other."""

    def __init__(self, pages: Sequence[int]) -> None:
        self._maps = [PageView(each) for each in pages]

    def begin(self, engine: int, pages: int) -> None:
        """Reset the map of an engine that has just started."""
        self._maps[engine] = PageView(pages)

    def see(self, seen: EngineSnapshot) -> None:
        self._maps[seen.engine].see(seen)

    def as_event(self, tenant: str | None, seen: EngineSnapshot) -> Event:
        before = sum(len(each.cells) for each in self._maps[: seen.engine])
        letters = self._maps[seen.engine].letters(tenant, seen.cells)
        return self._event(seen.t, before + seen.first, letters)

    def whole(self, tenant: str | None) -> Event:
        return self._event(time.monotonic(), 0, "".join(each.letters(tenant, bytes(each.cells)) for each in self._maps))

    def _event(self, t: float, first: int, letters: str) -> Event:
        pages, blank, cached = (sum(getattr(each, name) for each in self._maps) for name in ("pages", "blank", "cached"))
        return {
            "t": moment(t), "first": first, "cells": letters, "blank": blank, "cached": cached, "used": pages - blank - cached,
        }  # fmt: skip


class TiersView:
    """Pages in host memory and on disk, as the engines count them; None without such tiers."""

    def __init__(self) -> None:
        self._before: tuple[float, dict[str, int]] | None = None
        self._rates: dict[str, float] = {}

    def as_event(self, tier: TierCounts, now: float, measure: bool) -> Event | None:
        if not tier.records:
            return None
        size = tier.page_bytes
        moved = {
            "stored": tier.stored * size,
            "fetched": tier.fetched * size,
            "written": tier.written * size,
            "read": tier.read * size,
        }
        if measure:
            if self._before is not None and now > self._before[0]:
                then, old = self._before
                self._rates = {name: round(max(0, moved[name] - old[name]) / (now - then), 1) for name in moved}
            self._before = now, moved
        return {
            "pages": tier.records, "used": tier.used, "on_disk": tier.on_disk, "queries": tier.queries, "hits": tier.hits,
            "disk_hits": tier.disk_hits, "failures": tier.lost, "bytes": moved,
            "rates": self._rates or dict.fromkeys(moved, 0.0),
        }  # fmt: skip


class StatsView:
    """Values of /metrics and their rates."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._tiers = TiersView()
        self._before: tuple[float, tuple[float, ...]] | None = None
        self._rates = (0.0, 0.0, 0.0)

    def as_event(self, llm: AsyncLLM, compiling: int, viewers: int, measure: bool) -> Event:
        """Return the statistics. measure: compute the rates since the last measurement; otherwise repeat them."""
        metrics, stats, now = self._metrics, llm.stats, time.monotonic()
        finished = {labels[0]: int(count) for labels, count in metrics.success.values.items() if count}
        totals = (metrics.prompt_tokens.values[()], metrics.generation_tokens.values[()], float(sum(finished.values())))
        if measure:
            if self._before is not None and now > self._before[0]:
                then, old = self._before
                prompt, generated, ended = ((a - b) / (now - then) for a, b in zip(totals, old, strict=True))
                self._rates = (round(prompt, 1), round(generated, 1), round(ended, 1))
            self._before = (now, totals)
        ttft, itl = metrics.ttft.values[()], metrics.itl.values[()]
        return {
            "t": moment(now),
            "running": 0 if stats is None else stats.running,
            "waiting": 0 if stats is None else stats.waiting,
            "used_pages": 0 if stats is None else stats.pages - stats.free_pages,
            "prompt_tokens": int(totals[0]),
            "cached_tokens": int(metrics.prompt_cached.values[()]),
            "generated_tokens": int(totals[1]),
            "finished": finished,
            "preemptions": int(metrics.preemptions.values[()]),
            "grammar_losses": int(metrics.grammar_losses.values[()]),
            "tool_calls": {labels[0]: int(count) for labels, count in metrics.tool_calls.values.items() if count},
            "compiling": compiling,
            "ttft": ttft.counts,
            "ttft_sum": moment(ttft.sum),
            "itl": itl.counts,
            "itl_sum": moment(itl.sum),
            "rates": dict(zip(("prompt", "generated", "finished"), self._rates, strict=True)),
            "viewers": viewers,
            "tiers": self._tiers.as_event(NO_TIERS if stats is None else stats.tier, now, measure),
        }


def snapshot(traces: RequestTraces, tenant: str | None, latest: Event | None, others: Event) -> Event:
    """`others`: the states of engines, pages and statistics."""
    mine = list(islice(traces.of(tenant), MAX_OPEN + 1))
    more = 0 if len(mine) <= MAX_OPEN else sum(1 for _ in traces.of(tenant)) - MAX_OPEN
    events = [trace.as_event() for trace in [*traces.finished_of(tenant, MAX_FINISHED), *mine[:MAX_OPEN]]]
    return {"t": moment(time.monotonic()), "requests": events, "more": more, "step": latest, **others}
