"""Eviction policies: each against a slow model of itself, and what each of them keeps."""

from collections import Counter
from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.cache import policies
from quire.cache.policies import Contest, Recency, Worth, policy_maker
from quire.cache.pool import NULL, Pool
from quire.types.cache import EVICTION_POLICIES

ORDERS = {"lru": Recency, "lfu": Worth, "length": lambda: Worth(lambda length: 1 + length / 2)}
STEPS = st.lists(
    st.tuples(st.sampled_from(["add", "use", "forget", "evict", "pop"]), st.integers(1, 6), st.integers(1, 9)), max_size=60
)


class SlowPolicy:
    """The same rules over a list."""

    def __init__(self, name: str) -> None:
        self.name, self.level, self.number = name, 0.0, 0
        self.uses: Counter[int] = Counter()
        self.idle: dict[int, tuple[float, int]] = {}

    def add(self, item: int, length: int) -> None:
        value = {"lru": 0.0, "lfu": 1.0, "length": 1 + length / 2}[self.name]
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
        self.evict(item)
        return item

    def evict(self, item: int) -> None:
        self.level = min(self.idle.values())[0]
        self.forget(item)


@pytest.mark.parametrize("name", ORDERS)
@given(steps=STEPS)
def test_each_order_follows_its_rule(name: str, steps):
    policy, slow = ORDERS[name](), SlowPolicy(name)
    for step, item, length in steps:
        if step == "add" and item not in slow.idle:
            policy.add(item, length)
            slow.add(item, length)
        elif step == "pop" and slow.idle:
            assert policy.pop() == slow.pop()
        elif step in ("use", "forget") or (step == "evict" and item in slow.idle):
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


@pytest.mark.parametrize(("name", "kept"), [("lru", False), ("lfu", True), ("length", True)])
def test_lfu_keeps_what_is_used_often_through_a_scan_of_pages_that_are_used_once(name: str, kept: bool):
    pool = Pool(8, policy=ORDERS[name])
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


@pytest.mark.parametrize(("name", "kept"), [("lru", False), ("lfu", False), ("length", True)])
def test_cost_keeps_long_sequences_before_short_ones(name: str, kept: bool):
    pool = Pool(12, policy=ORDERS[name])
    _cached(pool, b"long", 8)
    for i in range(4):
        _cached(pool, b"short" + bytes([i]), 2)
    _cached(pool, b"x", 2)
    found = [pool.find((0, b"long" + bytes([i])), bytes([i])) != NULL for i in range(8)]
    assert all(found) == kept


class Requests:
    """Requests that use and publish the pages of one sequence after the other."""

    def __init__(self, pages: int) -> None:
        self.pool, self.once = Pool(pages, policy=policy_maker("cost")), 0

    @property
    def order(self) -> str:
        contest = self.pool._cached
        assert isinstance(contest, Contest)
        return type(contest._orders[contest._chosen]).__name__

    def ask(self, name: str, pages: int) -> int:
        """Return how many leading pages were cached."""
        keys = [((0, f"{name} {i}".encode()), bytes([i])) for i in range(pages)]
        found = [self.pool.find(*key) for key in keys]
        hits = found.index(NULL) if NULL in found else pages
        used = [self.pool.share(page) for page in found[:hits]]
        used += self.pool.take(pages - hits)
        for page, key in zip(used[hits:], keys[hits:], strict=True):
            self.pool.publish(page, *key)
        self.pool.drop(used)
        return hits

    def scan(self, pages: int) -> None:
        for _ in range(pages):
            self.once += 1
            self.ask(f"once {self.once}", 1)

    def prompt_between_scans(self, rounds: int) -> int:
        hits = 0
        for _ in range(rounds):
            hits += sum(self.ask("system prompt", 2) for _ in range(3))
            self.scan(8)
        return hits


def test_cost_begins_as_lru_and_keeps_what_is_used_often_once_that_would_have_found_more():
    requests = Requests(8)
    assert requests.prompt_between_scans(3) == 3 * 4 and requests.order == "Recency"
    requests.prompt_between_scans(12)
    assert requests.order == "Worth"
    assert requests.prompt_between_scans(5) == 5 * 6


def test_cost_is_lru_again_where_that_finds_more():
    requests = Requests(8)
    requests.prompt_between_scans(20)
    assert requests.order == "Worth"
    for step in range(400):  # lru finds 7 pages again that were used once; prompts that were used often leave no space
        requests.ask(f"new {step // 7 // 2} {step % 7}", 1)
    assert requests.order == "Recency"


def test_cost_learns_anew_after_a_reset():
    requests = Requests(8)
    requests.prompt_between_scans(20)
    requests.pool.forget_all()
    assert requests.order == "Recency"
    assert requests.prompt_between_scans(3) == 3 * 4


@pytest.mark.parametrize("chosen", [0, 1])
@given(steps=st.lists(st.tuples(st.sampled_from(["use", "use", "use", "pop", "forget"]), st.integers(0, 11)), max_size=80))
def test_the_ghost_of_an_order_holds_what_a_cache_with_that_order_holds(chosen: int, steps):
    """Six items have the content of up to twelve keys."""
    contest = Contest(lambda _: 1.0)
    contest._chosen, contest._lead = chosen, chosen * 1e9  # which no hits make up for
    items = dict[int, int]()  # key -> item
    for step, key in steps:
        if step == "use":
            if key in items:
                contest.use(items[key])
            else:
                if len(items) == 6:
                    evicted = contest.pop()
                    items = {other: item for other, item in items.items() if item != evicted}
                items[key] = min({*range(6)} - {*items.values()})
                contest.enter(items[key], (0, bytes([key])))
            contest.add(items[key], 1)
        elif step == "forget" and key in items:
            contest.forget(items.pop(key))
        elif step == "pop" and items:
            evicted = contest.pop()
            items = {other: item for other, item in items.items() if item != evicted}
        assert set(contest._ghosts[chosen]) == set(items)
        assert contest._keys == {item: key for key, item in items.items()}
        assert set(contest) == set(items.values()) and len(contest) == len(items)


def test_ghosts_of_a_large_cache_hold_a_sample(monkeypatch):
    monkeypatch.setattr(policies, "MAX_SAMPLED", 32)
    requests = Requests(200)
    for i in range(300):
        requests.ask(sha256(bytes([i % 100])).hexdigest(), 4)
        contest = requests.pool._cached
        assert isinstance(contest, Contest)
        assert len(contest._keys) <= 32 and all(len(ghost) <= 64 for ghost in contest._ghosts)
    assert contest._sample >= 8 and all(number % contest._sample == 0 for ghost in contest._ghosts for number in ghost)
