"""How the cache of an engine lies, whose model may be divided among ranks and stages. Importing this imports no torch."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from quire.cache.capacity import MOST_SNAPSHOTS, pages_for
from quire.cache.layout import make_layout
from quire.cache.stages import pool_layout, stage_layout
from quire.config.args import EngineArgs, local_engines
from quire.config.config import Config
from quire.config.facts import DTYPE_BYTES, ModelFacts
from quire.config.quantization import choose_quantization
from quire.config.resolve import choose_keep_quantized, resolve
from quire.dist.mesh import largest_share
from quire.engine.executor.nodes import share_ranks
from quire.types.cache import CacheLayout

TEXT_DRAFTER_BYTES = 1 << 30  # of its cache, unless one text alone takes more
MORE_TOKENS = 2  # that a text may be in its vocabulary, for each of the model's


def whole_layout(config: Config) -> CacheLayout:
    """By which pages are counted: those of the rank that has most of each."""
    layers = largest_share(config.facts.layers, config.ranks)
    if config.stages == 1:
        return make_layout(layers, config.page_size, config.cache_bytes, bool(config.facts.states))
    return pool_layout(layers, config.stage_layers, config.page_size, config.cache_bytes)


def share_memory(config: Config, layout: CacheLayout, memory: int) -> int:
    """Of memory that all ranks of a node have together, the part of the one that has most of each page: all get to the same
    number of pages so. Engines on one machine share what is one memory in equal parts."""
    memory //= local_engines(config.args) if config.device_facts.one_memory else 1
    if config.stages == 1:
        return memory // config.node_ranks
    layers = largest_share(config.facts.layers, config.ranks)
    stages = [stage_layout(layers, stage, config.page_size, config.cache_bytes) for stage in config.stage_layers]
    each = [stage.bytes_per_page for stage in stages for _ in range(config.ranks)]  # rank
    most = max(sum(each[rank] for rank in node) for node in share_ranks(config.world, config.args.nnodes))
    return memory * layout.bytes_per_page // most


def even_out(config: Config, layout: CacheLayout, budgets: Sequence[int]) -> int:
    """Of memory that each rank has for itself, what the one with most of each page would have if all had room for as many pages
    as the one that has room for fewest."""
    if config.stages == 1:
        return min(budgets)
    layers = largest_share(config.facts.layers, config.ranks)
    stages = [stage_layout(layers, stage, config.page_size, config.cache_bytes) for stage in config.stage_layers]
    each = [stages[rank // config.ranks].bytes_per_page for rank in range(len(budgets))]
    return min(budget * layout.bytes_per_page // own for budget, own in zip(budgets, each, strict=True))


def draft_layout(config: Config) -> CacheLayout | None:
    """Of a model or head that drafts on the device, whole on every rank; None = it has no cache."""
    facts = config.draft_facts if config.draft_head is None else config.draft_head.facts
    return make_layout(facts.layers, config.page_size, DTYPE_BYTES[config.dtype]) if facts and facts.layers else None


def draft_forms(config: Config, facts: ModelFacts) -> frozenset[str] | None:
    """Which forms (`DeviceFacts.keeps`) a model that drafts keeps; None = its weights are floats."""
    quantization = choose_quantization(None, facts.quantization, facts.files.format == "gguf")
    kept = config.device == "cpu" and choose_keep_quantized(config.args, facts, config.device_facts, quantization)
    return config.device_facts.keeps if kept else None


def model_share(config: Config, layout: CacheLayout) -> float:
    """Of the cache's memory: what whoever drafts on the device leaves to the model."""
    own = draft_layout(config)
    return 1.0 if own is None else layout.bytes_per_page / (layout.bytes_per_page + own.bytes_per_page)


def text_drafter_config(
    config: Config, facts: ModelFacts, complete: Callable[[ModelFacts], ModelFacts] | None = None
) -> Config:
    """Of the engine beside the engine that drafts by text. It is told how much its cache takes: as much as its requests can
    use, within reason."""
    args, path = config.args, facts.files.path.absolute()
    told = EngineArgs(
        model=str(path), dtype=args.dtype, device=config.device, seed=config.seed, enforce_eager=args.enforce_eager,
        load_format="dummy" if args.load_format == "dummy" else "auto", max_num_batched_tokens=config.max_batched_tokens,
        max_num_seqs=config.max_seqs, max_model_len=min(facts.max_position, MORE_TOKENS * config.max_model_len),
        dequantized_copies=False,
    )  # fmt: skip
    own = resolve(told, lambda: config.device, lambda _: config.device_facts, facts, complete=complete)
    layout = whole_layout(own)
    alone = pages_for(layout, own.max_model_len, own.max_batched_tokens)
    pages = max(alone, min(alone * config.max_seqs, TEXT_DRAFTER_BYTES // max(1, layout.bytes_per_page)))
    states = (MOST_SNAPSHOTS + 2) * config.max_seqs * own.state_bytes
    return replace(own, args=replace(told, kv_cache_memory_bytes=(pages + 1) * max(1, layout.bytes_per_page) + states))
