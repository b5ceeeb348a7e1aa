import pytest

from quire.cache.layout import fit, make_layout, pages_for
from quire.types.cache import LayerCache
from quire.types.errors import ConfigError


def layout(*windows: int | None):
    return make_layout([LayerCache(1, 8, window) for window in windows], page_size=4, element_bytes=2)


def test_full_groups_grow_and_window_groups_are_bounded():
    assert pages_for(layout(None), 9, chunk=100) == 3
    both = layout(None, 6)
    assert pages_for(both, 8, chunk=2) == 2 + 2
    assert pages_for(both, 400, chunk=2) == 100 + 3  # 8 positions anywhere: 3 pages of 4
    assert pages_for(both, 400, chunk=3) == 100 + 3
    assert pages_for(both, 400, chunk=4) == 100 + 4


def test_the_null_page_takes_memory_too():
    plan = layout(None)
    assert fit(plan, 10 * plan.bytes_per_page, 20, explicit=True, chunk=8).pages == 9


def test_a_length_of_the_model_is_lowered_to_what_fits():
    plan = layout(None)
    capacity = fit(plan, 6 * plan.bytes_per_page, 1000, explicit=False, chunk=8)
    assert (capacity.pages, capacity.max_model_len) == (5, 20)


def test_a_length_that_was_asked_for_is_refused_with_what_would_fit():
    plan = layout(None)
    with pytest.raises(ConfigError, match=r"max_model_len 41 needs 11 .* there are 5 .* 6 too few.* at most 20 would fit"):
        fit(plan, 6 * plan.bytes_per_page, 41, explicit=True, chunk=8)


def test_a_window_serves_any_length():
    plan = layout(6)
    assert fit(plan, 5 * plan.bytes_per_page, 10**6, explicit=True, chunk=4).max_model_len == 10**6


def test_not_even_one_page():
    plan = layout(None)
    with pytest.raises(ConfigError, match=r"not enough for one page of 4 tokens"):
        fit(plan, plan.bytes_per_page, 4, explicit=False, chunk=8)
    with pytest.raises(ConfigError, match="at least 1, got 0"):
        fit(plan, 10**9, 4, explicit=False, chunk=8, override=0)


def test_an_override_sets_the_pages():
    plan = layout(None)
    assert fit(plan, 0, 12, explicit=True, chunk=8, override=3).pages == 3
