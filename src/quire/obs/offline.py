"""The metrics of an engine in this process."""

import time

from quire.llm_engine import LLMEngine
from quire.obs.metrics import Metrics
from quire.obs.reader import Metric, read
from quire.types.stats import Stats


class OfflineMetrics:
    """Counts from the moment it is made. Names are vLLM's, prefix included."""

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        config = engine.config
        self._metrics = Metrics(
            "vllm",
            config.served_names[0],
            engine.max_model_len,
            {
                "block_size": config.page_size,
                "num_gpu_blocks": self.stats.pages,
                "enable_prefix_caching": config.prefix_caching,
            },
        )
        if config.max_loras:
            self._metrics.adapters = lambda: (config.max_loras, *engine.outputs.adapters())
        engine.outputs.observe(self._metrics)

    def read(self) -> list[Metric]:
        self._metrics.on_step(self.stats, 0, time.monotonic())
        self._metrics.look(self)
        return read(self._metrics.board)

    # ---- what metrics read of an engine: here it never dies

    @property
    def stats(self) -> Stats:
        return self._engine.core.stats

    restarts = replayed = 0
    heartbeat_age = 0.0
