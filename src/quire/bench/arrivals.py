"""Arrival times of requests. Pure arithmetic: seconds since the start, one per request, the first at 0."""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quire.bench.metrics import MAX_SECONDS
from quire.types.errors import ConfigError

Times = npt.NDArray[np.float64]


@dataclass(frozen=True)
class LoadShape:
    """How requests arrive.

    At an infinite rate all requests are due at once; `max_concurrency` alone is then the closed loop. At a finite rate the gaps
    are gamma distributed with shape `burstiness` and mean 1 / rate: 1 is a Poisson process, less comes in bursts, more is
    steadier. A ramp changes the rate from `ramp_start` to `ramp_end` over the run, in proportion to the requests sent.
    """

    request_rate: float = math.inf
    burstiness: float = 1.0
    max_concurrency: int | None = None
    ramp: str | None = None  # "linear" or "exponential"
    ramp_start: float | None = None
    ramp_end: float | None = None

    def __post_init__(self) -> None:
        if not self.request_rate > 0:
            raise ConfigError(f"--request-rate must be above 0, or inf; got {self.request_rate}")
        if not 0 < self.burstiness < math.inf:
            raise ConfigError(f"--burstiness must be above 0, got {self.burstiness}")
        if self.burstiness != 1 and not self.timed:
            raise ConfigError("--burstiness spreads arrivals and needs --request-rate or a ramp")
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise ConfigError(f"--max-concurrency must be at least 1, got {self.max_concurrency}")
        if self.ramp is None:
            if self.ramp_start is not None or self.ramp_end is not None:
                raise ConfigError("--ramp-up-start-rps and --ramp-up-end-rps need --ramp-up-strategy linear or exponential")
            return
        if not math.isinf(self.request_rate):
            raise ConfigError("--request-rate and --ramp-up-strategy both set the rate; drop one")
        if self.ramp_start is None or self.ramp_end is None:
            raise ConfigError("--ramp-up-strategy needs --ramp-up-start-rps and --ramp-up-end-rps")
        low = 0 if self.ramp == "linear" else np.nextafter(0, 1)
        if not low <= self.ramp_start <= self.ramp_end or not 0 < self.ramp_end < math.inf:
            raise ConfigError(
                f"a {self.ramp} ramp needs {'0 <=' if self.ramp == 'linear' else '0 <'} start <= end, "
                f"got {self.ramp_start:g} to {self.ramp_end:g} requests per second"
            )

    @property
    def timed(self) -> bool:
        return self.ramp is not None or not math.isinf(self.request_rate)

    def __str__(self) -> str:
        if self.ramp is not None:
            text = f"{self.ramp} ramp from {self.ramp_start:g} to {self.ramp_end:g} requests/s"
        elif math.isinf(self.request_rate):
            text = "all at once" if self.max_concurrency is None else "closed loop"
        else:
            text = f"{self.request_rate:g} requests/s"
        if self.timed:
            text += ", Poisson" if self.burstiness == 1 else f", gamma with burstiness {self.burstiness:g}"
        return text if self.max_concurrency is None else f"{text}, at most {self.max_concurrency} at once"


def arrival_times(shape: LoadShape, count: int, seed: int) -> Times:
    if not shape.timed or count == 0:
        return np.zeros(count)
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        gaps = np.random.default_rng(seed).gamma(shape.burstiness, 1 / shape.burstiness, count - 1) / rates(shape, count)[1:]
        times = np.concatenate([np.zeros(1), np.cumsum(gaps)])
    if not times[-1] <= MAX_SECONDS:
        raise ConfigError(f"{shape}: the last of {count} requests would come after {times[-1]:g} seconds; raise the rate")
    return times


def rates(shape: LoadShape, count: int) -> Times:
    """Return the arrival rate at each request, in requests per second."""
    if shape.ramp is None:
        return np.full(count, shape.request_rate)
    assert shape.ramp_start is not None and shape.ramp_end is not None
    progress = np.arange(count) / max(1, count - 1)
    if shape.ramp == "linear":
        return np.asarray(shape.ramp_start + (shape.ramp_end - shape.ramp_start) * progress)
    return np.asarray(shape.ramp_start * (shape.ramp_end / shape.ramp_start) ** progress)
