import pytest

from quire.cache.layout import make_layout, pool_layout, stage_layout
from quire.config.args import split_layers
from quire.types.cache import LayerCache
from quire.types.errors import ConfigError

FULL, NEAR = LayerCache(2, 64), LayerCache(2, 64, window=512)
GEMMA = [FULL if index % 6 == 5 else NEAR for index in range(62)]  # 52 with a window


def test_stages_of_one_kind_have_their_layers():
    stages = split_layers(5, 2)
    layouts = [stage_layout([FULL] * 5, stage, 16, 2) for stage in stages]
    assert [[group.layers for group in layout.groups] for layout in layouts] == [[(0, 1)], [(0, 1, 2)]]
    pool = pool_layout([FULL] * 5, stages, 16, 2)
    assert pool.bytes_per_page == layouts[1].bytes_per_page and pool.groups == make_layout([FULL] * 5, 16, 2).groups


@pytest.mark.parametrize("count", [2, 3, 4])
def test_no_stage_has_many_more_buffers_than_its_part(count):
    whole, stages = make_layout(GEMMA, 16, 2), split_layers(len(GEMMA), count)
    pool = pool_layout(GEMMA, stages, 16, 2)
    assert [(group.kind, group.window) for group in pool.groups] == sorted(
        [(group.kind, group.window) for group in whole.groups], reverse=True
    )
    layouts = [stage_layout(GEMMA, stage, 16, 2) for stage in stages]
    assert all(len(layout.groups) == len(whole.groups) for layout in layouts)
    assert max(layout.buffers for layout in layouts) <= -(-whole.buffers // count) + 1
    for layout, stage in zip(layouts, stages, strict=True):
        assert sorted(layer for group in layout.groups for layer in group.layers) == list(range(len(stage)))


@pytest.mark.parametrize(
    ("partition", "message"),
    [("2,4", "divides 6 layers, and the model has 5"), ("1,1,3", "for 3 stages"), ("5", "for 1 stages")],
)
def test_layers_that_do_not_add_up(partition, message):
    with pytest.raises(ConfigError, match=message):
        split_layers(5, 2, partition)


def test_layers_are_divided_evenly_or_as_told():
    assert split_layers(5, 2, " 4, 1") == (range(4), range(4, 5)) and split_layers(0, 1) == (range(0),)
    assert [len(stage) for stage in split_layers(32, 5)] == [6, 6, 7, 6, 7]
