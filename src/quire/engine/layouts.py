"""The KV cache layout of an engine, whose model may be divided among ranks and stages, and its scheduler.

Importing this does not import torch.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from quire.cache.layout import SNAPSHOTS_PER_SLOT, Capacity, fit, fit_states, make_layout, pages_for, pool_layout, stage_layout
from quire.cache.policies import Evictable, policy_maker
from quire.config.args import EngineArgs, local_engines
from quire.config.classes import load_class
from quire.config.config import Config
from quire.config.facts import ModelFacts
from quire.config.features import FEATURES
from quire.config.quantization import choose_quantization
from quire.config.resolve import choose_keep_quantized, resolve
from quire.dist.mesh import largest_share, largest_state
from quire.engine.executor.nodes import share_ranks
from quire.features.host import Sizes
from quire.features.media.host import encoder_cache_size, media_of
from quire.features.tiers.host import even_pages, host_bytes
from quire.sched.budget import Budget, StepBudget, TimedBudget
from quire.sched.encoding import Encoding
from quire.sched.scheduler import Scheduler
from quire.types.cache import DTYPE_BYTES, CacheLayout
from quire.types.errors import ConfigError

logger = logging.getLogger(__name__)

TEXT_DRAFTER_BYTES = 1 << 30  # of its cache, unless one request alone needs more
MAX_TOKEN_RATIO = 2  # its tokens for each of the model's, at most


def whole_layout(config: Config) -> CacheLayout:
    """Return the layout by which pages are counted: that of the rank with the most bytes per page."""
    layers = largest_share(config.facts.layers, config.ranks)
    if config.stages == 1 or not layers:
        return make_layout(layers, config.page_size, config.cache_bytes, config.facts.without_pages)
    return pool_layout(layers, config.stage_attentions, config.page_size, config.cache_bytes)


def share_memory(config: Config, layout: CacheLayout, memory: int) -> int:
    """Return one rank's part of memory that all ranks of a node share: that of the rank with the most bytes per page, so that
    all have the same number of pages. Engines on one machine share its memory in equal parts, and so do ranks with recurrent
    states."""
    memory //= max(1, local_engines(config.args)) if config.device_facts.one_memory else 1
    if config.stages == 1 or config.facts.states:
        return memory // config.node_ranks
    layers = largest_share(config.facts.layers, config.ranks)
    stages = [stage_layout(layers, stage, config.page_size, config.cache_bytes) for stage in config.stage_attentions]
    each = [stage.bytes_per_page for stage in stages for _ in range(config.ranks)]  # rank
    most = max(sum(each[rank] for rank in node) for node in share_ranks(config.world, config.args.nnodes))
    return memory * layout.bytes_per_page // most


def even_out(config: Config, layout: CacheLayout, budgets: Sequence[int]) -> int:
    """Return the budget of the rank with the most bytes per page, such that all ranks have as many pages as the one with the
    fewest. budgets: bytes that each rank has for itself."""
    if config.stages == 1 or config.facts.states:
        return min(budgets)
    layers = largest_share(config.facts.layers, config.ranks)
    stages = [stage_layout(layers, stage, config.page_size, config.cache_bytes) for stage in config.stage_attentions]
    each = [stages[rank // config.ranks].bytes_per_page for rank in range(len(budgets))]
    return min(budget * layout.bytes_per_page // own for budget, own in zip(budgets, each, strict=True))


def draft_layout(config: Config) -> CacheLayout | None:
    """Return the layout of a draft model or head on the device, whole on every rank; None: it has no cache."""
    facts = config.draft_facts if config.draft_head is None else config.draft_head.facts
    return make_layout(facts.layers, config.page_size, DTYPE_BYTES[config.dtype]) if facts and facts.layers else None


def draft_quantized_layouts(config: Config, facts: ModelFacts) -> frozenset[str] | None:
    """Return the quantized layouts (`DeviceFacts.keeps`) that a draft model keeps; None: its weights are floats."""
    quantization = choose_quantization(None, facts.quantization, facts.files.format == "gguf")
    quantized = config.device == "cpu" and choose_keep_quantized(config.args, facts, config.device_facts, quantization)
    return config.device_facts.keeps if quantized else None


def cache_sizes(config: Config) -> Sizes:
    """Return the sizes that decide how the cache's memory is divided; they need no file and no model."""
    own = draft_layout(config)
    return Sizes(draft_page=0 if own is None else own.bytes_per_page, state=state_bytes(config))


def state_bytes(config: Config) -> int:
    """Return the bytes of the recurrent states of one sequence, on the rank that holds most of them."""
    each = [largest_state(state, config.ranks, DTYPE_BYTES[config.dtype]) for state in config.facts.states]
    return max((sum(each[stage.start : stage.stop]) for stage in config.stage_recurrents), default=0) if each else 0


def model_share(config: Config, layout: CacheLayout) -> float:
    """Return the model's part of the cache's memory; the rest is for what features store with each page."""
    sizes = cache_sizes(config)
    features = sum(feature.memory(config, sizes).per_page for feature in FEATURES)
    return layout.bytes_per_page / (layout.bytes_per_page + features) if features else 1.0


def fit_cache(config: Config, layout: CacheLayout, budget: int, override: int | None) -> Capacity:
    """Return the pages and recurrent states that `budget` bytes hold. override: pages, whatever the budget."""
    snapshots, sizes = None, cache_sizes(config)
    per_slot = sum(feature.memory(config, sizes).per_slot for feature in FEATURES)
    if per_slot:
        each = per_slot // sizes.state
        snapshots, budget = fit_states(sizes.state, budget, config.max_seqs, config.prefix_caching, bool(layout.groups), each)
    length, explicit = config.max_model_len, config.max_model_len_explicit
    capacity = fit(layout, budget, length, explicit=explicit, chunk=config.max_batched_tokens, override=override)
    return replace(capacity, snapshots=snapshots)


def text_drafter_config(
    config: Config, facts: ModelFacts, complete: Callable[[ModelFacts], ModelFacts] | None = None
) -> Config:
    """Return the configuration of the second engine, which drafts by text. Its cache has a fixed size: what its requests can
    use, up to TEXT_DRAFTER_BYTES or one longest request."""
    args, path = config.args, facts.files.path.absolute()
    own_args = EngineArgs(
        model=str(path), dtype=args.dtype, device=config.device, seed=config.seed, enforce_eager=args.enforce_eager,
        load_format="dummy" if args.load_format == "dummy" else "auto", max_num_batched_tokens=config.max_batched_tokens,
        max_num_seqs=config.max_seqs, max_model_len=min(facts.max_position, MAX_TOKEN_RATIO * config.max_model_len),
        dequantized_copies=False,
    )  # fmt: skip
    own = resolve(own_args, lambda: config.device, lambda _: config.device_facts, facts, complete=complete)
    layout = whole_layout(own)
    alone = pages_for(layout, own.max_model_len, own.max_batched_tokens)
    pages = max(alone, min(alone * config.max_seqs, TEXT_DRAFTER_BYTES // max(1, layout.bytes_per_page)))
    states = (SNAPSHOTS_PER_SLOT + 2) * config.max_seqs * state_bytes(own)
    return replace(own, args=replace(own_args, kv_cache_memory_bytes=(pages + 1) * max(1, layout.bytes_per_page) + states))


def fit_or_warn(config: Config, layout: CacheLayout, budget: int, override: int | None) -> Capacity:
    """As `fit_cache`; log a warning if max_model_len is reduced."""
    capacity = fit_cache(config, layout, budget, override)
    if capacity.max_model_len < config.max_model_len:
        logger.warning(
            "max_model_len reduced to %d, the model's is %d: %.2f GiB are left for the KV cache",
            capacity.max_model_len, config.max_model_len, budget / 2**30,
        )  # fmt: skip
    return capacity


def make_scheduler(
    config: Config, layout: CacheLayout, pages: int, max_model_len: int, parameters: int, **more: Any
) -> Scheduler:
    """Make the scheduler of an engine, or of a simulated one.

    parameters: of the model, which every step reads.
    more: further arguments of Scheduler.
    """
    budget: Budget | None = None
    if config.steps_follow_load and config.device_facts.times_steps:
        budget = TimedBudget(config.scheduled_tokens)
    elif config.steps_follow_load:
        budget = StepBudget.following(config.scheduled_tokens, layout.bytes_per_page, parameters)
    given = config.args.scheduler_cls
    scheduler: type[Scheduler] = Scheduler if given is None else load_class("scheduler_cls", given, Scheduler)
    return scheduler(
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
        contiguous=config.device_facts.reads_in_place,
        turns=config.depth + 1 if config.stages > 1 else 1,
        encoding=make_encoding(config),
        evictable=cache_policy(config),
        records=host_records(config, layout),
        snapshot_records=snapshot_records(config, layout),
        record_bytes=record_bytes(config, layout),
        preemption_mode=config.args.preemption_mode,
        eager_stores=config.args.kv_offloading_eager,
        **more,
    )


def cache_policy(config: Config) -> Callable[[], Evictable]:
    """Return what makes the eviction policy of cached pages."""
    name = config.args.cache_policy
    return policy_maker(name, even_pages(config)) if name == "cost" else policy_maker(name)


def record_bytes(config: Config, layout: CacheLayout) -> int:
    """Return the bytes of a record of the host tier: of a page, with that of a draft head, or of a snapshot if the model has no
    pages."""
    head = None if config.draft_head is None else draft_layout(config)
    return layout.bytes_per_page + (0 if head is None else head.bytes_per_page) or state_bytes(config)


def snapshot_records(config: Config, layout: CacheLayout) -> int:
    """Return how many records of the host tier a snapshot of recurrent states takes."""
    return -(-state_bytes(config) // record_bytes(config, layout)) if config.facts.states else 1


def host_records(config: Config, layout: CacheLayout) -> int:
    """Return how many pages the host tier holds; 0: there is none."""
    size, record = host_bytes(config), record_bytes(config, layout)
    if not size:
        return 0
    least, what = record if layout.bytes_per_page else 0, f"one page of {record}"
    if config.facts.states:
        least += snapshot_records(config, layout) * record
        what += f" and one snapshot of recurrent states of {state_bytes(config)}"
    if size < least:
        raise ConfigError(f"kv_offloading_size gives each rank {size} bytes, less than {what}. Raise it, or leave it out")
    return size // record


def make_encoding(config: Config) -> Encoding | None:
    """Return the scheduling of images and videos; None: the model reads none."""
    media, size = media_of(config), encoder_cache_size(config)
    if media is None or size is None:
        return None
    undivided, tokens = media.family.bidirectional, config.scheduled_tokens
    return Encoding(size.capacity, size.step, undivided, max_tokens=tokens, chunked=config.chunked)
