import pytest

from quire.cache.layout import make_layout
from quire.types.cache import LayerCache
from quire.types.errors import ConfigError

FULL, NEAR = LayerCache(2, 64), LayerCache(2, 64, window=512)


def test_one_kind_is_one_group():
    layout = make_layout([FULL] * 4, page_size=16, element_bytes=2)
    assert [group.layers for group in layout.groups] == [(0, 1, 2, 3)]
    assert layout.buffers == 4
    assert layout.page_bytes == 16 * 2 * 2 * 64 * 2
    assert layout.bytes_per_page == 4 * layout.page_bytes


def test_the_rarer_kind_sets_the_group_size():
    layout = make_layout([NEAR, NEAR, FULL, NEAR, NEAR, FULL, NEAR], page_size=16, element_bytes=2)
    assert layout.buffers == 2
    assert [(group.kind, group.window, group.layers) for group in layout.groups] == [
        ("window", 512, (0, 1)),
        ("window", 512, (3, 4)),
        ("window", 512, (6,)),
        ("full", None, (2, 5)),
    ]


def test_nearly_equal_kinds_get_one_group_each():
    layout = make_layout([NEAR] * 5 + [FULL] * 4, page_size=16, element_bytes=2)
    assert layout.buffers == 5
    assert [len(group.layers) for group in layout.groups] == [5, 4]


def test_every_layer_is_in_exactly_one_group_and_the_widest_sets_the_page_bytes():
    layers = [LayerCache(1, 64, window) for window in (4, 8, None, 4, 4, 8, None, 4)] + [LayerCache(4, 64)]
    layout = make_layout(layers, page_size=8, element_bytes=4)
    assert sorted(layer for group in layout.groups for layer in group.layers) == list(range(9))
    assert all(len(group.layers) <= layout.buffers for group in layout.groups)
    assert layout.page_bytes == 8 * 2 * 4 * 64 * 4


def test_nothing_to_lay_out():
    with pytest.raises(ConfigError, match="at least one attention layer"):
        make_layout([], 16, 2)
    with pytest.raises(ConfigError, match="page size"):
        make_layout([FULL], 0, 2)
