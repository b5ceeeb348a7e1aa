"""A cache whose layers are in several stages: one pool of pages, and every stage has its own layers' part of each page.

    layers         0  1  2  3  4  5  6  7        every second one has a window
    groups         a  b  a  b  a  b  a  b
    stage 0        a0 a1 over two buffers, b0 b1 over the same        stage 1: likewise

A group's layers are spread over the model instead of following each other, so that no stage has more buffers than it needs.
"""

from collections.abc import Sequence
from dataclasses import replace

from quire.cache.layout import make_layout
from quire.types.cache import CacheGroup, CacheLayout, LayerCache


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
