"""The cache's memory: raw pages, and the typed view of them that each attention layer gets.

    page by page   [ page 0: keys of head 0, head 1 ..., values of head 0 ... | page 1 ... ]
    line by line   [ keys of head 0: page 0, page 1, ... | keys of head 1: ... | values of head 0: ... ]
    apart          [ keys of all heads: page 0, page 1, ... | values of all heads: page 0, page 1, ... ]

A CPU keeps lines where all layers are alike: pages that follow each other are then one piece per head, and need no copy. Keys
apart from values is what networks want (`models/network.py`).
"""

import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

from quire.runner.transfer import upload_together
from quire.types.cache import CacheLayout, LayerCache
from quire.types.plan import Ints


class KVBuffers:
    """`pages` usable pages in each buffer, and page 0 before them, the null page that no table entry of a live token names."""

    def __init__(
        self,
        layout: CacheLayout,
        layers: Sequence[LayerCache],
        pages: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        apart: bool = False,
    ) -> None:
        self._layout = layout
        self._layers = layers
        self._dtype = dtype
        self._device = device
        self._lines = 1  # equal parts of a buffer, in each of which it lies page by page
        if device.type == "cpu" and can_divide(layout, layers, dtype):
            self._lines = 2 if apart else 2 * layers[0].kv_heads
        self.raw = [_zeros(pages + 1, layout.page_bytes, device) for _ in range(layout.buffers)]  # each [pages + 1, page_bytes]

    def views(self) -> list[tuple[int, Tensor, int]]:
        """(layer, its cache [pages + 1, 2, kv_heads, page_size, head_dim], its group) for every layer of the layout."""
        return [
            (layer, self._view(self.raw[buffer], self._layers[layer]), index)
            for index, group in enumerate(self._layout.groups)
            for buffer, layer in enumerate(group.layers)
        ]

    def copy(self, source: Ints, target: Ints) -> None:
        """Duplicates whole pages, in every buffer."""
        if not len(source):
            return
        read, write = upload_together([source, target], self._device)
        for buffer in self.raw:
            lines = buffer.view(self._lines, len(buffer), -1)
            lines[:, write] = lines[:, read]

    def _view(self, raw: Tensor, layer: LayerCache) -> Tensor:
        """A layer smaller than a page uses the page's first part."""
        size, typed = self._layout.page_size, raw.view(self._dtype)
        if self._lines > 1:
            inner = 2 * layer.kv_heads // self._lines  # heads of a page side by side
            parts = typed.view(2, -1, len(raw), inner, size, layer.head_dim)
            return parts.permute(2, 0, 1, 3, 4, 5).view(len(raw), 2, layer.kv_heads, size, layer.head_dim)
        elements = 2 * layer.kv_heads * size * layer.head_dim
        return typed[:, :elements].view(len(raw), 2, layer.kv_heads, size, layer.head_dim)


def can_divide(layout: CacheLayout, layers: Sequence[LayerCache], dtype: torch.dtype) -> bool:
    """Otherwise a buffer has to be kept page by page."""
    alike = len({(layer.kv_heads, layer.head_dim) for layer in layers}) == 1
    return alike and layout.page_bytes == layout.page_size * layers[0].bytes_per_token(dtype.itemsize)


def _zeros(pages: int, page_bytes: int, device: torch.device) -> Tensor:
    """On a CPU the system gives memory that becomes real, and zero, when it is first touched: in small pieces, for a huge one
    would be taken whole for the few tokens of one head."""
    if device.type != "cpu":
        return torch.zeros(pages, page_bytes, dtype=torch.uint8, device=device)
    memory = mmap.mmap(-1, pages * page_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8).view(pages, page_bytes)
