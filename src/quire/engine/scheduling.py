"""Make the scheduler of an engine, or of a simulated one, from its configuration."""

from typing import Any

from quire.config.config import Config
from quire.sched.budget import Budget, StepBudget, TimedBudget
from quire.sched.scheduler import Scheduler
from quire.types.cache import CacheLayout


def make_scheduler(
    config: Config, layout: CacheLayout, pages: int, max_model_len: int, parameters: int, **more: Any
) -> Scheduler:
    """parameters: of the model, which every step reads. more: further arguments of Scheduler."""
    budget: Budget | None = None
    if config.steps_follow_load and config.device_facts.times_steps:
        budget = TimedBudget(config.scheduled_tokens)
    elif config.steps_follow_load:
        budget = StepBudget.following(config.scheduled_tokens, layout.bytes_per_page, parameters)
    return Scheduler(
        layout,
        pages=pages,
        max_model_len=max_model_len,
        max_batched_tokens=config.scheduled_tokens,
        max_seqs=config.max_seqs,
        chunk_cap=config.chunk_cap,
        chunked=config.chunked,
        prefix_caching=config.prefix_caching,
        policy=config.policy,
        budget=budget,
        single_rows_share=config.device_facts.single_rows_share,
        in_one_piece=config.device_facts.reads_in_place,
        turns=config.depth + 1 if config.stages > 1 else 1,
        **more,
    )
