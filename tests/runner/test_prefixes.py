"""The host's copy of the page tables."""

import numpy as np
from runner_support import ints

from quire.runner.slots import Prefixes

PAGE, KEYS = 4, 8


def prefixes():
    """Slots 0 to 4 begin with pages 1 2 3 in group 1; slot 5 with others."""
    made = Prefixes(2, 8, 10, PAGE)
    for slot in range(6):
        pages = ints(1, 2, 3, 40 + slot) if slot < 5 else ints(50, 51, 52, 53)
        made.write(np.ones_like(pages), np.full_like(pages, slot), np.arange(4, dtype=np.int32), pages)
    return made


def found(made, slot, count=None, end=None):
    count = [1] * len(slot) if count is None else count
    finder = made.finder(1, ints(*slot), ints(*count), ints(*([14] * len(slot) if end is None else end)))
    return finder(KEYS)


def test_rows_of_one_token_that_begin_alike():
    made = prefixes()
    alike = found(made, [5, 4, 3, 2, 1, 0])
    assert sorted(alike.order.tolist()) == [1, 2, 3, 4, 5] and alike.common.tolist() == [1] * 4
    assert sorted(found(made, [4, 3, 2, 1, 0], [1, 3, 1, 1, 1]).order.tolist()) == [0, 2, 3, 4]
    assert not len(found(made, [4, 3, 2, 1], end=[8, 14, 14, 14]).order)  # key 7 is the row's own


def test_what_was_found_is_kept_until_someone_comes():
    made = prefixes()
    before = found(made, [0, 1, 2, 3])
    made.write(ints(1), ints(2), ints(4), ints(60))  # a page of its own
    assert found(made, [0, 1, 2, 3], end=[15, 15, 15, 15]) is before
    assert found(made, [0, 1, 2, 3, 5]) is not before
    made.clear([2])
    assert not len(found(made, [0, 1, 2, 3]).order)


def test_a_page_that_is_replaced_is_seen():
    made = prefixes()
    assert len(found(made, [0, 1, 2, 3]).order) == 4
    made.write(ints(1), ints(2), ints(1), ints(60))
    assert not len(found(made, [0, 1, 2, 3]).order)
