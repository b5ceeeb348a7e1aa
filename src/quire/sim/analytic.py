"""Step times from the data of a GPU and the shapes of a model.

    products     reading the matrices once, and multiplying every token by them: if both take about as long, neither
                 reaches its full speed, so the time is the root of the sum of squares
    attention    the slower of reading keys and values and multiplying by them; keys that decode rows share are read once
    layers       the fixed cost of each: launches, and small kernels that do not fill a GPU

Steps with prompts run as the next larger recorded CUDA graph.

The shares of the stated rates that are reached in practice were fitted to runs recorded on an H200
(`docs/simulate.md` compares them); they were not measured on other GPUs.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import hypot

import numpy as np
import numpy.typing as npt

from quire.config.memory import ParameterParts
from quire.types.cache import LayerCache
from quire.types.errors import ConfigError
from quire.types.plan import StepPlan, recorded_width

_RATE = re.compile(r"^(?P<number>\d+(\.\d+)?(e\d+)?)\s*(?P<unit>[KMGTP]?)(?P<rest>[A-Za-z/]*)$", re.IGNORECASE)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4, "P": 5}
GIB = 2**30


@dataclass(frozen=True)
class GPUModel:
    name: str
    memory: int  # bytes
    bandwidth: float  # bytes per second
    flops: float  # per second, of 16-bit floats
    link: str | None = None  # between GPUs of a node (`links.py`); None: unknown
    network: str | None = None  # between nodes, as usual with this GPU
    host: str = "pcie5"  # to host memory

    def __post_init__(self) -> None:
        for flag, value in (("memory", self.memory), ("bandwidth", self.bandwidth), ("flops", self.flops)):
            if not 0 < value < float("inf"):
                raise ConfigError(f"--{flag} must be above 0, got {value:g}")


CARDS = {
    card.name: card
    for card in (
        GPUModel("a10", 24 * GIB, 600e9, 125e12, "pcie4", host="pcie4"),
        GPUModel("a100-40g", 40 * GIB, 1555e9, 312e12, "nvlink3", "hdr", "pcie4"),
        GPUModel("a100-80g", 80 * GIB, 2039e9, 312e12, "nvlink3", "hdr", "pcie4"),
        GPUModel("b200", 180 * GIB, 8e12, 2250e12, "nvlink5", "ndr"),
        GPUModel("h100", 80 * GIB, 3350e9, 989e12, "nvlink4", "ndr"),
        GPUModel("h100-pcie", 80 * GIB, 2000e9, 756e12, "pcie5", "ndr"),
        GPUModel("h20", 96 * GIB, 4000e9, 148e12, "nvlink4", "ndr"),
        GPUModel("h200", 141 * 10**9, 4800e9, 989e12, "nvlink4", "ndr"),
        GPUModel("l4", 24 * GIB, 300e9, 121e12, "pcie4", host="pcie4"),
        GPUModel("l40s", 48 * GIB, 864e9, 362e12, "pcie4", host="pcie4"),
        GPUModel("mi300x", 192 * GIB, 5300e9, 1307e12),
        GPUModel("rtx-4090", 24 * GIB, 1008e9, 165e12, "pcie4", host="pcie4"),
        GPUModel("rtx-5090", 32 * GIB, 1792e9, 209e12, "pcie5"),
        GPUModel("t4", 16 * GIB, 320e9, 65e12, host="pcie3"),
    )
}


def find_card(name: str) -> GPUModel:
    card = CARDS.get(name.lower().replace("_", "-").replace(" ", "-"))
    if card is None:
        raise ConfigError(
            f"--card {name!r} is unknown; there are {', '.join(CARDS)}; or use --memory, and for a simulation "
            "--bandwidth and --flops"
        )
    return card


def read_rate(flag: str, text: str) -> float:
    """Return the rate of a text such as `4.8TB/s`, `989T`, `989TFLOPS` or `3.35e12`."""
    match = _RATE.match(text.strip())
    if match is None or match["rest"].lower() not in ("", "b", "b/s", "flops", "flop", "flop/s", "flops/s"):
        raise ConfigError(f"--{flag} {text!r} is not a rate such as {'989T' if flag == 'flops' else '4.8TB/s'}")
    return float(match["number"]) * 1000.0 ** _POWERS[match["unit"].upper()]


Window = tuple[int | None, float]  # (None: no window, the share of layers with it)


@dataclass(frozen=True, slots=True)
class StepShape:
    """The sizes of a step that determine its time. Keys are means over the layers, since windows limit some layers."""

    rows: int
    singles: int  # decode rows
    tokens: int
    samples: int
    single_keys: float  # attended to by decode rows
    own_keys: float  # the same, with keys shared by rows counted once
    prompt_keys: float  # read by prefill rows, each once
    pairs: float  # of a query in prefill rows and a key that it attends to


def windows_of(layers: Sequence[LayerCache]) -> tuple[Window, ...]:
    kinds: dict[int | None, int] = {}
    for layer in layers:
        kinds[layer.window] = kinds.get(layer.window, 0) + 1
    return tuple((window, count / len(layers)) for window, count in kinds.items())


def shape_of(plan: StepPlan, windows: Sequence[Window], distinct: int) -> StepShape:
    """Return the shape of a plan. `distinct`: the number of keys in all used pages."""
    rows, tokens, samples = len(plan.count), plan.tokens, len(plan.outputs.sample_after)
    if tokens == rows:  # most steps
        keys = _attended_keys(plan.end, windows)
        return StepShape(rows, rows, tokens, samples, keys, min(keys, distinct), 0.0, 0.0)
    several = plan.count > 1
    count, end = plan.count[several].astype(np.int64), plan.end[several].astype(np.int64)
    read = pairs = 0.0
    for window, share in windows:
        every = count * end - count * (count - 1) // 2
        if window is None:
            read += share * float(end.sum())
            pairs += share * float(every.sum())
        else:
            read += share * float(np.minimum(end, count + window).sum())
            pairs += share * float(np.minimum(every, count * window).sum())
    keys = _attended_keys(plan.end[~several], windows)
    return StepShape(rows, rows - len(count), tokens, samples, keys, min(keys, distinct), read, pairs)


def _attended_keys(end: npt.NDArray[np.int32], windows: Sequence[Window]) -> float:
    return sum(share * float((end if window is None else np.minimum(end, window)).sum()) for window, share in windows)


WEIGHT_BANDWIDTH = 0.82  # share of the stated bandwidth
KV_BANDWIDTH = 0.75
GEMM_RATE = 0.69  # share of the stated operations
ATTENTION_RATE = 0.50
LAYER_S, EXPERTS_S = 15e-6, 13e-6  # per layer; the second in addition in a mixture-of-experts layer


@dataclass(frozen=True)
class HostTime:
    """Processor time to plan, start and commit a step. On a GPU it overlaps with the previous step."""

    step: float = 0.0003  # seconds
    row: float = 1e-6
    admission: float = 0.0  # in addition for a step with new requests
    newcomer: float = 0.0  # in addition for each new request

    def seconds(self, rows: int, newcomers: int = 0) -> float:
        more = self.admission + self.newcomer * newcomers if newcomers else 0.0
        return self.step + self.row * rows + more


class AnalyticTiming:
    """Step times of a GPU.

    weight_bytes: of a parameter in memory
    kv_bytes: of a token in all layers
    engines: that run equal steps and share the experts, so that each has tokens of all of them
    """

    def __init__(
        self,
        card: GPUModel,
        parts: ParameterParts,
        *,
        layers: int,
        weight_bytes: float,
        kv_bytes: int,
        engines: int = 1,
    ) -> None:
        bandwidth, flops = card.bandwidth, card.flops
        self.host = HostTime()
        self._parts, self._engines = parts, engines
        self._byte = weight_bytes / (bandwidth * WEIGHT_BANDWIDTH)  # seconds for a parameter, for reading
        self._operation = 1 / (flops * GEMM_RATE)
        self._attended = 4 * parts.query_width * layers / (flops * ATTENTION_RATE)  # seconds for a query and a key
        self._key = kv_bytes / (bandwidth * KV_BANDWIDTH)  # seconds for a token in all layers
        self._fixed = layers * (LAYER_S + EXPERTS_S * bool(parts.experts))

    def seconds(self, shape: StepShape) -> float:
        parts, tokens = self._parts, shape.tokens if shape.tokens == shape.rows else recorded_width(shape.tokens)
        reading = (parts.dense + parts.head) * self._byte
        operations = 2 * (parts.dense * tokens + parts.head * shape.samples)
        if parts.experts:
            routed = tokens * self._engines
            idle = (1 - parts.experts_per_token / parts.experts) ** routed  # the share of experts without a token
            reading += parts.expert * parts.experts * (1 - idle) * self._byte
            operations += 2 * parts.expert * parts.experts_per_token * routed
        products = hypot(reading, operations * self._operation)
        singles = max(shape.own_keys * self._key, shape.single_keys * self._attended)
        others = max(shape.prompt_keys * self._key, shape.pairs * self._attended)
        return self._fixed + products + singles + others
