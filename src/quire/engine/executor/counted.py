"""Estimates of the work of each rank, for `enable_mfu_metrics`: operations, and bytes read and written in device memory.

They follow from the sizes of the model and of the steps that were submitted. Activations are left out.
"""

from typing import Any, cast

import msgspec
import numpy as np

from quire.config.config import Config
from quire.config.memory import parameter_parts
from quire.engine.executor.base import Executor, Flight
from quire.types.cache import DTYPE_BYTES
from quire.types.plan import StepPlan
from quire.types.stats import DeviceCounts


class Work:
    """The sums over all steps, divided by the number of ranks."""

    def __init__(self, config: Config) -> None:
        facts, element = config.facts, DTYPE_BYTES[config.dtype]
        self._parts, self._ranks = parameter_parts(facts.hf), config.world
        stored = facts.weight_bytes / facts.parameters if facts.weight_bytes and facts.parameters else element
        self._weight_bytes = min(stored, element) if config.keep_quantized else element  # of one parameter
        layers: dict[int | None, tuple[int, int]] = {}  # window -> layers, and bytes of a token in all of them
        for layer in facts.layers:
            count, size = layers.get(layer.window, (0, 0))
            layers[layer.window] = count + 1, size + layer.bytes_per_token(config.cache_bytes)
        self._layers = layers
        self._token_bytes = sum(size for _, size in layers.values())
        self._state_bytes = sum(state.bytes(element) for state in facts.states)
        self.flops = self.read_bytes = self.written_bytes = 0.0

    def add(self, plan: StepPlan) -> None:
        if not len(plan.slot):
            return
        parts, tokens, samples = self._parts, plan.tokens, len(plan.outputs.sample_after)
        flops = 2 * (parts.dense * tokens + parts.head * samples)
        weights = float(parts.dense + parts.head)
        if parts.experts:
            idle = (1 - parts.experts_per_token / parts.experts) ** tokens  # the share of experts without a token
            weights += parts.expert * parts.experts * (1 - idle)
            flops += 2 * parts.expert * parts.experts_per_token * tokens
        count, end = plan.count.astype(np.int64), plan.end.astype(np.int64)
        pairs = count * end - count * (count - 1) // 2  # of a token and one that it attends to
        read = weights * self._weight_bytes + self._state_bytes * len(count)
        for window, (layers, size) in self._layers.items():
            seen = pairs if window is None else np.minimum(pairs, count * window)
            keys = end if window is None else np.minimum(end, count + window)
            flops += 4 * parts.query_width * layers * int(seen.sum())
            read += size * int(keys.sum())
        self.flops += flops / self._ranks
        self.read_bytes += read / self._ranks
        self.written_bytes += (self._token_bytes * tokens + self._state_bytes * len(count)) / self._ranks


class CountedExecutor:
    """An executor that adds up the work of its steps; everything else is the executor's own."""

    def __init__(self, executor: Executor, work: Work) -> None:
        self._executor, self._work = executor, work

    def submit(self, plan: StepPlan) -> Flight:
        self._work.add(plan)
        return self._executor.submit(plan)

    @property
    def counts(self) -> DeviceCounts:
        work = self._work
        return msgspec.structs.replace(
            self._executor.counts, flops=work.flops, read_bytes=work.read_bytes, written_bytes=work.written_bytes
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)


def counted(executor: Executor, config: Config) -> Executor:
    """Return the executor, which counts its work if `enable_mfu_metrics` is set."""
    return cast(Executor, CountedExecutor(executor, Work(config))) if config.args.enable_mfu_metrics else executor
