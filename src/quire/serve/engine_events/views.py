"""The events of docs/events.md as plain objects, for the viewers of one tenant. `tenant` None: all tenants."""

import time
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

from quire import __version__
from quire.async_llm import AsyncLLM
from quire.engine.handle import OneEngine
from quire.obs.metrics import FIRST_TOKEN, PER_TOKEN, Metrics
from quire.serve.engine_events.traces import RequestTrace, RequestTraces
from quire.types import engine_snapshot as snapshots
from quire.types.engine_snapshot import EngineSnapshot

VERSION = 1
STATS_EVERY = 1.0  # seconds
MOST_ROWS = 1024  # running requests in one event
MOST_REQUESTS = 256  # changed ones
MOST_OPEN, MOST_FINISHED = 1024, 64  # in a snapshot
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
        "every": {"step": snapshots.EVERY, "stats": STATS_EVERY},
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
    kept = [trace.as_event() for trace in events[-MOST_REQUESTS:]]
    return {"t": moment(time.monotonic()), "requests": kept, "more": len(events) - len(kept)}


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
        **{name: column[:MOST_ROWS] for name, column in lists.items()},
        "more": max(0, rows - MOST_ROWS),
    }


class PageView:
    """One engine's map as its latest snapshots have it; what a cell is, depends on who looks."""

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
    """The maps of all engines, one behind the other."""

    def __init__(self, pages: Sequence[int]) -> None:
        self._maps = [PageView(each) for each in pages]

    def begin(self, engine: int, pages: int) -> None:
        """An engine that nothing is known of yet."""
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


class StatsView:
    """Numbers of /metrics, and how fast they rise."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._before: tuple[float, tuple[float, ...]] | None = None
        self._rates = (0.0, 0.0, 0.0)

    def as_event(self, llm: AsyncLLM, compiling: int, viewers: int, measure: bool) -> Event:
        """`measure`: the rates are those since the latest time that they were measured; else they are as they were."""
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
        }


def snapshot(traces: RequestTraces, tenant: str | None, latest: Event | None, others: Event) -> Event:
    """`others`: the states of engines, pages and statistics."""
    mine = list(islice(traces.of(tenant), MOST_OPEN + 1))
    more = 0 if len(mine) <= MOST_OPEN else sum(1 for _ in traces.of(tenant)) - MOST_OPEN
    events = [trace.as_event() for trace in [*traces.finished_of(tenant, MOST_FINISHED), *mine[:MOST_OPEN]]]
    return {"t": moment(time.monotonic()), "requests": events, "more": more, "step": latest, **others}
