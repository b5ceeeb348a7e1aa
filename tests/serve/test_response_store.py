"""Stored responses: bounds, and what keys can do to each other."""

import asyncio

from quire.serve.response_objects import ResponseStore, StoredResponse


def stored(name: str, tenant: str | None, size: int = 10) -> StoredResponse:
    return StoredResponse({"id": name, "text": "x" * size, "status": "completed"}, [], tenant)


def kept(store: ResponseStore, tenant: str | None, names: list[str]) -> list[str]:
    return [name for name in names if store.get(name, tenant) is not None]


def test_one_tenant_loses_what_it_used_longest_ago():
    store = ResponseStore(3, 10_000)
    for name in "abc":
        store.put(stored(name, None))
    assert store.get("a", None) is not None
    store.put(stored("d", None))
    assert kept(store, None, list("abcd")) == ["a", "c", "d"] and len(store) == 3


def test_a_key_that_stores_much_evicts_only_its_own():
    store = ResponseStore(10, 10_000)
    mine = [f"mine{i}" for i in range(4)]
    for name in mine:
        store.put(stored(name, "me"))
    for i in range(50):
        store.put(stored(f"other{i}", "other"))
    assert kept(store, "me", mine) == mine
    assert kept(store, "other", [f"other{i}" for i in range(50)]) == [f"other{i}" for i in range(44, 50)]
    for i in range(4, 9):
        store.put(stored(f"mine{i}", "me"))
    assert len(store) == 10 and len(kept(store, "other", [f"other{i}" for i in range(50)])) == 5, "then both have as many"


def test_a_key_that_stores_large_ones_evicts_only_its_own():
    store = ResponseStore(100, 10_000)
    mine = [f"mine{i}" for i in range(3)]
    for name in mine:
        store.put(stored(name, "me", 1000))
    for i in range(9):
        store.put(stored(f"other{i}", "other", 2500))
    store.put(stored("huge", "other", 9000))
    assert kept(store, "me", mine) == mine and store.bytes <= 10_000
    assert store.get("huge", "other") is None, "it would have had to take from others"


def test_a_key_leaves_places_in_the_background_for_others():
    async def scene() -> None:
        store, forever = ResponseStore(100, 10_000), asyncio.Event()
        taken: dict[str | None, int] = {}

        def take(tenant: str | None) -> None:
            while store.may_run(tenant, 16):
                one = stored(f"{tenant}{taken.get(tenant, 0)}", tenant)
                one.work = asyncio.create_task(forever.wait())
                store.put(one)
                taken[tenant] = taken.get(tenant, 0) + 1

        for tenant in ("a", "b", "c", "d"):
            take(tenant)
        assert taken == {"a": 8, "b": 4, "c": 2, "d": 1}
        take(None)
        assert taken[None] == 1, "without keys, all that is left"

    asyncio.run(scene())
