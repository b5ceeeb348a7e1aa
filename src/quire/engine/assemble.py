"""Puts an engine core together: model on the device, pages counted and allocated, scheduler and executor joined."""

import logging
from dataclasses import dataclass, replace

from quire.cache.capacity import fit
from quire.cache.layout import make_layout
from quire.config.facts import DeviceFacts
from quire.config.resolve import Config
from quire.engine.core import EngineCore
from quire.engine.executor.local import LocalExecutor
from quire.runner.step import Runner
from quire.sched.scheduler import Scheduler

logger = logging.getLogger(__name__)

ELEMENT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class Started:
    core: EngineCore
    max_model_len: int
    pages: int


def find_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def device_facts(device: str) -> DeviceFacts:
    """Of the CUDA device this process would use."""
    import torch

    free, total = torch.cuda.mem_get_info(device)
    return DeviceFacts("cuda", torch.cuda.get_device_name(device), total_bytes=total, free_bytes=free)


def start_core(config: Config) -> Started:
    args = config.args
    # rope tables are made for the longest context that can come, so a shorter one may choose finer factors
    facts = replace(config.facts, max_position=config.max_model_len)
    layout = make_layout(facts.layers, config.page_size, ELEMENT_BYTES[config.dtype])
    runner = Runner(
        facts,
        device=config.device,
        dtype=config.dtype,
        layout=layout,
        max_seqs=config.max_seqs,
        max_batched_tokens=config.max_batched_tokens,
        load_format=args.load_format,
        seed=config.seed,
        logprobs_mode=config.logprobs_mode,
        model_impl=args.model_impl,
    )
    executor = LocalExecutor(runner)
    executor.call("load")
    budget = executor.call("profile", args.gpu_memory_utilization, args.kv_cache_memory_bytes)
    capacity = fit(
        layout,
        budget,
        config.max_model_len,
        explicit=config.max_model_len_explicit,
        chunk=config.max_batched_tokens,
        override=args.num_gpu_blocks_override,
    )
    if capacity.max_model_len < config.max_model_len:
        logger.warning(
            "max_model_len is %d instead of the model's %d: that is what fits the %.2f GiB left for the cache",
            capacity.max_model_len, config.max_model_len, budget / 2**30,
        )  # fmt: skip
    executor.call("allocate", capacity.pages, capacity.max_model_len)
    scheduler = Scheduler(
        layout,
        pages=capacity.pages,
        max_model_len=capacity.max_model_len,
        max_batched_tokens=config.max_batched_tokens,
        max_seqs=config.max_seqs,
        chunk_cap=config.chunk_cap,
        chunked=config.chunked,
        prefix_caching=config.prefix_caching,
        policy=config.policy,
    )
    return Started(EngineCore(scheduler, executor, config.depth), capacity.max_model_len, capacity.pages)
