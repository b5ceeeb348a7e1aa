"""Figures of a run: rates, latencies, and cache usage."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.bench.metrics import Spread
from quire.sim.fleet import Run, Visit
from quire.sim.replica import Replica, StepRecord

PERCENTILES = (50, 90, 95, 99)
LATENCIES = ("ttft", "tpot", "e2el")
BUCKETS = 120  # of a plot over time
Series = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Load:
    """The load of one replica, or the mean of all. Shares are weighted by busy time."""

    requests: int
    output_tokens: int
    steps: int
    busy: float  # share of the time in which a step ran
    rows: float  # mean of a step
    kv_usage: float  # mean share of pages in use
    kv_peak: float
    hit_rate: float  # of prompt tokens
    preemptions: int


@dataclass(frozen=True)
class TierFigures:
    """Where prompt tokens were found, and bytes that moved, of all replicas and ranks."""

    device_hits: int  # tokens; the three add up to all that was found
    host_hits: int
    disk_hits: int
    stored: int  # bytes: from the device to host memory
    fetched: int  # and back
    written: int  # from host memory to disk
    read: int  # and back
    host_usage: float  # share of the records in use at the end
    has_disk: bool


@dataclass(frozen=True)
class Figures:
    requests: int
    completed: int
    refused: Counter[str]  # why -> how many
    duration: float  # seconds
    input_tokens: int
    output_tokens: int
    cached_tokens: int
    preemptions: int
    spreads: dict[str, Spread | None]  # milliseconds
    fleet: Load
    replicas: list[Load]
    tiers: TierFigures | None = None  # None: there are none

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / self.input_tokens if self.input_tokens else 0.0

    def per_second(self, count: float) -> float:
        return count / self.duration if self.duration > 0 else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return a flat dict with the names of `quire bench serve`."""
        flat: dict[str, Any] = {
            "num_prompts": self.requests,
            "completed": self.completed,
            "refused": sum(self.refused.values()),
            "duration": self.duration,
            "total_input_tokens": self.input_tokens,
            "total_output_tokens": self.output_tokens,
            "total_cached_tokens": self.cached_tokens,
            "request_throughput": self.per_second(self.completed),
            "output_throughput": self.per_second(self.output_tokens),
            "total_token_throughput": self.per_second(self.input_tokens + self.output_tokens),
            "prefix_cache_hit_rate": self.hit_rate,
            "kv_cache_usage": self.fleet.kv_usage,
            "kv_cache_usage_peak": self.fleet.kv_peak,
            "busy": self.fleet.busy,
            "mean_rows_per_step": self.fleet.rows,
            "steps": self.fleet.steps,
            "preemptions": self.preemptions,
        }
        if self.tiers is not None:
            for field in fields(self.tiers):
                flat[f"kv_tiers_{field.name}"] = getattr(self.tiers, field.name)
        for name, spread in self.spreads.items():
            flat[f"mean_{name}_ms"] = spread and spread.mean
            for percentile in PERCENTILES:
                flat[f"p{percentile}_{name}_ms"] = spread and spread.percentiles[percentile]
        return flat


def figures_of(run: Run) -> Figures:
    done = [visit for visit in run.visits if visit.done]
    duration = max((visit.last for visit in done), default=0.0) - min((visit.at for visit in done), default=0.0)
    served: list[list[Visit]] = [[] for _ in run.replicas]
    for visit in done:
        served[visit.replica].append(visit)
    loads = [_load(replica, mine, duration) for replica, mine in zip(run.replicas, served, strict=True)]
    return Figures(
        requests=len(run.visits),
        completed=len(done),
        refused=Counter(visit.refused for visit in run.visits if visit.refused),
        duration=duration,
        input_tokens=sum(visit.prompt for visit in done),
        output_tokens=sum(visit.output for visit in done),
        cached_tokens=sum(visit.cached for visit in done),
        preemptions=sum(load.preemptions for load in loads),
        spreads={
            "ttft": Spread.of((visit.ttft for visit in done), PERCENTILES),
            "tpot": Spread.of((visit.tpot for visit in done if visit.output > 1), PERCENTILES),
            "e2el": Spread.of((visit.e2e for visit in done), PERCENTILES),
        },
        fleet=_together(loads),
        replicas=loads,
        tiers=_tiers(run.replicas, sum(visit.cached for visit in done)),
    )


def _tiers(replicas: Sequence[Replica], found: int) -> TierFigures | None:
    """found: prompt tokens, in any tier."""
    counts = [(replica.scheduler.stats.tier, replica.tiers) for replica in replicas if replica.tiers is not None]
    if not counts:
        return None
    moved = [(tier, tier.page_bytes * tiers.sizes.ranks) for tier, tiers in counts]
    hits, disk = (sum(getattr(tier, name) for tier, _ in counts) for name in ("hits", "disk_hits"))
    return TierFigures(
        device_hits=found - hits,
        host_hits=hits - disk,
        disk_hits=disk,
        stored=sum(tier.stored * page for tier, page in moved),
        fetched=sum(tier.fetched * page for tier, page in moved),
        written=sum(tier.written * page for tier, page in moved),
        read=sum(tier.read * page for tier, page in moved),
        host_usage=sum(tier.used for tier, _ in counts) / sum(tier.records for tier, _ in counts),
        has_disk=any(tiers.sizes.disk_bytes for _, tiers in counts),
    )


def _load(replica: Replica, mine: Sequence[Visit], duration: float) -> Load:
    steps, pages = replica.steps, replica.pages
    busy = sum(step.seconds for step in steps)
    prompts = sum(visit.prompt for visit in mine)
    return Load(
        requests=len(mine),
        output_tokens=sum(visit.output for visit in mine),
        steps=len(steps),
        busy=min(1.0, busy / duration) if duration > 0 else 0.0,
        rows=sum(step.rows for step in steps) / len(steps) if steps else 0.0,
        kv_usage=sum(step.used * step.seconds for step in steps) / (busy * pages) if busy else 0.0,
        kv_peak=max((step.used for step in steps), default=0) / pages,
        hit_rate=sum(visit.cached for visit in mine) / prompts if prompts else 0.0,
        preemptions=replica.scheduler.stats.preemptions,
    )


def _together(loads: Sequence[Load]) -> Load:
    steps = sum(load.steps for load in loads)
    busy = sum(load.busy for load in loads)
    return Load(
        requests=sum(load.requests for load in loads),
        output_tokens=sum(load.output_tokens for load in loads),
        steps=steps,
        busy=busy / len(loads),
        rows=sum(load.rows * load.steps for load in loads) / steps if steps else 0.0,
        kv_usage=sum(load.kv_usage * load.busy for load in loads) / busy if busy else 0.0,
        kv_peak=max(load.kv_peak for load in loads),
        hit_rate=0.0,
        preemptions=sum(load.preemptions for load in loads),
    )


@dataclass(frozen=True)
class SimulatedTimeline:
    """Means over all replicas in `BUCKETS` equal intervals of the run."""

    at: Series  # [buckets] seconds: their middles
    output_tokens: Series  # per second
    running: Series  # requests
    waiting: Series
    kv_usage: Series  # share of all pages


def timeline_of(run: Run) -> SimulatedTimeline:
    end = max(run.end, 1e-9)
    width = end / BUCKETS
    at = (np.arange(BUCKETS, dtype=np.float64) + 0.5) * np.float64(width)
    running, waiting, used, tokens = (np.zeros(BUCKETS) for _ in range(4))
    pages = sum(replica.pages for replica in run.replicas)
    for replica in run.replicas:
        if replica.steps:
            rows, queued, taken = _sampled(replica.steps, at)
            running, waiting, used = running + rows, waiting + queued, used + taken
    for visit in run.visits:
        if visit.done:
            _spread_evenly(tokens, visit.first / width, visit.last / width, visit.output)
    return SimulatedTimeline(at, tokens / width, running, waiting, used / pages)


def _sampled(steps: Sequence[StepRecord], at: Series) -> tuple[Series, Series, Series]:
    """Return rows, waiting requests and pages of the step that ran at each time; 0 if none ran."""
    table = np.array([(step.at, step.seconds, step.rows, step.waiting, step.used) for step in steps])
    index = np.minimum(np.searchsorted(table[:, 0], at), len(table) - 1)
    found = table[index]
    runs = (found[:, 0] >= at) & (found[:, 0] - found[:, 1] <= at)
    return found[:, 2] * runs, found[:, 3] * runs, found[:, 4] * runs


def _spread_evenly(buckets: Series, first: float, last: float, amount: float) -> None:
    """Spread an amount evenly from bucket `first` to bucket `last`, which may be fractions."""
    low, high = int(first), min(int(last), len(buckets) - 1)
    if low >= high:
        buckets[high] += amount
        return
    each = amount / (last - first)
    buckets[low] += each * (low + 1 - first)
    buckets[low + 1 : high] += each
    buckets[high] += each * (last - high)


def quantiles(values: Iterable[float], count: int = 200) -> tuple[Series, Series]:
    """Return a cumulative distribution: values, and the share that is no larger."""
    shares = np.linspace(0, 1, count + 1)
    found = np.fromiter(values, dtype=np.float64)
    return (np.quantile(found, shares), shares) if found.size else (np.zeros(1), np.zeros(1))
