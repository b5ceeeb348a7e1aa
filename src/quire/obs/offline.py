"""Metrics of engines in this process, as vLLM's objects (`LLM.get_metrics`)."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from quire.engine.client import EngineClient
from quire.engine.handle import EngineGroup
from quire.engine.replicas import Replicas
from quire.llm_engine import LLMEngine
from quire.obs import instruments
from quire.obs.metrics import Metrics
from quire.types.stats import NOTHING, Stats


@dataclass
class Metric:
    """`labels` have the model's name and the engine's number, and the metric's own."""

    name: str
    labels: dict[str, str]


@dataclass
class Counter(Metric):
    value: int


@dataclass
class Vector(Metric):
    """Counters that belong together, such as one per position."""

    values: list[int]


@dataclass
class Gauge(Metric):
    value: float


@dataclass
class Histogram(Metric):
    """`buckets`: upper end -> how many were at most that; the last one is +Inf."""

    count: int
    sum: float
    buckets: dict[str, int]


def read(board: instruments.Board) -> list[Metric]:
    return [metric for instrument in board.instruments for metric in _of(instrument, board)]


def _of(instrument: instruments.Instrument, board: instruments.Board) -> Iterator[Metric]:
    name = board.prefix + instrument.name

    def labelled(own: instruments.Labels) -> dict[str, str]:
        return {**board.shared, **dict(zip(instrument.labels, own, strict=True))}

    match instrument:
        case instruments.Counter():
            for own, value in instrument.values.items():
                yield Counter(name, labelled(own), int(value))
        case instruments.Gauge():
            for own, value in instrument.values.items():
                yield Gauge(name, labelled(own), value)
        case instruments.Histogram():
            for own, found in instrument.values.items():
                buckets = {end: int(count) for end, count in instrument.buckets(found)}
                yield Histogram(name, labelled(own), buckets["+Inf"], found.sum, buckets)


class OfflineMetrics(EngineGroup):
    """Counts from the moment it is made. Names are vLLM's, prefix included."""

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        config = engine.config
        core = engine.core
        self.engines: Sequence[EngineClient] = core.engines if isinstance(core, Replicas) else ()

        def info(pages: int) -> dict[str, object]:
            return {"block_size": config.page_size, "num_gpu_blocks": pages, "enable_prefix_caching": config.prefix_caching}

        each = [info(one.pages) for one in self.engines]
        pages = sum(one.pages for one in self.engines) if each else self.stats.pages
        self._metrics = Metrics("vllm", config.served_names[0], engine.max_model_len, info(pages), each)
        if config.max_loras:
            self._metrics.adapters = lambda: (config.max_loras, *engine.outputs.adapters())
            self._metrics.adapter_names = lambda: (adapter.name for adapter in engine.adapters.all)
        engine.media.cache.on_query = self._metrics.count_media_query
        engine.media.on_processed = self._metrics.media_seconds.observe
        engine.outputs.observe(self._metrics)

    def read(self) -> list[Metric]:
        """Of several engines, the numbers of each."""
        metrics, now = self._metrics, time.monotonic()
        for number, one in enumerate(self.engines):
            metrics.on_step(msgspec.structs.replace(one.stats or NOTHING, engine=number), 0, now)
        if not self.engines:
            metrics.on_step(self.stats, 0, now)
        metrics.look(self)
        return [metric for each in metrics.parts or [metrics] for metric in read(each.board)]

    # ---- what metrics read of an engine: one in this process never dies

    @property
    def stats(self) -> Stats:
        return self._engine.core.stats
