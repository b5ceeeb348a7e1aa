"""Which rows begin with the same pages, and how they are cut into work."""

import numpy as np
import pytest

from quire.attn import work_split
from quire.attn.work_split import MIN_SHARING_ROWS, NOTHING_SHARED, SharedPrefix, cut_rows, find_alike

PAGE, KEYS = 4, 8


def ints(*values):
    return np.array(values, np.int32)


def pages_of(*rows):
    table = np.zeros((len(rows), max(len(row) for row in rows) + 2), np.int32)
    for row, pages in enumerate(rows):
        table[row, : len(pages)] = pages
    return table


def find(*rows):
    table = pages_of(*rows)
    return find_alike(table, np.arange(len(rows), dtype=np.int32), ints(*(len(row) for row in rows)), PAGE, KEYS)


def test_a_prefix_and_one_that_goes_on():
    found = find([1, 2, 3, 4, 5], [9, 8, 7, 6], [1, 2, 3, 4, 15], [1, 2], [1, 2, 3], [1, 2, 13, 14])
    assert sorted(found.order.tolist()) == [0, 2, 3, 4, 5]
    at = {row: place for place, row in enumerate(found.order.tolist())}
    assert abs(at[0] - at[2]) == 1
    assert sorted(found.common.tolist()) == [1, 1, 1, 2]


def test_too_few_rows_or_pages_are_nothing():
    assert find([1, 2, 3], [1, 2, 3], [1, 2, 3]) is NOTHING_SHARED
    assert find([1], [1], [1], [1], [1]) is NOTHING_SHARED
    assert find(*([row * 10 + 1, row * 10 + 2] for row in range(6))) is NOTHING_SHARED


def test_the_last_page_alone_is_not_enough():
    found = find([1, 2], [1, 2], [3, 2], [1, 2])
    assert found.common.tolist().count(1) <= 2 and 0 in found.common.tolist()


def test_slots_in_any_order():
    table = pages_of([5, 5, 5], [1, 2, 3], [6, 6, 6], [1, 2, 4], [1, 2, 5], [1, 2, 6])
    found = find_alike(table, ints(5, 2, 1, 4, 3), ints(3, 3, 3, 3, 3), PAGE, KEYS)
    assert sorted(found.order.tolist()) == [0, 2, 3, 4]
    assert found.common.tolist() == [1, 1, 1]


def test_among_some_rows():
    alike = SharedPrefix(ints(4, 0, 2, 1, 3, 5), ints(3, 1, 2, 4, 5))
    some = alike.among(np.array([True, False, True, True, True, True]))
    assert (some.order.tolist(), some.common.tolist()) == ([4, 0, 2, 3, 5], [3, 1, 2, 5])
    assert alike.among(np.array([True, False, True, False, False, True])) is NOTHING_SHARED


def work(made: work_split.Cuts, most_members: int) -> dict[tuple[int, int], int]:
    """(row, split) -> its part."""
    found = {(row, split): part for row, split, part, _ in made.splits.tolist()}
    for split, first, count in made.shared.tolist():
        assert 0 < count <= most_members
        for row, part in made.members[first : first + count].tolist():
            assert (row, split) not in found
            found[row, split] = part + split
    return found


@pytest.mark.parametrize("seed", range(40))
def test_everything_is_done_once_and_by_those_who_share(seed, monkeypatch):
    """Random trees of prefixes: each split of each row is done once, and its part is where the merge looks for it."""
    monkeypatch.setattr(work_split, "SPLIT", KEYS)
    dice = np.random.default_rng(seed)
    tables: list[list[int]] = []
    fresh = iter(range(1, 10**6))
    for _ in range(dice.integers(1, 40)):
        parent = tables[dice.integers(len(tables))] if tables and dice.random() < 0.9 else []
        kept = parent[: dice.integers(0, len(parent) + 1)] if dice.random() < 0.5 else parent[: 2 * (len(parent) // 3)]
        tables.append([*kept, *(next(fresh) for _ in range(dice.integers(1, 9)))])
    lengths = ints(*((len(table) - 1) * PAGE + dice.integers(1, PAGE + 1) for table in tables))
    rows = np.arange(len(tables), dtype=np.int32)
    alike = find_alike(pages_of(*tables), rows, (lengths - 1) // PAGE, PAGE, KEYS)
    most_members = int(dice.integers(1, 9))
    made = cut_rows(rows, lengths, None, alike, most_members)
    alone = cut_rows(rows, lengths, None, NOTHING_SHARED, most_members)
    assert work(made, most_members) == work(alone, most_members)
    assert (made.merges.tolist(), made.parts) == (alone.merges.tolist(), alone.parts)
    for split, first, count in made.shared.tolist():
        per = KEYS // PAGE
        read = {tuple(tables[row][: (split + 1) * per]) for row in made.members[first : first + count, 0]}
        assert len(read) == 1
    if len(tables) >= MIN_SHARING_ROWS and not len(alike.order):
        first = [tuple(table[:2]) for table, length in zip(tables, lengths, strict=True) if length > KEYS]
        assert all(first.count(pages) < MIN_SHARING_ROWS for pages in first)


def test_rows_with_a_window_read_on_their_own():
    alike = SharedPrefix(ints(0, 1, 2, 3), ints(2, 2, 2))
    made = cut_rows(ints(0, 1, 2, 3), ints(*[800] * 4), 500, alike, 8)
    assert not len(made.shared) and len(made.splits) == 12
