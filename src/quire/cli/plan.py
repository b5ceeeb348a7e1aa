"""`quire plan MODEL`: what a model needs and how much fits, from file headers alone. Loads nothing and needs no GPU.

Weights and cache are exact; the largest step's activations are the formula of `config/memory.py`. The engine measures what
it can instead, so its page count differs by a few percent. Where a model is divided, or adapters are asked for, it is built
without weights (`engine/rehearsal.py`): then a plan refuses what the engine's start would refuse. So are quantized ones whose
files are elsewhere (`engine/expected.py`).
"""

import argparse
import dataclasses
import json
import re
from typing import Any

from quire.cache.capacity import fit, fit_states, pages_for
from quire.cli.model_tag import add_model_tag, engine_args
from quire.cli.plan_beside import what_is_beside
from quire.cli.plan_copies import plan_copies
from quire.cli.plan_text import MemoryPlan, render
from quire.cli.plan_weights import largest_part, weights_of
from quire.config.args import EngineArgs, add_cli_arguments, local_engines
from quire.config.config import Config
from quire.config.facts import CHUNKED, ModelFacts, read_facts
from quire.config.host import available_host_bytes
from quire.config.resolve import find_files, resolve
from quire.device.registry import open_device
from quire.engine.copies import largest_step
from quire.engine.layouts import model_share, share_memory, whole_layout
from quire.files.resolve import with_weights_on_disk
from quire.models.registry import find_family
from quire.sim.cards import CARDS, find_card
from quire.types.cache import CacheLayout
from quire.types.errors import ConfigError

FEWEST_BYTES = 2**20  # that somebody means who gives no unit
MOST_BYTES = 2**60
TYPICAL_LENGTHS = (512, 2048, 8192, 32768)
_SIZE = re.compile(r"^(?P<number>\d+(\.\d+)?)\s*(?P<unit>[KMGT]?)(?P<binary>i?)B?$", re.IGNORECASE)


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "plan",
        usage="%(prog)s [MODEL] [options]",
        help="how much memory a model needs and what fits",
        description="Prints what a model needs and how many requests fit, reading only file headers. Takes all engine "
        "options, and counts what they change.",
    )
    add_model_tag(parser)
    parser.add_argument(
        "--memory", "--gpu-memory", type=read_size, metavar="SIZE", default=None, help="memory of the device: 80GiB, 24GB; "
        "given without --device cpu, the device is a GPU (default: the memory this machine has available, on CPU)",
    )  # fmt: skip
    parser.add_argument(
        "--card", metavar="NAME", default=None, help=f"instead, a GPU with the memory of this one: {', '.join(CARDS)}"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_cli_arguments(parser)
    parser.set_defaults(run=run)


def run(namespace: argparse.Namespace) -> int:
    args, memory = engine_args(namespace), namespace.memory
    if namespace.card is not None:
        if memory is not None or args.device not in ("auto", "cuda"):
            other = "--memory" if memory is not None else f"--device {args.device}"
            raise ConfigError(f"--card is a GPU and its memory; drop it, or {other}")
        memory = find_card(namespace.card).memory
    plan = make_plan(args, memory)
    print(json.dumps(dataclasses.asdict(plan), indent=2) if namespace.json else render(plan))
    return 0 if plan.fits else 1


def make_plan(args: EngineArgs, memory: int | None) -> MemoryPlan:
    return plan_for(*resolve_for(args, memory))


def resolve_for(args: EngineArgs, memory: int | None, serving: bool = True) -> tuple[Config, int]:
    """The configuration of an engine on a device with so much memory, which need not be there; and how much that is."""
    facts = read_plan_facts(args)
    kind = args.device if args.device != "auto" else "cuda" if memory is not None else "cpu"
    if kind == "cuda" and memory is None:
        raise ConfigError("a plan for a GPU needs its memory; add --memory, such as --memory 80GiB, or --card")
    total = memory if memory is not None else available_host_bytes()
    return resolve(args, lambda: kind, lambda name: open_device(name).facts(memory=total), facts, serving, fetch=False), total


def plan_for(config: Config, total: int) -> MemoryPlan:
    args, facts, kind = config.args, config.facts, config.device
    layout = whole_layout(config)
    weights, held_as = weights_of(facts, config.quantization, config.kept_forms, config.dtype)
    beside = what_is_beside(config)
    steps = max(largest_step(config), beside.draft_steps)
    shared = config.device_facts.one_memory
    here = local_engines(args) if shared else 1
    held = weights if shared else largest_part(config, weights)  # by one device: each rank has its own
    used = here * (held + beside.total + steps)
    budget = open_device(kind).plan_budget(total, args.gpu_memory_utilization, used)
    if not budget.usable:
        raise ConfigError(f"gpu_memory_utilization {args.gpu_memory_utilization:g} leaves nothing of {total:,} bytes; raise it")
    copies = plan_copies(config, layout, budget.usable, used + budget.reserved)
    if copies.made:
        used += copies.made
        budget = open_device(kind).plan_budget(total, args.gpu_memory_utilization, used)
    left = budget.usable - used - budget.reserved
    whole = args.kv_cache_memory_bytes or (share_memory(config, layout, budget.cache) if shared else budget.cache)
    cache = int(whole * model_share(config, layout))
    pages, snapshots, length, problems = _fit(config, layout, cache, budget.usable / total)
    if args.kv_cache_memory_bytes and (asked := whole * (config.world if shared else 1) * here) > left:
        problems.append(f"kv_cache_memory_bytes asks for {gib(asked)}, but only {gib(left)} are left")
    if args.dequantized_copies and copies.refused:
        problems.append(f"dequantized_copies: {copies.refused}")
    sizes = sorted({size for size in TYPICAL_LENGTHS if size < length} | ({length} if length else set()))
    return MemoryPlan(
        model=facts.files.name,
        architecture=facts.architecture,
        served_by="quire" if find_family(facts) else "transformers",
        parameters=facts.parameters,
        parameters_counted=facts.weight_bytes > 0,
        weights_stored=facts.weight_bytes,
        weights_loaded=weights,
        weights_held=held,
        weights_as=held_as,
        copies=copies.made,
        no_copies=copies.refused or copies.note,
        dtype=config.dtype,
        device=kind,
        memory=total,
        memory_usable=budget.usable,
        activations=steps,
        reserved=budget.reserved,
        max_batched_tokens=config.max_batched_tokens,
        max_seqs=config.max_seqs,
        cache_dtype=config.cache_dtype,
        **_per_kind(facts, config.cache_bytes),
        page_size=config.page_size,
        bytes_per_page=layout.bytes_per_page,
        states=len(facts.states),
        bytes_per_state=config.state_bytes,
        snapshots=snapshots,
        drafter=beside.drafter,
        drafts_by_text=beside.by_text,
        draft_weights=beside.draft_weights,
        draft_cache=beside.draft_cache or max(0, whole - cache),
        adapters=config.max_loras,
        adapter_rank=args.max_lora_rank if config.max_loras else 0,
        adapter_bytes=beside.adapters,
        weights_twice=beside.held_twice,
        engines=args.data_parallel_size,
        ranks=config.world,
        stages=tuple(len(stage) for stage in config.stage_layers),
        cache=max(0, cache),
        pages=pages,
        positions=facts.max_position,
        max_model_len=length,
        concurrency={size: _beside(layout, pages, size, config) for size in sizes},
        fits=not problems,
        advice=tuple(problems) or _shrunk(config, layout, length, cache),
    )


def _beside(layout: CacheLayout, pages: int, size: int, config: Config) -> float:
    """How many requests of that size there is room for at once."""
    if not layout.groups:
        return config.max_seqs
    return pages / pages_for(layout, size, config.max_batched_tokens)


def read_plan_facts(args: EngineArgs) -> ModelFacts:
    """Weights are looked at only where they already are: a plan for a hub model fetches its configuration alone."""
    return read_facts(with_weights_on_disk(find_files(args, weights=False)), args.hf_overrides)


def _fit(config: Config, layout: CacheLayout, cache: int, share: float) -> tuple[int, int, int, list[str]]:
    """Pages, snapshots of states, the length they can serve, and why there are none."""
    snapshots = 0
    try:
        if config.state_bytes:
            snapshots, cache = fit_states(
                config.state_bytes,
                max(0, cache),
                config.max_seqs,
                config.prefix_caching,
                bool(layout.groups),
                config.states_each,
            )
        capacity = fit(
            layout,
            max(0, cache),
            config.max_model_len,
            explicit=config.max_model_len_explicit,
            chunk=config.max_batched_tokens,
            override=config.args.num_gpu_blocks_override,
        )
    except ConfigError as error:
        missing = (pages_for(layout, config.max_model_len, config.max_batched_tokens) + 1) * layout.bytes_per_page - cache
        problems = [str(error)]
        if cache <= 0:
            problems = [f"the weights and one step leave no room: {gib(-cache)} are missing before any cache"]
        problems.append(f"a device with {gib(int(missing / share))} more would serve {config.max_model_len} tokens")
        if config.dtype == "float32":
            problems.append("--dtype bfloat16 halves weights and cache")
        floats = config.quantization is None and config.facts.files.format != "gguf"
        if cache <= 0 and config.device == "cuda" and floats:
            problems.append("--quantization fp8 halves the weights, at some loss of accuracy")
        if cache > 0 and config.cache_bytes > 1:
            problems.append("--kv-cache-dtype fp8 makes more of the cache, at some loss of accuracy")
        return 0, 0, 0, problems
    return capacity.pages, snapshots, capacity.max_model_len, []


def _shrunk(config: Config, layout: CacheLayout, length: int, cache: int) -> tuple[str, ...]:
    if not 0 < length < config.max_model_len:
        return ()
    needed = (pages_for(layout, config.max_model_len, config.max_batched_tokens) + 1) * layout.bytes_per_page
    return (
        f"the context is cut from {config.max_model_len} to {length} tokens; {gib(needed - cache)} more cache would serve all",
    )


def _per_kind(facts: ModelFacts, element_bytes: int) -> dict[str, dict[str, int]]:
    layers: dict[str, int] = {}
    per_token: dict[str, int] = {}
    for layer in facts.layers:
        reach = "chunks" if facts.hf.get("model_type") in CHUNKED else "a window"
        name = "full attention" if layer.window is None else f"{reach} of {layer.window}"
        layers[name] = layers.get(name, 0) + 1
        per_token[name] = per_token.get(name, 0) + layer.bytes_per_token(element_bytes)
    return {"layers": layers, "bytes_per_token": per_token}


def read_size(text: str) -> int:
    match = _SIZE.match(text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 80GiB, 24GB or 512MiB")
    power = " KMGT".index(match["unit"].upper() or " ")
    size = float(match["number"]) * (1024 if match["binary"] else 1000) ** power
    if size > MOST_BYTES:
        raise argparse.ArgumentTypeError(f"{text[:20]} is more than any device has; say a size such as 80GiB")
    count = int(size)
    if not count:
        raise argparse.ArgumentTypeError(f"{text} is nothing; say a size such as 80GiB")
    if text == match["number"] and count < FEWEST_BYTES:
        raise argparse.ArgumentTypeError(f"{text} would be bytes; say {text}GiB")
    return count


def gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"
