"""Eviction policies: each against a slow model of itself, and what each of them keeps."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.cache.policies import policy_maker
from quire.cache.pool import NULL, Pool
from quire.types.cache import EVICTION_POLICIES

STEPS = st.lists(st.tuples(st.sampled_from(["add", "use", "forget", "pop"]), st.integers(1, 6), st.integers(1, 9)), max_size=60)


class SlowPolicy:
    """The same rules over a list."""

    def __init__(self, name: str) -> None:
        self.name, self.level, self.number = name, 0.0, 0
        self.uses: Counter[int] = Counter()
        self.idle: dict[int, tuple[float, int]] = {}

    def add(self, item: int, length: int) -> None:
        value = {"lru": 0.0, "lfu": 1.0, "cost": 1 + length / 4}[self.name]
        self.number += 1
        self.idle[item] = (self.level + (1 + self.uses[item]) * value, self.number)

    def use(self, item: int) -> None:
        self.uses[item] += 1
        self.idle.pop(item, None)

    def forget(self, item: int) -> None:
        del self.uses[item]
        self.idle.pop(item, None)

    def pop(self) -> int:
        item = min(self.idle, key=self.idle.__getitem__)
        self.level = self.idle[item][0]
        self.forget(item)
        return item


@pytest.mark.parametrize("name", EVICTION_POLICIES)
@given(steps=STEPS)
def test_each_policy_follows_its_rule(name: str, steps):
    policy, slow = policy_maker(name, 4.0)(), SlowPolicy(name)
    for step, item, length in steps:
        if step == "add" and item not in slow.idle:
            policy.add(item, length)
            slow.add(item, length)
        elif step == "pop" and slow.idle:
            assert policy.pop() == slow.pop()
        elif step in ("use", "forget"):
            getattr(policy, step)(item)
            getattr(slow, step)(item)
        assert len(policy) == len(slow.idle) and set(policy) == set(slow.idle)
        assert (item in policy) == (item in slow.idle)


@pytest.mark.parametrize("name", EVICTION_POLICIES)
def test_of_a_sequence_the_tail_goes_first(name: str):
    pool = Pool(4, policy=policy_maker(name, 2.0))
    pages = pool.take(4)
    for i, page in enumerate(pages):
        pool.publish(page, (0, bytes([i])), bytes([i]))
    pool.drop(pages)
    assert pool.take(4) == pages[::-1]


def _cached(pool: Pool, name: bytes, pages: int, uses: int = 1) -> None:
    """Let `uses` sequences of these pages come and go."""
    taken = pool.take(pages)
    for i, page in enumerate(taken):
        pool.publish(page, (0, name + bytes([i])), bytes([i]))
    pool.drop(taken)
    for _ in range(uses - 1):
        pool.drop([pool.share(page) for page in taken])


def _found(pool: Pool, name: bytes) -> bool:
    return pool.find((0, name + b"\0"), b"\0") != NULL


@pytest.mark.parametrize(("name", "kept"), [("lru", False), ("lfu", True), ("cost", True)])
def test_lfu_keeps_what_is_used_often_through_a_scan_of_pages_that_are_used_once(name: str, kept: bool):
    pool = Pool(8, policy=policy_maker(name, 100.0))
    _cached(pool, b"system prompt", 2, uses=9)
    for i in range(6):
        _cached(pool, b"once" + bytes([i]), 2)
    assert _found(pool, b"system prompt") == kept


def test_lfu_forgets_in_the_end_what_was_used_often_long_ago():
    pool = Pool(8, policy=policy_maker("lfu"))
    _cached(pool, b"old", 2, uses=5)
    for i in range(60):
        _cached(pool, b"new" + bytes([i]), 2)
    assert not _found(pool, b"old")


@pytest.mark.parametrize(("name", "kept"), [("lru", False), ("lfu", False), ("cost", True)])
def test_cost_keeps_long_sequences_before_short_ones(name: str, kept: bool):
    pool = Pool(12, policy=policy_maker(name, 2.0))
    _cached(pool, b"long", 8)
    for i in range(4):
        _cached(pool, b"short" + bytes([i]), 2)
    _cached(pool, b"x", 2)
    found = [pool.find((0, b"long" + bytes([i])), bytes([i])) != NULL for i in range(8)]
    assert all(found) == kept
