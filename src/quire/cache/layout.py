"""Layer specs → cache groups.

All groups have the same number of buffers, so one page (one id in all buffers) serves any group and all come from one pool:

    10 full layers, 52 windowed ones  →  1 full group and 6 window groups over 10 buffers

It does not know how many pages there will be; that is `capacity`.
"""

from collections.abc import Sequence

from quire.types.cache import CacheGroup, CacheLayout, LayerCache
from quire.types.errors import ConfigError

NEARLY_EQUAL = 1.25  # kinds whose counts differ by less share one group each: a few unused buffers are cheaper than many tables


def make_layout(layers: Sequence[LayerCache], page_size: int, element_bytes: int, recurrent: bool = False) -> CacheLayout:
    """`recurrent`: some layers keep a state, and none of them needs to attend."""
    if not layers and recurrent:
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
