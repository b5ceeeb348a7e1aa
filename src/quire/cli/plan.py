"""`quire plan MODEL`: the memory that a model needs and what fits, from file headers alone. Loads nothing and needs no GPU.

Weights, cache and the memory of features (`Feature.memory`) are exact; activations follow a formula of `config/memory.py`. The
engine measures its largest step instead, so its page count differs by a few percent. With several ranks or LoRA the model is
built without weights (`engine/memory.py`), so a plan refuses everything that the start of the engine refuses.
"""

import argparse
import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.cache.layout import pages_for
from quire.cli.parser import add_model_tag, engine_args
from quire.config.args import EngineArgs, add_cli_arguments, local_engines
from quire.config.config import Config
from quire.config.dequantized_copies import NOTHING, DequantizedCopies
from quire.config.facts import ModelFacts, read_facts
from quire.config.families import has_chunked_attention
from quire.config.host import available_host_bytes
from quire.config.memory import largest_step
from quire.config.resolve import find_files, resolve
from quire.device.registry import open_device
from quire.engine.layouts import fit_cache, model_share, share_memory, whole_layout
from quire.engine.memory import (
    draft_name,
    feature_memory,
    largest_part,
    least_cache,
    rank_sizes,
    reserved_graph_bytes,
    weights_of,
)
from quire.features.host import Memory, Sizes
from quire.features.pooling.host import supported_tasks
from quire.files.resolve import with_weights_on_disk
from quire.models.registry import find_family
from quire.sim.analytic import CARDS, find_card
from quire.types.cache import CacheLayout
from quire.types.errors import ConfigError


@dataclass(frozen=True)
class MemoryPlan:
    """All sizes in bytes."""

    model: str
    architecture: str
    served_by: str  # "quire" or "transformers"
    parameters: int
    parameters_counted: bool  # from weight files, or estimated from the shapes
    weights_stored: int  # 0: there are no files
    weights_loaded: int
    weights_held: int  # by one device
    weights_as: str  # a dtype, or the file's blocks
    copies: int  # of quantized matrices, in the model's type, on one device
    no_copies: str  # why there are none although the model is quantized
    dtype: str
    device: str
    memory: int
    memory_usable: int
    activations: int
    reserved: int  # by the driver and other programs on the device
    graphs: int  # reserved for CUDA graphs
    max_batched_tokens: int
    max_seqs: int
    cache_dtype: str
    layers: dict[str, int]  # "full attention", "a window of N" or "chunks of N" -> layers
    bytes_per_token: dict[str, int]  # by the same kinds
    page_size: int
    bytes_per_page: int
    states: int  # recurrent layers
    bytes_per_state: int  # of all of them, for one request
    snapshots: int  # states of prefixes, in addition to one per request
    drafter: str  # the draft model or head; "" = none
    drafts_by_text: bool
    draft_weights: int
    draft_cache: int  # of each rank, in the model's pages; a text drafter has its own cache
    adapters: int  # slots
    adapter_rank: int  # the largest
    adapter_bytes: int  # reserved for them
    weights_twice: int  # of weights that adapters require in a second layout
    engines: int  # data_parallel_size; all other fields are of one engine; on a CPU they share the memory
    ranks: int  # processes that share the model; pages and cache are of each
    stages: tuple[int, ...]  # layers of each; pages and cache are those of the stage with most layers
    tasks: tuple[str, ...]  # that requests may ask of the model
    pooling: int  # reserved for pooling
    cache: int
    pages: int
    positions: int  # max_position of the model
    max_model_len: int
    concurrency: dict[int, float]  # length -> requests of that length at once
    fits: bool
    advice: tuple[str, ...]


def render(plan: MemoryPlan) -> str:
    counted = "" if plan.parameters_counted else ", estimated from the shapes"
    stored = f" ({size(plan.weights_stored)} as stored)" if plan.weights_stored else ""
    if plan.weights_held < plan.weights_loaded:
        stored += f", about {size(plan.weights_held)} on each GPU"
    code = "" if plan.served_by == "quire" else ", through transformers"
    lines = [
        ("Model", f"{plan.model} ({plan.architecture}{code}, {_count(plan.parameters)} parameters{counted})"),
        ("Device", _device(plan)),
        ("Weights", f"{size(plan.weights_loaded)} in {plan.weights_as}{stored}"),
        (
            "Largest step",
            f"{size(plan.activations)} for {plan.max_batched_tokens} tokens, {plan.max_seqs} requests (estimated)",
        ),
    ]
    if "generate" not in plan.tasks:
        lines.insert(1, ("Tasks", ", ".join(plan.tasks)))
        lines.append(("Pooling", f"{size(plan.pooling)} reserved for hidden states and results"))
    if plan.graphs:
        lines.append(("CUDA graphs", f"{size(plan.graphs)} reserved (--enforce-eager: none)"))
    lines += _optional_lines(plan)
    for kind, per_token in plan.bytes_per_token.items():
        lines.append(("Cache per token", f"{size(per_token)} in {plan.layers[kind]} layers with {kind}"))
    if plan.states:
        slots = f"one for each of {plan.max_seqs} requests, {plan.snapshots:,} of prefixes"
        lines.append(("State", f"{size(plan.bytes_per_state)} in {plan.states} recurrent layers: {slots}"))
    cache = size(plan.cache)
    if plan.bytes_per_page:
        pages = f"{plan.pages:,} pages of {plan.page_size} tokens, {size(plan.bytes_per_page)} each"
        cache = f"{cache} in {plan.cache_dtype}: {pages}{' in addition to the states' if plan.states else ''}"
    elif plan.states:
        cache = f"{cache} for states; there are no keys and values"
    else:
        cache = "none: an encoder reads each prompt whole in one step and keeps no keys and values"
    each = [f"{number} {what}" for number, what in ((plan.ranks, "ranks"), (plan.engines, "engines")) if number > 1]
    lines.append(("Cache", ", in each of ".join([cache, " of each of ".join(each)] if each else [cache])))
    if len(plan.stages) > 1:
        lines.append(("Stages", f"{len(plan.stages)}, of {', '.join(map(str, plan.stages))} layers"))
    lines.append(("Context", f"{plan.max_model_len:,} tokens (the model was made for {plan.positions:,})"))
    for length, requests in plan.concurrency.items():
        if plan.bytes_per_page or plan.states:
            lines.append(("At once", f"{_requests(requests, plan.max_seqs)} of {length:,} tokens"))
        else:
            prompts = min(plan.max_seqs, plan.max_batched_tokens // length)
            lines.append(("In one step", f"{prompts} prompts of {length:,} tokens"))
    lines += [("Advice" if plan.fits else "Does not fit", text) for text in plan.advice]
    out, last = [], ""
    for name, text in lines:
        out.append(f"{'' if name == last else name:<16} {text}")
        last = name
    return "\n".join(out)


def _optional_lines(plan: MemoryPlan) -> list[tuple[str, str]]:
    lines = []
    if plan.copies:
        lines.append(("Copies", f"{size(plan.copies)} in {plan.dtype}, for large batches (--no-dequantized-copies: none)"))
    elif plan.no_copies:
        lines.append(("Copies", f"none: {plan.no_copies}"))
    if plan.drafter:
        weights = f"{plan.drafter}, with {size(plan.draft_weights)} of weights" if plan.draft_weights else plan.drafter
        cache = f" and {size(plan.draft_cache)} of cache" if plan.draft_cache else ""
        how = " of its own: it drafts by text" if plan.drafts_by_text else " under the model's pages" if cache else ""
        lines.append(("Drafts", weights + cache + how))
    if plan.adapters:
        room = f"{plan.adapters} at once, of rank {plan.adapter_rank} at most"
        taken = f"{size(plan.adapter_bytes)} reserved" if plan.adapter_bytes else "each takes its own size when it is loaded"
        lines.append(("Adapters", f"{room}: {taken}"))
    if plan.weights_twice:
        lines.append(("", f"{size(plan.weights_twice)} of the weights are stored in a second layout for them"))
    return lines


def _device(plan: MemoryPlan) -> str:
    if plan.device != "cuda":
        return f"{plan.device}, {size(plan.memory)} available"
    usable, reserved = size(plan.memory_usable), size(plan.reserved)
    count = plan.ranks * plan.engines
    which = "GPU" if count == 1 else f"{count} GPUs, each"
    return f"{which} with {size(plan.memory)}, of which {usable} may be used and {reserved} are the driver's"


def _requests(number: float, max_seqs: int) -> str:
    shown = f"{number:,.1f}" if number < 10 else f"{number:,.0f}"
    return f"{shown} requests" if number <= max_seqs else f"{max_seqs} requests (max_num_seqs; the cache would hold {shown})"


def _count(number: int) -> str:
    for unit, scale in (("B", 10**9), ("M", 10**6)):
        if number >= scale:
            return f"{number / scale:.2f} {unit}" if number < 10 * scale else f"{number / scale:.1f} {unit}"
    return f"{number:,}"


def size(count: int) -> str:
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= scale:
            return f"{count / scale:.2f} {unit}" if count < 100 * scale else f"{count / scale:.0f} {unit}"
    return f"{count} bytes"


MIN_BYTES = 2**20  # a smaller number without a unit is probably a mistake
MAX_BYTES = 2**60
TYPICAL_LENGTHS = (512, 2048, 8192, 32768)
_SIZE = re.compile(r"^(?P<number>\d+(\.\d+)?)\s*(?P<unit>[KMGT]?)(?P<binary>i?)B?$", re.IGNORECASE)


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "plan",
        usage="%(prog)s [MODEL] [options]",
        help="how much memory a model needs and what fits",
        description="Prints the memory that a model needs and how many requests fit, from file headers. Takes all engine "
        "options and counts their effects.",
    )
    add_model_tag(parser)
    parser.add_argument(
        "--memory", "--gpu-memory", type=read_size, metavar="SIZE", default=None, help="memory of the device: 80GiB, 24GB; "
        "without --device cpu, the device is a GPU (default: the available memory of this machine, on its CPU)",
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
    """Bytes on one device (on a CPU: of all ranks and engines) that are used before the cache."""

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
    refused: str  # why there are no copies although the model is quantized
    sizes: Sequence[Sizes]  # of each rank
    ranks: Sequence[Mapping[str, Memory]]  # of the features, on each rank of the device

    def sum(self, field: str, *names: str) -> int:
        return sum(getattr(rank[name], field) for rank in self.ranks for name in names or rank)


def _use(config: Config, layout: CacheLayout, total: int) -> _Use:
    args, device = config.args, open_device(config.device)
    weights, stored_as = weights_of(config.facts, config.quantization, config.native_layouts, config.dtype)
    shared = config.device_facts.one_memory
    held = weights if shared else largest_part(config, weights)
    sizes = rank_sizes(config)
    ranks = [feature_memory(config, each) for each in sizes]
    on_device = ranks if shared else [max(ranks, key=_taken)]
    steps = max(largest_step(config), *(memory.step for rank in ranks for memory in rank.values()))
    graphs = reserved_graph_bytes(config)
    used = (local_engines(args) if shared else 1) * (held + sum(map(_taken, on_device)) + graphs + steps)
    budget = device.plan_budget(total, args.gpu_memory_utilization, used)
    if not budget.usable:
        raise ConfigError(f"gpu_memory_utilization {args.gpu_memory_utilization:g} leaves nothing of {total:,} bytes; raise it")
    optional = ranks[0]["quantization"].optional
    least, requested = least_cache(config, layout), bool(args.dequantized_copies)
    copies = DequantizedCopies(optional, budget.usable, used + budget.reserved, least, requested)
    copied = optional if optional and copies.fit else 0
    refused = copies.reason if optional and not copied else NOTHING if requested and not optional else ""
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
        on_device,
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
    requested = whole * (config.world * local_engines(args) if shared else 1)
    if args.kv_cache_memory_bytes and requested > left:
        problems.append(f"kv_cache_memory_bytes is {gib(requested)}, but only {gib(left)} are left")
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
        tasks=supported_tasks(config),
        pooling=use.sum("reserved", "pooling"),
        cache=max(0, cache) if layout.bytes_per_page or facts.states else 0,
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
    """Return pages, snapshots of recurrent states, the context length that fits, and the problems if nothing fits."""
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
            problems.append("--kv-cache-dtype fp8 doubles the tokens of the cache, at some loss of accuracy")
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
        reach = "chunks" if has_chunked_attention(facts.hf) else "a window"
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
    if size > MAX_BYTES:
        raise argparse.ArgumentTypeError(f"{text[:20]} is more than any device has; give a size such as 80GiB")
    count = int(size)
    if not count:
        raise argparse.ArgumentTypeError(f"{text} is too small; give a size such as 80GiB")
    if text == match["number"] and count < MIN_BYTES:
        raise argparse.ArgumentTypeError(f"{text} would be bytes; use {text}GiB")
    return count


def gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"
