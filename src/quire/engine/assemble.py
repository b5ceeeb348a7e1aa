"""Puts an engine core together: model on the device, pages counted and allocated, scheduler and executor joined.

Importing this file does not import torch: only the local executor needs it.
"""

import contextlib
import logging
import os
import time
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from quire.cache.capacity import MOST_SNAPSHOTS, Capacity, pages_for
from quire.config.args import EngineArgs, connect_timeout, local_engines, step_timeout
from quire.config.config import Config
from quire.config.cores import wait_politely
from quire.config.facts import DeviceFacts, ModelFacts
from quire.config.resolve import resolve
from quire.config.structured import structured_backend
from quire.device.registry import describe, find_device, open_device
from quire.device.visible import named_gpus
from quire.dist.mesh import Position
from quire.engine.companions import CompanionWatch, Ends
from quire.engine.core import EngineCore
from quire.engine.draft_by_text import TextDrafter
from quire.engine.executor.base import Executor
from quire.engine.executor.fake import FakeExecutor
from quire.engine.executor.fake_model import FakeModel
from quire.engine.layouts import even_out, fit_cache, model_share, share_memory, text_drafter_config, whole_layout
from quire.engine.learnt import open_learnt
from quire.engine.memory import largest_step, least_cache
from quire.engine.numa import bind_process
from quire.engine.runners import bounded_facts, join_companions, make_device_drafter, make_runner, start_device
from quire.engine.scheduling import make_scheduler
from quire.engine.timeline import Stopwatch, Timeline
from quire.features.quantization.host import may_copy
from quire.features.structured.grammar.lanes import GrammarLanes
from quire.models.registry import complete_facts
from quire.progress import doing
from quire.sched.draft.ahead import SpeculationAhead
from quire.sched.draft.costs import A_CPU, Prior
from quire.sched.draft.make import make_drafter
from quire.sched.draft.speculation import Speculation
from quire.types.cache import CacheLayout
from quire.types.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from quire.dist.experts import SharedExperts
    from quire.engine.executor.workers import Workers
    from quire.runner.draft.base import DeviceDrafter, Drafter

logger = logging.getLogger(__name__)

FAKE_LATENCY = "QUIRE_FAKE_LATENCY"  # environment: how many seconds a step of the fake executor takes
GPU_RIDGE, GPU_WAIT = 150.0, 0.25  # of `Prior`, as an H200 has them with an 8B
GPU_LAYER = 0.2  # of a layer of that: what the smallest takes
LAUNCHED = 0.05  # of a step: what it takes to have a drafter guess, however small it is
MOST_FAKE_PAGES = 1 << 17
SOONER = 0.9  # of the time after which an engine counts as hung: a rank that hangs is named before


@dataclass(frozen=True)
class StartedCore:
    core: EngineCore
    max_model_len: int
    pages: int
    timeline: Timeline  # of everything since the stopwatch was started


def import_torch() -> None:
    """Whoever is first to import it sets how its threads wait."""
    wait_politely()
    with doing("importing torch"):
        import torch  # noqa: F401


def resolve_here(args: EngineArgs, watch: Stopwatch, serving: bool = False, engine: int = 0, rank: int | None = None) -> Config:
    """The configuration of an engine in this process, or of a rank of one. Whatever can be wrong without torch is found before
    it is imported. `engine`: its number, among those on this machine."""
    engines, sharing = local_engines(args), args.kv_cache_memory_bytes is not None
    ranks = args.tensor_parallel_size * args.pipeline_parallel_size
    if args.numa_bind:
        args = bind_process(args, engine, rank)

    def find() -> str:
        watch.lap("configuration")
        import_torch()
        watch.lap("imports")
        found = find_device(engine, engines, sharing, ranks)
        watch.lap("device")
        return found

    def ask(name: str) -> DeviceFacts:
        taken = name == "cuda" and (args.device != name or rank is not None)  # by whoever found it, or by the first rank
        if engines > 1 and not taken:
            open_device(name).take_part(engine, engines, sharing, ranks)
        facts = describe(name)
        watch.lap("device")
        return facts

    with doing(f"reading the configuration of {args.model}"):
        complete = None if args.distributed_executor_backend == "fake" else partial(complete_facts, impl=args.model_impl)
        config = resolve(args, find, ask, serving=serving, complete=complete)
    watch.lap("configuration")
    return config


def start_core(
    config: Config,
    watch: Stopwatch | None = None,
    drafter: "Drafter | DeviceDrafter | None" = None,
    ends: Ends | None = None,
) -> StartedCore:
    """`watch` runs since whatever belongs to the start began; it is stopped here. `drafter` guesses tokens ahead. `ends`:
    ways to engines that share its experts."""
    watch = watch or Stopwatch()
    facts = bounded_facts(config)
    if facts.unplanned:
        raise ModelError(facts.unplanned)
    layout = whole_layout(config)
    local = partial(start_local, drafter=drafter, ends=ends)
    start = start_fake if config.args.distributed_executor_backend == "fake" else local
    speculation = _speculation(config, watch)  # a model that drafts by text takes its memory first
    try:
        executor, capacity = start(config, facts, layout, watch)
    except BaseException:
        if speculation is not None:
            speculation.close()
        raise
    drafts = 0 if drafter is None else drafter.most
    scheduler = make_scheduler(
        config,
        layout,
        capacity.pages,
        capacity.max_model_len,
        facts.parameters,
        drafts=drafts,
        speculation=speculation,
        snapshots=capacity.snapshots,
    )
    most = drafts if speculation is None else speculation.most
    room = (config.max_loras, config.max_cpu_loras)
    core = EngineCore(scheduler, executor, config.depth, make_grammars(config, most), adapters=room)
    watch.lap("scheduler")
    return StartedCore(core, capacity.max_model_len, capacity.pages, watch.read())


def _speculation(config: Config, watch: Stopwatch) -> Speculation | None:
    asked = config.speculation
    weighted = config.drafts_on_device or config.text_drafter is not None
    if asked is None or (weighted and config.args.distributed_executor_backend == "fake"):
        return None
    options: dict[str, Any] = {
        "adaptive": asked.adaptive,
        "largest_batch": asked.disable_by_batch_size,
        "schedule": asked.num_speculative_tokens_per_batch_size,
        "prior": _expected_costs(config),
        **open_learnt(config),
    }
    when = 'where they pay; "adaptive": false in speculative_config has them always' if asked.adaptive else "always"
    logger.info("speculation: method %s, at most %d drafts of a row, %s", asked.method, asked.num_speculative_tokens, when)
    if weighted:
        companion = None if config.text_drafter is None else start_text_drafter(config, config.text_drafter)
        watch.lap("draft model")
        return SpeculationAhead(companion, asked.num_speculative_tokens, **options)
    return Speculation(make_drafter(asked, config.facts.vocab_size), asked.num_speculative_tokens, **options)


def _expected_costs(config: Config) -> Prior:
    """Of drafts, before any were measured. A model that drafts takes as much of a step as it is smaller, but of each layer no
    less than what launching it takes; rows that it runs together cost a GPU what one does."""
    overlaps, facts, layers = config.device_facts.overlaps, config.draft_facts or config.text_drafter, len(config.facts.layers)
    guess = reading = 0.0
    if facts is not None:
        reading = facts.parameters / max(1, config.facts.parameters)
        guess = LAUNCHED + max(reading, GPU_LAYER * len(facts.layers) / max(1, layers) if overlaps else 0.0)
    elif config.draft_head is not None:
        reading = 1 / max(1, layers)
        guess = LAUNCHED + reading
    wait = GPU_WAIT if config.depth else 0.0
    each = 0.0 if overlaps else guess
    return Prior(GPU_RIDGE if overlaps else A_CPU.ridge, wait, guess, each, min(1.0, reading))


def start_text_drafter(config: Config, facts: ModelFacts) -> TextDrafter:
    """An engine beside the engine."""
    from quire.text.tokenizer_files import load_tokenizer, read_tokenizer

    args, path, began = config.args, facts.files.path.absolute(), time.monotonic()
    own, other = (
        load_tokenizer(config.facts.files, tokenizer=args.tokenizer, revision=args.tokenizer_revision),
        read_tokenizer(path),
    )
    started = start_core(text_drafter_config(config, facts, partial(complete_facts, impl=EngineArgs.model_impl)))
    end = own.eos_token_id if own.eos_token_id in config.facts.eos_ids else next(iter(config.facts.eos_ids), None)
    vocabularies = config.facts.vocab_size, facts.vocab_size
    logger.info(
        "%s drafts by text: it has %d tokens of its own, beside the model's %d; %.1f s to start it",
        path.name, facts.vocab_size, config.facts.vocab_size, time.monotonic() - began,
    )  # fmt: skip
    return TextDrafter(started.core, started.max_model_len, frozenset(facts.eos_ids), (own, other), vocabularies, end)


def make_grammars(config: Config, drafts: int) -> GrammarLanes:
    """Nothing is started before the first request with a grammar."""
    args, facts = config.args, config.facts
    path = str(facts.files.path.absolute())
    backend = structured_backend(args.structured_outputs_config)
    return GrammarLanes(path, args.tokenizer, args.tokenizer_revision, facts.vocab_size, facts.eos_ids, drafts, backend)


def start_local(
    config: Config,
    facts: ModelFacts,
    layout: CacheLayout,
    watch: Stopwatch,
    drafter: "Drafter | DeviceDrafter | None" = None,
    ends: Ends | None = None,
) -> tuple[Executor, Capacity]:
    """The model in this process, or the first rank's share of it."""
    workers = None if config.world == 1 else start_workers(config, drafter, ends)  # which import torch while we do
    executor: Executor | None = None
    try:
        import_torch()
        with doing("importing the model's code"):
            from quire.engine.executor.local import LocalExecutor
            from quire.engine.executor.ranks import RanksExecutor, join_group

        watch.lap("imports")
        args, device = config.args, start_device(config)
        if config.device_facts.advice and facts.files.format == "gguf" and args.dtype == "auto":
            logger.warning("%s, or say dtype='float32' to have it this way", config.device_facts.advice)
        companions, exchange = None, None
        if ends is not None:
            companions, exchange = meet_companions(config, ends, workers)
        if config.drafts_on_device:
            drafter = make_device_drafter(config, layout)
        if workers is None:
            executor = LocalExecutor(make_runner(config, device, drafter=drafter, exchange=exchange))
        elif config.stages > 1:
            from quire.engine.executor.stages import StagesExecutor
            from quire.engine.pipeline import join_pipeline, make_stage_runner

            ring = join_pipeline(config, device, 0, workers.memory, workers.peers, workers, workers.remote)
            executor = StagesExecutor(make_stage_runner(config, device, ring), workers, ring)
        else:
            position = Position(0, config.ranks, args.enable_expert_parallel)
            group = join_group(device, workers, position)
            executor = RanksExecutor(make_runner(config, device, position, group, drafter, exchange), workers)
        with doing("loading weights"):
            executor.call("load")
        if may_copy(config):
            needs = least_cache(config, layout), largest_step(config)
            executor.call("copy_matrices", args.gpu_memory_utilization, *needs, args.dequantized_copies)
        watch.lap("load weights")
        if companions is not None and exchange is not None:
            with doing("waiting for the engines that share its experts"):
                exchange.meet()
            companions.met = True
            watch.lap("other engines")
        with doing("warming up"):
            executor.call("warm_up")
        watch.lap("warm-up")
        with doing("measuring memory"):
            budgets = executor.call_all("profile", args.gpu_memory_utilization, args.kv_cache_memory_bytes)
        budget = min(budgets)
        if args.kv_cache_memory_bytes is None:
            if config.device_facts.one_memory:
                budget = share_memory(config, layout, budget)  # of one machine, and each sees all of it
            else:
                budget = even_out(config, layout, budgets) // device.sharers(config.node_ranks)
        watch.lap("profile")
        capacity = _fit(config, layout, int(budget * model_share(config, layout)), args.num_gpu_blocks_override)
        with doing("allocating the cache"):
            executor.call("allocate", capacity.pages, capacity.max_model_len, capacity.snapshots or 0)
        watch.lap("allocate cache")
    except BaseException:
        if workers is not None:
            workers.end()
        elif executor is not None:
            with contextlib.suppress(Exception):  # a device that failed says so once
                executor.stop()
        raise
    return executor, capacity


def meet_companions(config: Config, ends: Ends, workers: "Workers | None") -> "tuple[CompanionWatch, SharedExperts]":
    args = config.args
    patience = connect_timeout(args), SOONER * step_timeout(args)
    watch = CompanionWatch(workers, ends.first // config.ranks, config.ranks, *patience)
    return watch, join_companions(config, ends.of(ends.first), watch)


def start_workers(config: Config, drafter: "Drafter | DeviceDrafter | None", ends: Ends | None = None) -> "Workers":
    """The other ranks' processes, which begin to import what they need."""
    from quire.engine.agreement import draft_files
    from quire.engine.executor.launch import find_nodes
    from quire.engine.executor.workers import Workers

    args, facts = config.args, config.facts
    if drafter is not None:
        raise ConfigError(f"{config.divided} is not supported with drafts; leave it at 1")
    told = replace(
        args,
        model=str(facts.files.path.absolute()),
        revision=None,
        device=config.device,
        block_size=config.page_size,
        max_num_batched_tokens=config.max_batched_tokens,
        max_num_seqs=config.max_seqs,
    )
    told, links = find_nodes(told, config.world)
    gpus = ",".join(named_gpus() or map(str, range(config.device_facts.count))) if config.device == "cuda" else ""
    drafts = {} if links is None else draft_files(config)
    return Workers(told, config.world, SOONER * step_timeout(args), links, ends, gpus, drafts)


def start_fake(config: Config, facts: ModelFacts, layout: CacheLayout, watch: Stopwatch) -> tuple[Executor, Capacity]:
    """No model. Unless the cache's size is given there is room for a full batch of the longest requests, within reason."""
    args = config.args
    override = args.num_gpu_blocks_override
    if override is None and args.kv_cache_memory_bytes is None:
        alone = pages_for(layout, config.max_model_len, config.max_batched_tokens)
        override = max(alone, min(alone * config.max_seqs, MOST_FAKE_PAGES))
    states = (MOST_SNAPSHOTS + 2) * config.max_seqs * config.state_bytes
    capacity = _fit(config, layout, args.kv_cache_memory_bytes or states, override)
    executor = FakeExecutor(
        layout,
        FakeModel.of(layout, vocab_size=facts.vocab_size, eos_id=next(iter(facts.eos_ids), None)),
        pages=capacity.pages,
        max_seqs=config.max_seqs,
        max_model_len=capacity.max_model_len,
        latency=_fake_latency(),
        recurrent=bool(facts.states),
    )
    watch.lap("fake model")
    return executor, capacity


def _fit(config: Config, layout: CacheLayout, budget: int, override: int | None) -> Capacity:
    capacity = fit_cache(config, layout, budget, override)
    if capacity.max_model_len < config.max_model_len:
        logger.warning(
            "max_model_len is %d instead of the model's %d: that is what fits the %.2f GiB left for the cache",
            capacity.max_model_len, config.max_model_len, budget / 2**30,
        )  # fmt: skip
    return capacity


def _fake_latency() -> float:
    text = os.environ.get(FAKE_LATENCY, "0")
    try:
        return max(0.0, float(text))
    except ValueError:
        raise ConfigError(f"{FAKE_LATENCY} must be seconds, got {text!r}") from None
