"""How long a step takes, from a card's numbers and a model's shapes alone.

    products     reading the matrices once, and multiplying every token by them: where both take about as long, neither is as
                 fast as it could be alone, so it is the root of the squares
    attention    the slower of reading the keys and values and multiplying by them; what rows of one token share is read once
    layers       what each costs however few tokens there are: launches, and small products that do not fill a card

Steps with prompts are run as the next larger one that was recorded.

The shares of a card's stated numbers that are reached in practice were chosen so that runs recorded on an H200 come out
(`docs/simulate.md` has them side by side); of other cards nobody has measured them here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import hypot

import numpy as np
import numpy.typing as npt

from quire.config.memory import ParameterParts
from quire.sim.cards import Card
from quire.types.cache import LayerCache
from quire.types.plan import StepPlan, recorded_width

Window = tuple[int | None, float]  # None sees everything; the share of layers that have it


@dataclass(frozen=True, slots=True)
class StepShape:
    """Keys are means over the layers: where a window is shorter than the context, less is seen."""

    rows: int
    singles: int  # of them, those of one token
    tokens: int
    draws: int
    single_keys: float  # that rows of one token look at
    own_keys: float  # the same, those that several rows share counted once
    prompt_keys: float  # that the other rows read, each once
    pairs: float  # of a query in those rows and a key that it sees


def windows_of(layers: Sequence[LayerCache]) -> tuple[Window, ...]:
    kinds: dict[int | None, int] = {}
    for layer in layers:
        kinds[layer.window] = kinds.get(layer.window, 0) + 1
    return tuple((window, count / len(layers)) for window, count in kinds.items())


def shape_of(plan: StepPlan, windows: Sequence[Window], distinct: int) -> StepShape:
    """`distinct`: all keys that lie in pages in use, each once."""
    rows, tokens, draws = len(plan.count), plan.tokens, len(plan.outputs.draw)
    if tokens == rows:  # most steps
        keys = _seen(plan.end, windows)
        return StepShape(rows, rows, tokens, draws, keys, min(keys, distinct), 0.0, 0.0)
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
    keys = _seen(plan.end[~several], windows)
    return StepShape(rows, rows - len(count), tokens, draws, keys, min(keys, distinct), read, pairs)


def _seen(end: npt.NDArray[np.int32], windows: Sequence[Window]) -> float:
    return sum(share * float((end if window is None else np.minimum(end, window)).sum()) for window, share in windows)


READING = 0.82  # of the stated bandwidth
READING_KEYS = 0.75
MULTIPLYING = 0.69  # of the stated operations
ATTENDING = 0.50
LAYER, EXPERTS = 15e-6, 13e-6  # seconds; the second in addition, where tokens are sorted by experts


@dataclass(frozen=True)
class HostTime:
    """What planning, starting and taking in a step costs the processor. On a GPU it runs beside the step before."""

    step: float = 0.0003  # seconds
    row: float = 1e-6
    admission: float = 0.0  # of a step with newcomers, in addition
    newcomer: float = 0.0  # and for each of them

    def seconds(self, rows: int, newcomers: int = 0) -> float:
        more = self.admission + self.newcomer * newcomers if newcomers else 0.0
        return self.step + self.row * rows + more


class AnalyticTiming:
    """`weight_bytes` of a parameter as it lies in memory, `kv_bytes` of a token in all layers."""

    def __init__(
        self,
        card: Card,
        parts: ParameterParts,
        *,
        layers: int,
        weight_bytes: float,
        kv_bytes: int,
    ) -> None:
        bandwidth, flops = card.bandwidth, card.flops
        self.host = HostTime()
        self._parts = parts
        self._byte = weight_bytes / (bandwidth * READING)  # seconds for a parameter, for reading
        self._operation = 1 / (flops * MULTIPLYING)
        self._attended = 4 * parts.query_width * layers / (flops * ATTENDING)  # of a query and a key
        self._key = kv_bytes / (bandwidth * READING_KEYS)  # of a token in all layers
        self._fixed = layers * (LAYER + EXPERTS * bool(parts.experts))

    def seconds(self, shape: StepShape) -> float:
        parts, tokens = self._parts, shape.tokens if shape.tokens == shape.rows else recorded_width(shape.tokens)
        reading = (parts.dense + parts.head) * self._byte
        operations = 2 * (parts.dense * tokens + parts.head * shape.draws)
        if parts.experts:
            idle = (1 - parts.experts_per_token / parts.experts) ** tokens  # the share of experts without a token
            reading += parts.expert * parts.experts * (1 - idle) * self._byte
            operations += 2 * parts.expert * parts.experts_per_token * tokens
        products = hypot(reading, operations * self._operation)
        singles = max(shape.own_keys * self._key, shape.single_keys * self._attended)
        others = max(shape.prompt_keys * self._key, shape.pairs * self._attended)
        return self._fixed + products + singles + others
