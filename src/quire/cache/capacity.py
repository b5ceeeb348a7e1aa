"""Bytes → pages, and the pages that one request can need at most.

Page 0 is the null page: it takes memory like any other and is never handed out. `Capacity.pages` counts the others, so a device
allocates `pages + 1` of them.
"""

from dataclasses import dataclass

from quire.cache.groups import KINDS
from quire.types.cache import CacheLayout
from quire.types.errors import ConfigError


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
