"""Assemble an engine core: configuration, executor, scheduler and grammar processes.

Importing this file does not import torch.
"""

from dataclasses import dataclass
from functools import partial

from quire.config.args import EngineArgs, local_engines
from quire.config.config import Config
from quire.config.facts import DeviceFacts
from quire.config.resolve import resolve
from quire.device.registry import describe, find_device, open_device
from quire.engine.core import EngineCore
from quire.engine.executor.counted import counted
from quire.engine.executor.fake import start_fake
from quire.engine.layouts import make_scheduler, whole_layout
from quire.engine.numa import bind_process
from quire.engine.runners import bounded_facts, import_torch
from quire.engine.speculation import make_speculation
from quire.engine.start_local import start_local
from quire.engine.timeline import Stopwatch, Timeline
from quire.features.experts.peers import PeerLinks
from quire.features.logits_processors.loading import make_validator
from quire.features.structured.constraints import GrammarLanes
from quire.features.structured.host import structured_backend
from quire.models.registry import complete_facts
from quire.progress import doing
from quire.types.errors import ModelError


@dataclass(frozen=True)
class StartedCore:
    """A started engine core and what the start decided."""

    core: EngineCore
    max_model_len: int
    pages: int
    timeline: Timeline  # since the stopwatch was started


def resolve_here(args: EngineArgs, watch: Stopwatch, serving: bool = False, engine: int = 0, rank: int | None = None) -> Config:
    """Return the configuration of an engine in this process, or of a rank. Whatever does not need torch is checked before its
    import.

    engine: number of the engine on this machine.
    """
    engines, sharing = local_engines(args), args.kv_cache_memory_bytes is not None
    ranks = args.tensor_parallel_size * args.pipeline_parallel_size
    if args.numa_bind:
        args = bind_process(args, engine, rank)

    def take_gpu() -> None:
        if rank is None and args.distributed_executor_backend == "external_launcher":
            from quire.engine.executor.launch import take_launched_gpu

            take_launched_gpu(args)
        if rank is None and args.distributed_executor_backend == "ray":
            from quire.engine.executor.ray_gpus import reserve_gpus

            reserve_gpus(args)

    def find() -> str:
        watch.lap("configuration")
        import_torch()
        watch.lap("imports")
        take_gpu()
        found = find_device(engine, engines, sharing, ranks)
        watch.lap("device")
        return found

    def ask(name: str) -> DeviceFacts:
        taken = name == "cuda" and (args.device != name or rank is not None)  # when it was found, or by the first rank
        if engines > 1 and not taken:
            open_device(name).take_part(engine, engines, sharing, ranks)
        if name == args.device == "cuda":
            take_gpu()
        facts = describe(name)
        watch.lap("device")
        return facts

    with doing(f"reading the configuration of {args.model}"):
        complete = None if args.distributed_executor_backend == "fake" else partial(complete_facts, impl=args.model_impl)
        try:
            config = resolve(args, find, ask, serving=serving, complete=complete)
        except BaseException:
            if args.distributed_executor_backend == "ray":
                from quire.engine.executor.ray_gpus import release_reservation

                release_reservation()
            raise
    watch.lap("configuration")
    return config


def start_core(config: Config, watch: Stopwatch | None = None, ends: PeerLinks | None = None) -> StartedCore:
    """Start an engine in this process.

    watch: runs since the start began; it is stopped here.
    ends: connections to engines that share its experts.
    """
    watch = watch or Stopwatch()
    facts = bounded_facts(config)
    if facts.unsupported_reason:
        raise ModelError(facts.unsupported_reason)
    validate = make_validator(config)
    layout = whole_layout(config)
    speculation = make_speculation(config, watch, start_core)  # a text drafter allocates its memory first
    try:
        if config.args.distributed_executor_backend == "fake":
            executor, capacity = start_fake(config, facts, layout, watch)
        else:
            executor, capacity = start_local(config, facts, layout, watch, ends)
    except BaseException:
        if speculation is not None:
            speculation.close()
        raise
    scheduler = make_scheduler(
        config,
        layout,
        capacity.pages,
        capacity.max_model_len,
        facts.parameters,
        speculation=speculation,
        snapshots=capacity.snapshots,
    )
    grammars = make_grammars(config, 0 if speculation is None else speculation.max_drafts)
    room = (config.max_loras, config.max_cpu_loras)
    core = EngineCore(scheduler, counted(executor, config), config.depth, grammars, adapters=room, validate=validate)
    open_disk_tier(core)
    watch.lap("scheduler")
    return StartedCore(core, capacity.max_model_len, capacity.pages, watch.read())


def open_disk_tier(core: EngineCore) -> None:
    """Find out what the ranks have on disk, if there is a disk tier."""
    arrivals = core.scheduler.arrivals
    if arrivals is None:
        return
    contents = core.executor.call_all("call_part", "tiers", "disk_contents")
    if all(each is not None for each in contents):
        arrivals.open_disk(contents)


def make_grammars(config: Config, drafts: int) -> GrammarLanes:
    """Return the grammar processes, which are started by the first request with a grammar."""
    args, facts = config.args, config.facts
    path = str(facts.files.path.absolute())
    backend = structured_backend(args.structured_outputs_config)
    return GrammarLanes(path, args.tokenizer, args.tokenizer_revision, facts.vocab_size, facts.eos_ids, drafts, backend)
