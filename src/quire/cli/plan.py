"""`quire plan MODEL`: what a model needs and how much fits, from file headers alone. Loads nothing and needs no GPU.

Weights, cache and what features take (`Feature.memory`) are exact; activations are the formula of `config/memory.py`. The
engine measures its largest step instead, so its page count differs by a few percent. With several ranks or LoRA the model is
built without weights (`engine/memory.py`), so a plan refuses what the start of the engine would refuse.
"""

import argparse
import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.cache.capacity import pages_for
from quire.cli.model_tag import add_model_tag, engine_args
from quire.cli.plan_text import MemoryPlan, render
from quire.config.args import EngineArgs, add_cli_arguments, local_engines
from quire.config.config import Config
from quire.config.dequantized_copies import NOTHING, DequantizedCopies
from quire.config.facts import CHUNKED, ModelFacts, read_facts
from quire.config.host import available_host_bytes
from quire.config.resolve import find_files, resolve
from quire.device.registry import open_device
from quire.engine.layouts import fit_cache, model_share, share_memory, whole_layout
from quire.engine.memory import (
    draft_name,
    feature_memory,
    largest_part,
    largest_step,
    least_cache,
    rank_sizes,
    reserved_graph_bytes,
    weights_of,
)
from quire.features.host import Memory, Sizes
from quire.files.resolve import with_weights_on_disk
from quire.models.registry import find_family
from quire.sim.cards import CARDS, find_card
from quire.types.cache import CacheLayout
from quire.types.errors import ConfigError

FEWEST_BYTES = 2**20  # a smaller number without a unit is taken for a mistake
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
    """Return the configuration of an engine on a device with `memory` bytes, and those bytes. The device need not exist."""
    facts = read_plan_facts(args)
    kind = args.device if args.device != "auto" else "cuda" if memory is not None else "cpu"
    if kind == "cuda" and memory is None:
        raise ConfigError("a plan for a GPU needs its memory; add --memory, such as --memory 80GiB, or --card")
    total = memory if memory is not None else available_host_bytes()
    return resolve(args, lambda: kind, lambda name: open_device(name).facts(memory=total), facts, serving, fetch=False), total


@dataclass(frozen=True)
class _Use:
    """Bytes on one device (in one memory: of all ranks and engines) that are taken before there is a cache."""

    weights: int  # of all ranks
    stored_as: str
    held: int  # weights on one device
    steps: int
    graphs: int
    total: int
    usable: int
    reserved: int
    cache: int
    copied: int
    refused: str  # why there are no copies, where there could be
    sizes: Sequence[Sizes]  # of each rank
    ranks: Sequence[Mapping[str, Memory]]  # of the features, on each rank of the device

    def sum(self, field: str, *names: str) -> int:
        return sum(getattr(rank[name], field) for rank in self.ranks for name in names or rank)


def _use(config: Config, layout: CacheLayout, total: int) -> _Use:
    args, device = config.args, open_device(config.device)
    weights, stored_as = weights_of(config.facts, config.quantization, config.kept_forms, config.dtype)
    shared = config.device_facts.one_memory
    held = weights if shared else largest_part(config, weights)
    sizes = rank_sizes(config)
    ranks = [feature_memory(config, each) for each in sizes]
    here = ranks if shared else [max(ranks, key=_taken)]
    steps = max(largest_step(config), *(memory.step for rank in ranks for memory in rank.values()))
    graphs = reserved_graph_bytes(config)
    used = (local_engines(args) if shared else 1) * (held + sum(map(_taken, here)) + graphs + steps)
    budget = device.plan_budget(total, args.gpu_memory_utilization, used)
    if not budget.usable:
        raise ConfigError(f"gpu_memory_utilization {args.gpu_memory_utilization:g} leaves nothing of {total:,} bytes; raise it")
    wanted = ranks[0]["quantization"].optional
    least, asked = least_cache(config, layout), bool(args.dequantized_copies)
    copies = DequantizedCopies(wanted, budget.usable, used + budget.reserved, least, asked)
    copied = wanted if wanted and copies.fit else 0
    refused = copies.reason if wanted and not copied else NOTHING if asked and not wanted else ""
    if copied:
        used += copied
        budget = device.plan_budget(total, args.gpu_memory_utilization, used)
    return _Use(
        weights,
        stored_as,
        held,
        steps,
        graphs,
        used,
        budget.usable,
        budget.reserved,
        budget.cache,
        copied,
        refused,
        sizes,
        here,
    )


def plan_for(config: Config, total: int) -> MemoryPlan:
    args, facts = config.args, config.facts
    layout = whole_layout(config)
    use = _use(config, layout, total)
    shared = config.device_facts.one_memory
    left = use.usable - use.total - use.reserved
    whole = args.kv_cache_memory_bytes or (share_memory(config, layout, use.cache) if shared else use.cache)
    cache = int(whole * model_share(config, layout))
    pages, snapshots, length, problems = _fit(config, layout, cache, use.usable / total)
    asked = whole * (config.world * local_engines(args) if shared else 1)
    if args.kv_cache_memory_bytes and asked > left:
        problems.append(f"kv_cache_memory_bytes asks for {gib(asked)}, but only {gib(left)} are left")
    if args.dequantized_copies and use.refused not in ("", NOTHING):
        problems.append(f"dequantized_copies: {use.refused}")
    draft_cache = sum(sizes.draft_cache for sizes in use.sizes)
    lengths = sorted({size for size in TYPICAL_LENGTHS if size < length} | ({length} if length else set()))
    return MemoryPlan(
        model=facts.files.name,
        architecture=facts.architecture,
        served_by="quire" if find_family(facts) else "transformers",
        parameters=facts.parameters,
        parameters_counted=facts.weight_bytes > 0,
        weights_stored=facts.weight_bytes,
        weights_loaded=use.weights,
        weights_held=use.held,
        weights_as=use.stored_as,
        copies=use.copied,
        no_copies=use.refused,
        dtype=config.dtype,
        device=config.device,
        memory=total,
        memory_usable=use.usable,
        activations=use.steps,
        reserved=use.reserved,
        graphs=use.graphs,
        max_batched_tokens=config.max_batched_tokens,
        max_seqs=config.max_seqs,
        cache_dtype=config.cache_dtype,
        **_per_kind(facts, config.cache_bytes),
        page_size=config.page_size,
        bytes_per_page=layout.bytes_per_page,
        states=len(facts.states),
        bytes_per_state=config.state_bytes,
        snapshots=snapshots,
        drafter=draft_name(config),
        drafts_by_text=config.text_drafter is not None,
        draft_weights=use.sum("weights", "speculation") - draft_cache,
        draft_cache=draft_cache or max(0, whole - cache),
        adapters=config.max_loras,
        adapter_rank=args.max_lora_rank if config.max_loras else 0,
        adapter_bytes=use.sum("reserved", "lora"),
        weights_twice=use.sum("weights", "lora"),
        engines=args.data_parallel_size,
        ranks=config.world,
        stages=tuple(len(stage) for stage in config.stage_layers),
        cache=max(0, cache),
        pages=pages,
        positions=facts.max_position,
        max_model_len=length,
        concurrency={size: _concurrency(layout, pages, size, config) for size in lengths},
        fits=not problems,
        advice=tuple(problems) or _shrunk(config, layout, length, cache),
    )


def _taken(rank: Mapping[str, Memory]) -> int:
    return sum(memory.weights + memory.reserved for memory in rank.values())


def _concurrency(layout: CacheLayout, pages: int, size: int, config: Config) -> float:
    """Return how many requests of that size the pages hold at once."""
    if not layout.groups:
        return config.max_seqs
    return pages / pages_for(layout, size, config.max_batched_tokens)


def read_plan_facts(args: EngineArgs) -> ModelFacts:
    """Read headers of weights that are on disk; of a hub model only the configuration is fetched."""
    return read_facts(with_weights_on_disk(find_files(args, weights=False)), args.hf_overrides)


def _fit(config: Config, layout: CacheLayout, cache: int, share: float) -> tuple[int, int, int, list[str]]:
    """Return pages, snapshots of recurrent states, the length that they serve, and why there are none."""
    try:
        capacity = fit_cache(config, layout, max(0, cache), config.args.num_gpu_blocks_override)
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
    return capacity.pages, capacity.snapshots or 0, capacity.max_model_len, []


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
