"""The memory that a model needs and what fits, from file headers alone. Loads nothing and needs no GPU.

Weights, cache and the memory of features (`Feature.memory`) are exact; activations follow a formula of `config/memory.py`. The
engine measures its largest step instead, so its page count differs by a few percent. With several ranks or LoRA the model is
built without weights (`engine/memory.py`), so a plan refuses everything that the start of the engine refuses.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from quire.cache.layout import pages_for
from quire.config.args import EngineArgs, local_engines
from quire.config.config import Config
from quire.config.dequantized_copies import NOTHING, DequantizedCopies
from quire.config.facts import ModelFacts, read_facts
from quire.config.families import has_chunked_attention
from quire.config.host import available_host_bytes
from quire.config.memory import largest_step
from quire.config.resolve import find_files, resolve
from quire.device.registry import open_device
from quire.engine.layouts import fit_cache, model_share, share_memory, state_bytes, whole_layout
from quire.engine.memory import (
    collective_bytes,
    draft_name,
    feature_memory,
    largest_part,
    least_cache,
    rank_sizes,
    reserved_graph_bytes,
    weights_of,
)
from quire.features.host import Memory, Sizes
from quire.features.media.host import encoder_cache_size, media_of
from quire.features.pooling.host import supported_tasks
from quire.features.tiers.host import host_bytes
from quire.files.resolve import with_weights_on_disk
from quire.models.registry import find_family
from quire.types.cache import DTYPE_BYTES, CacheLayout
from quire.types.errors import ConfigError

TYPICAL_LENGTHS = (512, 2048, 8192, 32768)


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
    collectives: int  # buffers of NCCL and of one-shot collectives, on one device
    max_batched_tokens: int
    max_seqs: int
    cache_dtype: str
    layers: dict[str, int]  # "full attention", "a window of N" or "chunks of N" -> layers
    bytes_per_token: dict[str, int]  # by the same kinds
    page_size: int
    bytes_per_page: int
    states: int  # recurrent layers
    bytes_per_state: int  # of all of them, for one request, on the rank that holds most
    snapshots: int  # states of prefixes, in addition to one per request
    drafter: str  # the draft model or head; "" = none
    drafts_by_text: bool
    draft_weights: int
    draft_cache: int  # of each rank, in the model's pages; a text drafter has its own cache
    adapters: int  # slots
    adapter_rank: int  # the largest
    adapter_bytes: int  # reserved for them
    encoder_weights: int  # of images and videos, whole on each device; 0: none is loaded
    encoder_cache: int  # of a device; on a CPU, of all ranks
    encoder_embeddings: int  # that one cache holds
    weights_twice: int  # of weights that adapters require in a second layout
    engines: int  # data_parallel_size; all other fields are of one engine; on a CPU they share the memory
    ranks: int  # processes that share the model; pages and cache are of each
    stages: tuple[int, ...]  # layers of each; pages and cache are those of the stage with most layers
    tasks: tuple[str, ...]  # that requests may ask of the model
    pooling: int  # reserved for pooling
    host_tier: int  # host memory for pages that leave the device, of all ranks
    disk_tier: int  # bytes of kv_disk_path, of all ranks
    staged: int  # reserved on the device for these pages; on a CPU, the same memory
    cache: int
    pages: int
    positions: int  # max_position of the model
    max_model_len: int
    concurrency: dict[int, float]  # length -> requests of that length at once
    fits: bool
    advice: tuple[str, ...]


def make_plan(args: EngineArgs, memory: int | None, link: str | None = None) -> MemoryPlan:
    return plan_for(*resolve_for(args, memory), link)


def resolve_for(args: EngineArgs, memory: int | None, serving: bool = True) -> tuple[Config, int]:
    """Return the configuration of an engine on a device with `memory` bytes, and those bytes. The device need not exist."""
    facts = read_plan_facts(args)
    kind = args.device if args.device != "auto" else "cuda" if memory is not None else "cpu"
    if kind == "cuda" and memory is None:
        raise ConfigError("a plan for a GPU needs its memory; add --memory, such as --memory 80GiB, or --card")
    total = memory if memory is not None else available_host_bytes()
    return resolve(args, lambda: kind, lambda name: open_device(name).facts(memory=total), facts, serving, fetch=False), total


@dataclass(frozen=True)
class MemoryUse:
    """Bytes on one device (on a CPU: of all ranks and engines) that are used before the cache."""

    weights: int  # of all ranks
    stored_as: str
    held: int  # weights on one device
    steps: int
    graphs: int
    collectives: int
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


def use_of(config: Config, layout: CacheLayout, total: int, build: bool = True, link: str | None = None) -> MemoryUse:
    """Return what is used of `total` bytes. build: see `rank_sizes`. link: see `collective_bytes`."""
    args, device = config.args, open_device(config.device)
    weights, stored_as = weights_of(config.facts, config.quantization, config.native_layouts, config.dtype)
    shared = config.device_facts.one_memory
    held = weights if shared else largest_part(config, weights)
    sizes = rank_sizes(config, build)
    ranks = [feature_memory(config, each) for each in sizes]
    on_device = ranks if shared else [max(ranks, key=_taken)]
    steps = max(largest_step(config), *(memory.step for rank in ranks for memory in rank.values()))
    graphs, collectives = reserved_graph_bytes(config), collective_bytes(config, link)
    engines = max(1, local_engines(args)) if shared else 1
    used = engines * (held + sum(map(_taken, on_device)) + graphs + collectives + steps)
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
    return MemoryUse(
        weights,
        stored_as,
        held,
        steps,
        graphs,
        collectives,
        used,
        budget.usable,
        budget.reserved,
        budget.cache,
        copied,
        refused,
        sizes,
        on_device,
    )


def plan_for(config: Config, total: int, link: str | None = None) -> MemoryPlan:
    """Plan an engine on devices with `total` bytes each. link: between devices of a node (`sim/links.py`); None: unknown."""
    args, facts = config.args, config.facts
    layout = whole_layout(config)
    use = use_of(config, layout, total, link=link)
    shared = config.device_facts.one_memory
    left = use.usable - use.total - use.reserved
    whole = args.kv_cache_memory_bytes or (share_memory(config, layout, use.cache) if shared else use.cache)
    cache = int(whole * model_share(config, layout))
    pages, snapshots, length, problems = fit_use(config, layout, cache, use.usable / total)
    requested = whole * (config.world * max(1, local_engines(args)) if shared else 1)
    if args.kv_cache_memory_bytes and requested > left:
        problems.append(f"kv_cache_memory_bytes is {gib(requested)}, but only {gib(left)} are left")
    if args.dequantized_copies and use.refused not in ("", NOTHING):
        problems.append(f"dequantized_copies: {use.refused}")
    draft_cache = sum(sizes.draft_cache for sizes in use.sizes)
    media, encoder = media_of(config), encoder_cache_size(config)
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
        collectives=use.collectives,
        max_batched_tokens=config.max_batched_tokens,
        max_seqs=config.max_seqs,
        cache_dtype=config.cache_dtype,
        **_per_kind(facts, config.cache_bytes),
        page_size=config.page_size,
        bytes_per_page=layout.bytes_per_page,
        states=len(facts.states),
        bytes_per_state=state_bytes(config),
        snapshots=snapshots,
        drafter=draft_name(config),
        drafts_by_text=config.text_drafter is not None,
        draft_weights=use.sum("weights", "speculation") - draft_cache,
        draft_cache=draft_cache or max(0, whole - cache),
        adapters=config.max_loras,
        adapter_rank=args.max_lora_rank if config.max_loras else 0,
        adapter_bytes=use.sum("reserved", "lora"),
        encoder_weights=0 if media is None else media.tower_values * DTYPE_BYTES[config.dtype],
        encoder_cache=use.sum("reserved", "media"),
        encoder_embeddings=0 if encoder is None else encoder.capacity,
        weights_twice=use.sum("weights", "lora"),
        engines=args.data_parallel_size,
        ranks=config.world,
        stages=tuple(len(stage) for stage in config.stage_layers),
        tasks=supported_tasks(config),
        pooling=use.sum("reserved", "pooling"),
        host_tier=host_bytes(config) * config.world,
        disk_tier=0 if args.kv_disk_path is None else int(args.kv_disk_size * 2**30),
        staged=use.sum("reserved", "tiers"),
        cache=max(0, cache) if layout.bytes_per_page or facts.states else 0,
        pages=pages,
        positions=facts.max_position,
        max_model_len=length,
        concurrency={size: count_concurrent(layout, pages, size, config) for size in lengths},
        fits=not problems,
        advice=tuple(problems) or _shrunk(config, layout, length, cache),
    )


def _taken(rank: Mapping[str, Memory]) -> int:
    return sum(memory.weights + memory.reserved for memory in rank.values())


def count_concurrent(layout: CacheLayout, pages: int, size: int, config: Config) -> float:
    """Return how many requests of that size the pages hold at once."""
    if not layout.groups:
        return config.max_seqs
    return pages / pages_for(layout, size, config.max_batched_tokens)


def read_plan_facts(args: EngineArgs) -> ModelFacts:
    """Read headers of weights that are on disk; of a hub model only the configuration is fetched."""
    return read_facts(with_weights_on_disk(find_files(args, weights=False)), args.hf_overrides)


def fit_use(config: Config, layout: CacheLayout, cache: int, share: float) -> tuple[int, int, int, list[str]]:
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


def gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"
