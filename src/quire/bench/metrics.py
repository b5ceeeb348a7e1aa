"""From records to figures: pure arithmetic over what was measured."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from quire.bench.record import Record
from quire.types.errors import ConfigError

METRICS = {
    "ttft": "time to first token",
    "tpot": "time per output token after the first",
    "itl": "inter-token latency",
    "e2el": "end-to-end latency",
    "client_queue_time": "time a request waited in this client",
    "e2el_including_client_queue": "end-to-end latency from when the request was due",
}
OBJECTIVES = ("ttft", "tpot", "e2el")


@dataclass(frozen=True)
class Spread:
    """How a quantity is distributed, in milliseconds."""

    mean: float
    median: float
    std: float
    percentiles: Mapping[float, float]

    @classmethod
    def of(cls, seconds: Iterable[float], percentiles: Sequence[float]) -> "Spread | None":
        values = np.fromiter(seconds, dtype=np.float64) * 1000
        if not values.size:
            return None
        cuts = np.percentile(values, percentiles) if percentiles else ()
        return cls(
            float(values.mean()),
            float(np.median(values)),
            float(values.std()),
            {percentile: float(cut) for percentile, cut in zip(percentiles, cuts, strict=True)},
        )


@dataclass(frozen=True)
class RunSummary:
    duration: float
    completed: int
    failed: int
    total_input_tokens: int
    total_cached_tokens: int
    total_output_tokens: int
    request_throughput: float
    request_goodput: float | None  # None where no objectives were given
    output_throughput: float
    total_token_throughput: float
    max_output_tokens_per_s: float
    max_concurrent_requests: int
    tokens_per_chunk: float
    short: int  # ended before the tokens that were asked for
    uncounted: int  # answers without usage: their tokens are their chunks
    percentiles: Sequence[float]
    spreads: Mapping[str, Spread | None]

    def as_dict(self) -> dict[str, Any]:
        """Flat, with the names that vLLM's result files have."""
        flat = {name: value for name, value in vars(self).items() if name not in ("spreads", "percentiles")}
        for metric, spread in self.spreads.items():
            flat[f"mean_{metric}_ms"] = spread and spread.mean
            flat[f"median_{metric}_ms"] = spread and spread.median
            flat[f"std_{metric}_ms"] = spread and spread.std
            for percentile, value in (spread.percentiles if spread else {}).items():
                flat[f"p{percentile:g}_{metric}_ms"] = value
        return flat


def summarize(
    records: Sequence[Record],
    duration: float,
    *,
    metrics: Sequence[str] = ("ttft", "tpot", "itl", "e2el"),
    percentiles: Sequence[float] = (50, 90, 99),
    goodput: Mapping[str, float] | None = None,
) -> RunSummary:
    """`duration` in seconds; `goodput` maps metrics to the most milliseconds a good request may take."""
    good = [record for record in records if record.ok]
    inputs = sum(record.prompt_tokens for record in good)
    outputs = sum(record.output_tokens for record in good)
    chunks = sum(len(record.arrivals) for record in good)
    seconds = duration if duration > 0 else float("inf")
    return RunSummary(
        duration=duration,
        completed=len(good),
        failed=len(records) - len(good),
        total_input_tokens=inputs,
        total_cached_tokens=sum(record.cached_tokens for record in good),
        total_output_tokens=outputs,
        request_throughput=len(good) / seconds,
        request_goodput=sum(meets(record, goodput) for record in good) / seconds if goodput else None,
        output_throughput=outputs / seconds,
        total_token_throughput=(inputs + outputs) / seconds,
        max_output_tokens_per_s=peak_throughput(good, min(1.0, duration)),
        max_concurrent_requests=peak_concurrency(records),
        tokens_per_chunk=outputs / chunks if chunks else 0.0,
        short=sum(record.output_tokens < record.asked_tokens for record in good),
        uncounted=sum(not record.counted for record in good),
        percentiles=percentiles,
        spreads={metric: Spread.of(_values(metric, good), percentiles) for metric in metrics},
    )


def _values(metric: str, records: Iterable[Record]) -> Iterable[float]:
    if metric == "itl":
        return (itl for record in records for itl in record.itls)
    if metric == "tpot":
        return (tpot for record in records if (tpot := record.tpot) is not None)
    field = {"ttft": "ttft", "e2el": "latency", "client_queue_time": "wait", "e2el_including_client_queue": "overall"}[metric]
    return (getattr(record, field) for record in records)


def meets(record: Record, goodput: Mapping[str, float]) -> bool:
    """Is the request within all objectives. One token has no time per token, and so keeps that objective."""
    measured = {"ttft": record.ttft, "tpot": record.tpot or 0.0, "e2el": record.latency}
    return all(measured[metric] * 1000 <= most for metric, most in goodput.items())


def peak_throughput(records: Sequence[Record], window: float = 1.0) -> float:
    """The most tokens per second that came in any `window` seconds. A request's tokens are spread evenly over its chunks."""
    if not records or window <= 0:
        return 0.0
    times = np.concatenate([record.arrivals for record in records])
    tokens = np.concatenate([np.full(len(record.arrivals), record.output_tokens / len(record.arrivals)) for record in records])
    order = np.argsort(times)
    times, total = times[order], np.concatenate([np.zeros(1), np.cumsum(tokens[order])])
    ends = np.searchsorted(times, times + window, side="right")
    return float((total[ends] - total[:-1]).max() / window)


def peak_concurrency(records: Iterable[Record]) -> int:
    """The most requests that were open at one moment. One that ends as another begins is not open with it."""
    moments = [moment for record in records for moment in ((record.sent, 1), (record.end, -1))]
    open_now = peak = 0
    for _, change in sorted(moments):
        open_now += change
        peak = max(peak, open_now)
    return peak


def read_goodput(pairs: Sequence[str]) -> dict[str, float]:
    """`ttft:200 e2el:3000`: milliseconds."""
    objectives: dict[str, float] = {}
    for pair in pairs:
        name, _, value = pair.partition(":")
        try:
            most = float(value)
        except ValueError:
            most = -1.0
        if name not in OBJECTIVES or not most >= 0:
            raise ConfigError(f"--goodput {pair!r} is not METRIC:MILLISECONDS with one of {', '.join(OBJECTIVES)}")
        objectives[name] = most
    return objectives


def read_metrics(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    for name in names:
        if name not in METRICS:
            raise ConfigError(f"--percentile-metrics knows {', '.join(METRICS)}; not {name!r}")
    return names


def read_percentiles(text: str) -> tuple[float, ...]:
    try:
        cuts = tuple(dict.fromkeys(float(cut) for cut in text.split(",") if cut.strip()))
    except ValueError:
        cuts = (-1.0,)
    if any(not 0 <= cut <= 100 for cut in cuts):
        raise ConfigError(f"--metric-percentiles {text!r} is not a list of numbers from 0 to 100, such as 50,90,99")
    return cuts
