"""The cache's memory in each of its layouts: every layer sees its pages, and whole pages are copied."""

import numpy as np
import pytest
import torch

from quire.cache.layout import make_layout
from quire.device.cpu.device import CPUDevice
from quire.runner.core import KVBuffers
from quire.types.cache import KVLayout, LayerCache


@pytest.mark.parametrize("layout", KVLayout)
@pytest.mark.parametrize("kv_heads", [1, 3])
def test_pages_are_copied_whole(kv_heads, layout):
    layers = [LayerCache(kv_heads, 8)] * 2
    buffers = KVBuffers(make_layout(layers, 4, 4), layers, 5, torch.float32, CPUDevice().allocate, layout)
    views = [view for _, view, _ in buffers.views()]
    for view in views:
        assert view.shape == (6, 2, kv_heads, 4, 8)
        assert view[:, 0].is_contiguous() == (layout is KVLayout.SPLIT or (layout is KVLayout.LINES and kv_heads == 1))
        assert view.is_contiguous() == (layout is KVLayout.PAGES)
        view.copy_(torch.randn(view.shape))
    before = [view.clone() for view in views]
    buffers.copy(np.array([1, 4], np.int32), np.array([2, 5], np.int32))
    for view, was in zip(views, before, strict=True):
        assert torch.equal(view, was[[0, 1, 1, 3, 4, 4]])
