"""What makes a step long: how many tokens it runs, and how many keys they look at."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quire.types.cache import LayerCache
from quire.types.plan import StepPlan

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
