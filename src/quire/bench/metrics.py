"""Records of measured requests, and the figures computed from them. Times are seconds of one clock."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from quire.files.reading import shown
from quire.types.errors import ConfigError


@dataclass(slots=True)
class Record:
    due: float = 0.0  # when the load shape required it to be sent
    sent: float = 0.0
    arrivals: list[float] = field(default_factory=list)  # of every chunk that carried tokens
    end: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    counted: bool = True  # the server reported the number of tokens; otherwise the chunks are counted
    asked_tokens: int = 0
    error: str | None = None
    text: str = ""

    @property
    def ok(self) -> bool:
        return self.error is None

    @property
    def ttft(self) -> float:
        return self.arrivals[0] - self.sent

    @property
    def latency(self) -> float:
        return self.end - self.sent

    @property
    def wait(self) -> float:
        """Return how long it waited in this client: for a free slot of a closed loop, or for the client itself."""
        return self.sent - self.due

    @property
    def overall(self) -> float:
        return self.end - self.due

    @property
    def tpot(self) -> float | None:
        """Return the time per token after the first; None if there is no second token."""
        if self.output_tokens < 2:
            return None
        return (self.arrivals[-1] - self.arrivals[0]) / (self.output_tokens - 1)

    @property
    def itls(self) -> list[float]:
        """Return one value for every token after the first: how long after its predecessor it arrived.

        Tokens of one chunk (speculative decoding, a server that collects its output) arrive together, so all but
        one of them come 0 s after their predecessor. So a stall appears at its full length, the mean agrees with TPOT,
        and k tokens in one chunk measure the same as k chunks in one packet.
        """
        gaps = [after - before for before, after in pairwise(self.arrivals)]
        return gaps + [0.0] * (self.output_tokens - len(self.arrivals))


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
    """The distribution of a quantity, in milliseconds."""

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
    request_goodput: float | None  # None without objectives
    output_throughput: float
    total_token_throughput: float
    max_output_tokens_per_s: float
    max_concurrent_requests: int
    tokens_per_chunk: float
    short: int  # answers with fewer tokens than requested
    uncounted: int  # answers without usage, whose chunks are counted as tokens
    percentiles: Sequence[float]
    spreads: Mapping[str, Spread | None]

    def as_dict(self) -> dict[str, Any]:
        """Return a flat dict with the names of vLLM's result files."""
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
    """`duration` in seconds; `goodput` maps metrics to the maximum of a good request in milliseconds."""
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
    """Return whether a request is within all objectives. With one token it has no time per token and meets that objective."""
    measured = {"ttft": record.ttft, "tpot": record.tpot or 0.0, "e2el": record.latency}
    return all(measured[metric] * 1000 <= most for metric, most in goodput.items())


def peak_throughput(records: Sequence[Record], window: float = 1.0) -> float:
    """Return the maximum of tokens per second in any `window` seconds. A request's tokens are spread evenly over its chunks."""
    if not records or window <= 0:
        return 0.0
    times = np.concatenate([record.arrivals for record in records])
    tokens = np.concatenate([np.full(len(record.arrivals), record.output_tokens / len(record.arrivals)) for record in records])
    order = np.argsort(times)
    times, total = times[order], np.concatenate([np.zeros(1), np.cumsum(tokens[order])])
    ends = np.searchsorted(times, times + window, side="right")
    return float((total[ends] - total[:-1]).max() / window)


def peak_concurrency(records: Iterable[Record]) -> int:
    """Return the maximum of open requests. A request that ends as another begins does not overlap it."""
    moments = [moment for record in records for moment in ((record.sent, 1), (record.end, -1))]
    open_now = peak = 0
    for _, change in sorted(moments):
        open_now += change
        peak = max(peak, open_now)
    return peak


def read_goodput(pairs: Sequence[str]) -> dict[str, float]:
    """Return the objectives of `ttft:200 e2el:3000`, in milliseconds."""
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


MAX_TOKENS = 1 << 24  # of one request; also the limit of prefixes, rows and runs
MAX_REQUESTS = 10**8
MAX_SECONDS = 1e13  # from the first request to the last, or to a timestamp from its beginning


def check_count(flag: str, value: int, minimum: int, maximum: int) -> int:
    """Return the value of a flag, or raise ConfigError."""
    if value < minimum:
        raise ConfigError(f"--{flag} must be at least {minimum}, got {value}")
    if value > maximum:
        raise ConfigError(f"--{flag} must be at most {maximum}, got {value}")
    return value


def read_tokens(where: str, field: str, value: Any, minimum: int) -> int:
    """Return a number of tokens from a file, or raise ConfigError."""
    whole = type(value) is int or (isinstance(value, float) and value.is_integer())
    if not whole or value < minimum:
        raise ConfigError(f"{where}: {field} must be an integer of at least {minimum}, got {shown(value)}")
    if value > MAX_TOKENS:
        raise ConfigError(f"{where}: {field} is {shown(value)}; no request has more than {MAX_TOKENS} tokens")
    return int(value)
