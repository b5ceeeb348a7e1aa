"""The cache's memory: raw pages, and the typed view of them that each attention layer gets."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from quire.runner.transfer import upload_together
from quire.types.cache import CacheLayout, LayerCache
from quire.types.plan import Ints


class KVBuffers:
    """`pages` usable pages in each buffer, and page 0 before them, the null page that no table entry of a live token names."""

    def __init__(self, layout: CacheLayout, pages: int, dtype: torch.dtype, device: torch.device) -> None:
        self._layout = layout
        self._dtype = dtype
        self._device = device
        self.raw = [_zeros(pages + 1, layout.page_bytes, device) for _ in range(layout.buffers)]  # each [pages + 1, page_bytes]

    def views(self, layers: Sequence[LayerCache]) -> list[tuple[int, Tensor, int]]:
        """(layer, its cache [pages + 1, 2, kv_heads, page_size, head_dim], its group) for every layer of the layout."""
        return [
            (layer, self._view(self.raw[buffer], layers[layer]), index)
            for index, group in enumerate(self._layout.groups)
            for buffer, layer in enumerate(group.layers)
        ]

    def copy(self, source: Ints, target: Ints) -> None:
        """Duplicates whole pages, in every buffer."""
        if not len(source):
            return
        read, write = upload_together([source, target], self._device)
        for buffer in self.raw:
            buffer[write] = buffer[read]

    def _view(self, raw: Tensor, layer: LayerCache) -> Tensor:
        """A layer smaller than a page uses the page's first part."""
        shape = (2, layer.kv_heads, self._layout.page_size, layer.head_dim)
        elements = 2 * layer.kv_heads * self._layout.page_size * layer.head_dim
        typed = raw.view(self._dtype)[:, :elements]
        return typed.view(len(raw), *shape)


def _zeros(pages: int, page_bytes: int, device: torch.device) -> Tensor:
    """On a CPU numpy asks the system for memory that becomes real, and zero, when a page is first used; torch would fill it."""
    if device.type == "cpu":
        return torch.from_numpy(np.zeros((pages, page_bytes), np.uint8))
    return torch.zeros(pages, page_bytes, dtype=torch.uint8, device=device)
