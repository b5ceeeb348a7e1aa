"""Derive the layout of the KV cache from the model, its capacity in tokens, and the share of each pipeline stage."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from quire.cache.groups import KINDS
from quire.types.cache import CacheGroup, CacheLayout, LayerCache
from quire.types.errors import ConfigError

NEARLY_EQUAL = 1.25  # kinds whose counts differ by less share one group each: a few unused buffers are cheaper than many tables


def make_layout(layers: Sequence[LayerCache], page_size: int, element_bytes: int, without_pages: bool = False) -> CacheLayout:
    """without_pages: the model may have no layer with a KV cache: recurrent models and encoders."""
    if not layers and without_pages:
        return CacheLayout(page_size, 0, 0, ())
    if not layers:
        raise ConfigError("a cache layout needs at least one attention layer, got none")
    if page_size < 1:
        raise ConfigError(f"the page size must be at least 1 token, got {page_size}")
    kinds: dict[tuple[str, int | None], list[int]] = {}
    for index, layer in enumerate(layers):
        kinds.setdefault((layer.kind, layer.window), []).append(index)
    counts = [len(members) for members in kinds.values()]
    size = max(counts) if max(counts) <= NEARLY_EQUAL * min(counts) else min(counts)
    groups = tuple(
        CacheGroup(kind, window, tuple(members[start : start + size]))
        for (kind, window), members in kinds.items()
        for start in range(0, len(members), size)
    )
    page_bytes = max(layer.page_bytes(page_size, element_bytes) for layer in layers)
    return CacheLayout(page_size=page_size, page_bytes=page_bytes, buffers=size, groups=groups)


@dataclass(frozen=True)
class Capacity:
    pages: int  # usable ones: 1 ... pages
    max_model_len: int
    snapshots: int | None = None  # of recurrent states, beside those of the slots; None = there are none


def pages_for(layout: CacheLayout, tokens: int, chunk: int) -> int:
    """Peak number of pages of one request of that many tokens, all groups together."""
    return sum(KINDS[group.kind].most(group, tokens, layout.page_size, chunk) for group in layout.groups)


def longest(layout: CacheLayout, pages: int, most: int, chunk: int) -> int:
    """The largest number of tokens, up to `most`, that one request may have with so many pages."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if pages_for(layout, middle, chunk) <= pages:
            low = middle
        else:
            high = middle - 1
    return low


SNAPSHOT_SHARE, MOST_SNAPSHOTS = 0.25, 4  # of what the states of all slots leave; and for each slot


def fit_states(state_bytes: int, budget_bytes: int, max_seqs: int, wanted: bool, pages: bool, each: int = 1) -> tuple[int, int]:
    """How many snapshots there are beside `each` states for each slot and one for none, and what that leaves of the budget.
    `wanted`: are prefixes cached? `pages`: does something need the rest?"""
    held = (each * max_seqs + 1) * state_bytes
    rest = budget_bytes - held
    if rest <= 0:
        most = max(0, budget_bytes // state_bytes - 2) // each
        raise ConfigError(
            f"max_num_seqs {max_seqs} needs {_size(held)} for recurrent states, {each} of "
            f"{_size(state_bytes)} each, but the cache got {_size(budget_bytes)}; {most} would fit, or give it more memory "
            "(gpu_memory_utilization, kv_cache_memory_bytes)"
        )
    share = SNAPSHOT_SHARE if pages else 1.0
    snapshots = min(int(rest * share) // state_bytes, MOST_SNAPSHOTS * max_seqs) if wanted else 0
    return snapshots, rest - snapshots * state_bytes


def fit(
    layout: CacheLayout, budget_bytes: int, max_model_len: int, explicit: bool, chunk: int, override: int | None = None
) -> Capacity:
    """How many pages the budget holds (`override` sets the usable ones outright), and the context length they can serve.

    A length the user asked for is kept or refused; one that only came from the model is lowered to what fits.
    """
    if not layout.groups:  # nothing is kept in pages
        return Capacity(1, max_model_len)
    pages = budget_bytes // layout.bytes_per_page - 1 if override is None else override
    if pages < 1:
        needed = 2 * layout.bytes_per_page
        raise ConfigError(
            f"the cache got {_size(budget_bytes)}, not enough for one page of {layout.page_size} tokens and the null page "
            f"({_size(needed)}); give it more memory (gpu_memory_utilization, kv_cache_memory_bytes) or choose a smaller model"
            if override is None
            else f"the number of cache pages must be at least 1, got {override}"
        )
    possible = longest(layout, pages, max_model_len, chunk)
    if possible == max_model_len:
        return Capacity(pages, max_model_len)
    if explicit or possible == 0:
        needed = pages_for(layout, max_model_len, chunk)
        raise ConfigError(
            f"max_model_len {max_model_len} needs {needed} cache pages ({_size(needed * layout.bytes_per_page)}), but there "
            f"are {pages} ({_size(pages * layout.bytes_per_page)}): {needed - pages} too few; a max_model_len of at most "
            f"{possible} would fit, or give the cache more memory (gpu_memory_utilization, kv_cache_memory_bytes)"
        )
    return Capacity(pages, possible)


def _size(count: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(count) >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} bytes"


def stage_layout(layers: Sequence[LayerCache], stage: range, page_size: int, element_bytes: int) -> CacheLayout:
    """Of the layers of one stage, which are counted from its first on. The groups are those of all stages, in the same order,
    though a stage may have no layer of some."""
    groups = _groups(layers, page_size, element_bytes)
    own = tuple(
        replace(group, layers=tuple(layer - stage.start for layer in group.layers if layer in stage)) for group in groups
    )
    page_bytes = max(layers[index].page_bytes(page_size, element_bytes) for index in stage)
    return CacheLayout(page_size, page_bytes, max(len(group.layers) for group in own), own)


def pool_layout(layers: Sequence[LayerCache], stages: Sequence[range], page_size: int, element_bytes: int) -> CacheLayout:
    """Of the whole model, by which pages are counted: a page takes what it takes in the stage where that is most."""
    each = [stage_layout(layers, stage, page_size, element_bytes) for stage in stages]
    return replace(max(each, key=lambda layout: layout.bytes_per_page), groups=_groups(layers, page_size, element_bytes))


def _groups(layers: Sequence[LayerCache], page_size: int, element_bytes: int) -> tuple[CacheGroup, ...]:
    """As many of each kind as in one process."""
    kinds: dict[tuple[str, int | None], list[int]] = {}
    for index, layer in enumerate(layers):
        kinds.setdefault((layer.kind, layer.window), []).append(index)
    together = make_layout(layers, page_size, element_bytes).groups
    groups = list[CacheGroup]()
    for (kind, window), members in kinds.items():
        count = sum((group.kind, group.window) == (kind, window) for group in together)
        groups += [CacheGroup(kind, window, tuple(members[first::count])) for first in range(count)]
    return tuple(groups)
