from collections import Counter

import pytest

from quire.cache.pool import NULL, Pool
from quire.types.errors import EngineError


def publish(pool: Pool, pages: list[int], name: bytes) -> None:
    for i, page in enumerate(pages):
        pool.publish(page, (0, name + bytes([i])), bytes([i]))


def test_page_zero_is_never_handed_out():
    pool = Pool(3)
    assert sorted(pool.take(3)) == [1, 2, 3]
    with pytest.raises(EngineError, match="1 pages were requested, but only 0 of 3"):
        pool.take(1)


def test_unpublished_pages_go_first_then_the_oldest_and_of_a_sequence_the_tail():
    pool = Pool(6)
    old, young, blank = pool.take(2), pool.take(2), pool.take(2)
    publish(pool, old, b"old")
    publish(pool, young, b"young")
    pool.drop(old)
    pool.drop(young)
    pool.drop(blank)
    assert set(pool.take(2)) == set(blank)
    assert pool.take(4) == [old[1], old[0], young[1], young[0]]
    assert pool.find((0, b"old\0"), bytes([0])) == NULL


def test_a_hit_revives_a_free_page_and_makes_it_young():
    pool = Pool(2)
    first, second = pool.take(2)
    publish(pool, [first], b"a")
    publish(pool, [second], b"b")
    pool.drop([first])
    pool.drop([second])
    assert pool.share(pool.find((0, b"a\0"), bytes([0]))) == first
    assert pool.free == 1
    pool.drop([first])
    assert pool.take(1) == [second]


def test_a_key_keeps_its_first_page():
    pool = Pool(2)
    first, second = pool.take(2)
    publish(pool, [first], b"same")
    publish(pool, [second], b"same")
    assert pool.find((0, b"same\0"), bytes([0])) == first
    pool.drop([second])
    pool.drop([first])
    assert pool.take(1) == [second], "the double is blank"


def test_a_forged_key_finds_nothing():
    pool = Pool(1)
    [page] = pool.take(1)
    pool.publish(page, (0, b"key"), bytes([1, 2, 3]))
    assert pool.find((0, b"key"), bytes([1, 2, 3])) == page
    assert pool.find((0, b"key"), bytes([1, 2, 4])) == NULL
    assert pool.find((1, b"key"), bytes([1, 2, 3])) == NULL, "another group's page"


def test_forgotten_pages_are_blank_again():
    pool = Pool(3)
    used, cached = pool.take(1), pool.take(1)
    publish(pool, used, b"u")
    publish(pool, cached, b"c")
    pool.drop(cached)
    pool.forget_all()
    assert pool.find((0, b"u\0"), bytes([0])) == pool.find((0, b"c\0"), bytes([0])) == NULL
    pool.check(Counter(used))
    pool.drop(used)
    pool.check(Counter())
    assert pool.free == 3


def test_check_finds_a_leak():
    pool = Pool(2)
    pages = pool.take(1)
    with pytest.raises(EngineError, match="references"):
        pool.check(Counter())
    pool.check(Counter(pages))
    pool._is_blank[pages[0]] = 1
    with pytest.raises(EngineError, match="lost or doubled"):
        pool.check(Counter(pages))


def test_sequences_begin_far_apart_and_grow_in_one_piece():
    pool = Pool(64)
    tables = [pool.take(2), pool.take(1), pool.take(1), pool.take(1)]
    for _ in range(14):
        for table in tables:
            table += pool.take(1, after=table[-1])
    assert all(table == list(range(table[0], table[0] + len(table))) for table in tables)
    pool.drop(tables[2])
    again = pool.take(15)
    assert again == tables[2][:15], "the same place is free again"


def test_a_sequence_that_cannot_go_on_in_place_begins_anew():
    pool = Pool(4)
    first, second = pool.take(2), pool.take(2)
    assert first == [1, 2] and second == [3, 4]
    pool.drop(first)
    assert pool.take(1, after=4) == [1]
