"""The memory of the KV cache: raw pages, and the typed view of each attention layer. `KVLayout` shows the layouts."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from quire.runner.transfer import upload_together
from quire.types.cache import CacheLayout, KVLayout, LayerCache, can_divide
from quire.types.plan import Ints


class KVBuffers:
    """Each buffer has page 0, the null page that no live token uses, and then `pages` usable pages."""

    def __init__(
        self,
        layout: CacheLayout,
        layers: Sequence[LayerCache],
        pages: int,
        dtype: torch.dtype,
        allocate: Callable[[int, int], Tensor],
        kv_layout: KVLayout = KVLayout.PAGES,
    ) -> None:
        """allocate: pages, and bytes of each -> raw memory [pages, bytes] uint8, all zero."""
        self._layout = layout
        self._layers = layers
        self._dtype = dtype
        self._lines = 1  # equal parts of a buffer, each divided into pages
        if kv_layout is not KVLayout.PAGES and can_divide(layout, layers, dtype.itemsize):
            sides = layers[0].sides
            self._lines = sides if kv_layout is KVLayout.SPLIT else sides * layers[0].kv_heads
        self.raw = [allocate(pages + 1, layout.page_bytes) for _ in range(layout.buffers)]  # each [pages + 1, page_bytes]

    def views(self) -> list[tuple[int, Tensor, int]]:
        """Return (layer, its cache [pages + 1, sides, kv_heads, page_size, head_dim], its group) per layer of the layout."""
        return [
            (layer, self._view(self.raw[buffer], self._layers[layer]), index)
            for index, group in enumerate(self._layout.groups)
            for buffer, layer in enumerate(group.layers)
        ]

    def copy(self, source: Ints, target: Ints) -> None:
        """Copy whole pages, in every buffer."""
        if not len(source) or not self.raw:
            return
        read, write = upload_together([source, target], self.raw[0].device)
        for buffer in self.raw:
            lines = buffer.view(self._lines, len(buffer), -1)
            lines[:, write] = lines[:, read]

    def _view(self, raw: Tensor, layer: LayerCache) -> Tensor:
        """Return the layer's typed view. A layer smaller than a page uses the first part of each page."""
        size, sides, typed = self._layout.page_size, layer.sides, raw.view(self._dtype)
        if self._lines > 1:
            inner = sides * layer.kv_heads // self._lines  # contiguous heads of a page
            parts = typed.view(sides, -1, len(raw), inner, size, layer.head_dim)
            return parts.permute(2, 0, 1, 3, 4, 5).view(len(raw), sides, layer.kv_heads, size, layer.head_dim)
        elements = sides * layer.kv_heads * size * layer.head_dim
        return typed[:, :elements].view(len(raw), sides, layer.kv_heads, size, layer.head_dim)
