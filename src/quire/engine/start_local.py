"""Start the model of an engine in this process and the processes of its other ranks, and allocate the KV cache.

Importing this file does not import torch.
"""

import contextlib
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from quire.cache.layout import Capacity
from quire.config.args import connect_timeout, step_timeout
from quire.config.config import Config
from quire.config.facts import ModelFacts
from quire.config.memory import largest_step
from quire.device.base import Device
from quire.device.registry import named_gpus
from quire.dist.mesh import Position
from quire.engine.executor.base import Executor
from quire.engine.executor.nodes import share_ranks
from quire.engine.layouts import even_out, fit_or_warn, model_share, share_memory, snapshot_records
from quire.engine.memory import least_cache
from quire.engine.runners import import_torch, join_expert_peers, make_runner, start_device
from quire.engine.timeline import Stopwatch
from quire.features.experts.peers import ExpertPeerWatch, PeerLinks
from quire.features.quantization.host import may_copy
from quire.progress import doing
from quire.types.cache import CacheLayout

if TYPE_CHECKING:
    from quire.engine.executor.workers import Workers
    from quire.features.experts.exchange import SharedExperts

RANK_TIMEOUT_SHARE = 0.9  # of the engine's timeouts: a late rank is reported before the engine counts as late
UNEVEN_RATIO = 1.1  # of two ranks' memory; GPUs of one model differ by less

logger = logging.getLogger(__name__)


def start_local(
    config: Config, facts: ModelFacts, layout: CacheLayout, watch: Stopwatch, ends: PeerLinks | None = None
) -> tuple[Executor, Capacity]:
    """Start the model in this process, or the first rank's share of it, and the processes of the other ranks.

    ends: connections to the engines that share its experts.
    """
    workers = None if config.world == 1 else start_workers(config, ends)  # they import torch at the same time as this process
    executor: Executor | None = None
    try:
        import_torch()
        with doing("importing the model's code"):
            import quire.engine.executor.local  # noqa: F401
        watch.lap("imports")
        device = start_device(config)
        if config.device_facts.advice and facts.files.format == "gguf" and config.args.dtype == "auto":
            logger.warning("%s, or set dtype='float32' to keep it", config.device_facts.advice)
        experts = None if ends is None else connect_expert_peers(config, device, ends, workers)
        executor = make_executor(config, device, workers, None if experts is None else experts[1])
        load_model(config, executor, layout, watch)
        if experts is not None:
            with doing("waiting for the engines that share its experts"):
                experts[1].wait_all()
            experts[0].connected = True
            watch.lap("other engines")
        capacity = allocate_cache(config, executor, layout, device, watch)
        if workers is not None:
            workers.started()
    except BaseException:
        if workers is not None:
            workers.end()
        elif executor is not None:
            with contextlib.suppress(Exception):  # a device that failed reports it once
                executor.stop()
        raise
    return executor, capacity


def make_executor(config: Config, device: Device, workers: "Workers | None", exchange: "SharedExperts | None") -> Executor:
    """Return the executor with the first rank's runner; nothing is loaded yet."""
    if workers is None:
        from quire.engine.executor.local import LocalExecutor

        return LocalExecutor(make_runner(config, device, exchange=exchange))
    if config.stages > 1:
        from quire.engine.executor.stages import StagesExecutor, join_pipeline, make_stage_runner

        ring = join_pipeline(config, device, 0, workers.memory, workers.peers, workers, workers.remote)
        return StagesExecutor(make_stage_runner(config, device, ring), workers, ring)
    from quire.engine.executor.local import RanksExecutor, join_group

    position = Position(0, config.ranks, config.args.enable_expert_parallel)
    return RanksExecutor(make_runner(config, device, position, join_group(device, workers, position), exchange), workers)


def load_model(config: Config, executor: Executor, layout: CacheLayout, watch: Stopwatch) -> None:
    args = config.args
    with doing("loading weights"):
        executor.call("load")
    if may_copy(config):
        needs = least_cache(config, layout), largest_step(config)
        copies = args.gpu_memory_utilization, *needs, args.dequantized_copies
        executor.call("call_part", "quantization", "copy_matrices", *copies)
    watch.lap("load weights")


def allocate_cache(config: Config, executor: Executor, layout: CacheLayout, device: Device, watch: Stopwatch) -> Capacity:
    """Warm up, measure the memory that is left, and allocate the KV cache in it."""
    args = config.args
    with doing("warming up"):
        executor.call("warm_up")
    watch.lap("warm-up")
    with doing("measuring memory"):
        budgets = executor.call_all("profile", args.gpu_memory_utilization, args.kv_cache_memory_bytes)
    budget = min(budgets)
    warn_uneven(config, budgets)
    if args.kv_cache_memory_bytes is None:
        if config.device_facts.one_memory:
            budget = share_memory(config, layout, budget)  # every rank of a machine sees all of its memory
        else:
            budget = even_out(config, layout, budgets) // device.sharers(config.node_ranks)
    watch.lap("profile")
    capacity = fit_or_warn(config, layout, int(budget * model_share(config, layout)), args.num_gpu_blocks_override)
    with doing("allocating the cache"):
        each = snapshot_records(config, layout)
        executor.call("allocate", capacity.pages, capacity.max_model_len, capacity.snapshots or 0, each)
    watch.lap("allocate cache")
    return capacity


def warn_uneven(config: Config, budgets: Sequence[int]) -> None:
    """Log which rank's GPU limits the KV cache of all, if another one has much more memory for it.

    budgets: bytes of each rank. Stages hold different layers, so their budgets differ anyway.
    """
    least, most = min(budgets), max(budgets)
    if config.stages > 1 or config.device_facts.one_memory or most <= UNEVEN_RATIO * least:
        return
    nodes = share_ranks(config.world, config.args.nnodes)

    def name(rank: int) -> str:
        node = next(number for number, own in enumerate(nodes) if rank in own)
        return f"rank {rank} on node {node}" if len(nodes) > 1 else f"rank {rank}"

    logger.warning(
        "%s has %.1f GiB for the KV cache and %s has %.1f GiB: all ranks use what the first one has. Give the ranks GPUs of "
        "one size (CUDA_VISIBLE_DEVICES), and end other programs on them",
        name(budgets.index(least)), least / 2**30, name(budgets.index(most)), most / 2**30,
    )  # fmt: skip


def connect_expert_peers(
    config: Config, device: Device, ends: PeerLinks, workers: "Workers | None"
) -> "tuple[ExpertPeerWatch, SharedExperts]":
    """Connect to the engines that share experts with this one."""
    args = config.args
    patience = connect_timeout(args), RANK_TIMEOUT_SHARE * step_timeout(args)
    watch = ExpertPeerWatch(workers, ends.first // config.ranks, config.ranks, *patience)
    return watch, join_expert_peers(config, device, ends.of(ends.first), watch)


def start_workers(config: Config, ends: PeerLinks | None = None) -> "Workers":
    """Start the processes of the other ranks, which begin their imports."""
    from quire.engine.agreement import draft_files, resolved_values
    from quire.engine.executor import wire
    from quire.engine.executor.launch import find_nodes
    from quire.engine.executor.workers import RankTimeouts, Workers

    args, facts, began = config.args, config.facts, time.monotonic()
    rank_args = replace(
        args,
        model=str(facts.files.path.absolute()),
        revision=None,
        device=config.device,
        block_size=config.page_size,
        max_num_batched_tokens=config.max_batched_tokens,
        max_num_seqs=config.max_seqs,
    )
    rank_args, links = find_nodes(rank_args, config.world)
    gpus = ",".join(named_gpus() or map(str, range(config.device_facts.count))) if config.device == "cuda" else ""
    drafts = {} if links is None else draft_files(config)
    start = wire.StartRank(rank_args, 0, resolved_values(config), drafts, gpus)
    start_by = began + RANK_TIMEOUT_SHARE * args.engine_start_timeout
    timeouts = RankTimeouts(start_by, RANK_TIMEOUT_SHARE * step_timeout(args))
    return Workers(start, config.world, timeouts, links, ends)
