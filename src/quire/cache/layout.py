"""Derive the layout of the KV cache from the model, its capacity in tokens, and the share of each pipeline stage."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from quire.cache.groups import KINDS
from quire.types.cache import CacheGroup, CacheLayout, LayerCache
from quire.types.errors import ConfigError

NEARLY_EQUAL = 1.25  # kinds whose counts differ by less have one group each: unused buffers are cheaper than many tables


def make_layout(layers: Sequence[LayerCache], page_size: int, element_bytes: int, without_pages: bool = False) -> CacheLayout:
    """Return the layout of the cache.

    without_pages: the model may have no layer with a KV cache: recurrent models and encoders
    """
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
    pages: int  # usable pages: 1 ... pages
    max_model_len: int
    snapshots: int | None = None  # of recurrent states, besides those of the slots; None: no recurrent layers


def pages_for(layout: CacheLayout, tokens: int, chunk: int) -> int:
    """Return the peak number of pages of one request of `tokens` tokens, over all groups."""
    return sum(KINDS[group.kind].most(group, tokens, layout.page_size, chunk) for group in layout.groups)


def longest(layout: CacheLayout, pages: int, max_tokens: int, chunk: int) -> int:
    """Return the largest number of tokens, up to `max_tokens`, of one request with `pages` pages."""
    low, high = 0, max_tokens
    while low < high:
        middle = (low + high + 1) // 2
        if pages_for(layout, middle, chunk) <= pages:
            low = middle
        else:
            high = middle - 1
    return low


SNAPSHOT_SHARE, SNAPSHOTS_PER_SLOT = 0.25, 4  # maximum share of the memory besides the slots' states; maximum per slot


def fit_states(
    state_bytes: int, budget_bytes: int, max_seqs: int, caching: bool, pages: bool, each: int = 1
) -> tuple[int, int]:
    """Return the number of snapshots, and the rest of the budget in bytes.

    caching: prefixes are cached; pages: the rest is used for pages; each: states per slot, plus one null state
    """
    held = (each * max_seqs + 1) * state_bytes
    rest = budget_bytes - held
    if rest <= 0:
        possible = max(0, budget_bytes // state_bytes - 2) // each
        raise ConfigError(
            f"max_num_seqs {max_seqs} needs {_size(held)} for recurrent states, {each} of "
            f"{_size(state_bytes)} each, but the cache got {_size(budget_bytes)}; {possible} would fit, or give it more memory "
            "(gpu_memory_utilization, kv_cache_memory_bytes)"
        )
    share = SNAPSHOT_SHARE if pages else 1.0
    snapshots = min(int(rest * share) // state_bytes, SNAPSHOTS_PER_SLOT * max_seqs) if caching else 0
    return snapshots, rest - snapshots * state_bytes


def fit(
    layout: CacheLayout, budget_bytes: int, max_model_len: int, explicit: bool, chunk: int, override: int | None = None
) -> Capacity:
    """Return the pages that fit the budget (`override` sets the usable ones), and the context length that they serve.

    A length set by the user is kept or refused; one of the model is lowered to what fits.
    """
    if not layout.groups:  # no attention layers
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
    """Return the layout of one stage, with layers counted from its first. Groups and their order are those of all stages,
    though a stage may have no layer of some groups."""
    if not layers:
        return CacheLayout(page_size, 0, 0, ())
    groups = _groups(layers, page_size, element_bytes)
    own = tuple(
        replace(group, layers=tuple(layer - stage.start for layer in group.layers if layer in stage)) for group in groups
    )
    page_bytes = max((layers[index].page_bytes(page_size, element_bytes) for index in stage), default=0)
    return CacheLayout(page_size, page_bytes, max(len(group.layers) for group in own), own)


def pool_layout(layers: Sequence[LayerCache], stages: Sequence[range], page_size: int, element_bytes: int) -> CacheLayout:
    """Return the layout of the whole model, by which pages are counted: a page has the size of its largest stage."""
    each = [stage_layout(layers, stage, page_size, element_bytes) for stage in stages]
    return replace(max(each, key=lambda layout: layout.bytes_per_page), groups=_groups(layers, page_size, element_bytes))


def _groups(layers: Sequence[LayerCache], page_size: int, element_bytes: int) -> tuple[CacheGroup, ...]:
    """Return as many groups of each kind as in a single process."""
    kinds: dict[tuple[str, int | None], list[int]] = {}
    for index, layer in enumerate(layers):
        kinds.setdefault((layer.kind, layer.window), []).append(index)
    unsplit = make_layout(layers, page_size, element_bytes).groups
    groups = list[CacheGroup]()
    for (kind, window), members in kinds.items():
        count = sum((group.kind, group.window) == (kind, window) for group in unsplit)
        groups += [CacheGroup(kind, window, tuple(members[first::count])) for first in range(count)]
    return tuple(groups)
