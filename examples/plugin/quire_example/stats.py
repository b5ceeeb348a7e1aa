"""A stat logger: it logs how many tokens and requests the engine finished, with a server's other statistics."""

import logging

from quire.stat_loggers import IterationStats, SchedulerStats, StatLoggerBase

logger = logging.getLogger("quire.example")


class Totals(StatLoggerBase):
    def __init__(self, vllm_config: object, engine_index: int = 0) -> None:
        self.engine, self.tokens, self.requests, self.logged = engine_index, 0, 0, 0

    def log_engine_initialized(self) -> None:
        logger.info("engine %d is ready", self.engine)

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: None = None,
        engine_idx: int = 0,
    ) -> None:
        if iteration_stats is not None:
            self.tokens += iteration_stats.num_generation_tokens
            self.requests += len(iteration_stats.finished_requests)

    def log(self) -> None:
        if self.requests > self.logged:
            logger.info("engine %d: %d tokens, %d requests finished", self.engine, self.tokens, self.requests)
            self.logged = self.requests
