"""Page tables of all kinds of groups, without a scheduler."""

import random
from array import array
from dataclasses import dataclass

import pytest

from quire.cache.groups import KINDS, Full
from quire.cache.layout import make_layout, pages_for
from quire.cache.pool import NULL
from quire.cache.tables import Tables
from quire.types.cache import LayerCache
from quire.types.request import EngineRequest, Request
from quire.types.sampling import SamplingParams

SIZE = 4


def tables(*windows: int | None, pages: int = 50, chunk: int = 8) -> Tables:
    layout = make_layout([LayerCache(1, 8, window) for window in windows], SIZE, 2)
    return Tables(layout, pages, chunk, prefix_caching=True)


def request(tokens: list[int], salt: tuple[str, ...] = ()) -> Request:
    spec = EngineRequest("r", tuple(tokens), SamplingParams(), 0, frozenset(), frozenset(), 0.0, salt=salt)
    return Request(spec, limit=10**6, order=0, tokens=array("i", tokens))


def compute(books: Tables, r: Request, end: int) -> None:
    """Rows up to `end`, as a scheduler would place them."""
    books.trim(r)
    books.grow(r, end)
    r.computed = end
    books.publish(r)


def start(books: Tables, tokens: list[int], end: int | None = None) -> Request:
    r = request(tokens)
    books.adopt(r, 0)
    compute(books, r, len(tokens) if end is None else end)
    return r


def test_a_hit_has_full_pages_only_and_leaves_the_last_token():
    books = tables(None)
    start(books, list(range(10)))
    assert books.find(request(list(range(10)))) == 8
    assert books.find(request(list(range(8)))) == 4
    assert books.find(request([*range(7), 99, 8, 9])) == 4
    assert books.find(request(list(range(10)), salt=("other",))) == 0


def test_a_window_hit_needs_only_the_pages_in_sight_of_the_next_query():
    books = tables(5)
    r = start(books, list(range(16)), end=8)
    compute(books, r, 16)
    again = request(list(range(17)))
    books.free(r)
    assert books.find(again) == 16
    books.adopt(again, 16)
    assert [page != NULL for page in again.pages[0]] == [False, False, False, True]
    compute(books, again, 17)
    books.free(again)
    books.check([])


@pytest.mark.parametrize("window", [1, 2, 4, 5, 9, 13])
def test_the_best_window_hit_is_the_longest_whose_window_is_unbroken(window):
    rng = random.Random(window)
    for _ in range(200):
        books = tables(window)
        r = start(books, list(range(32)))
        gone = {i for i in range(8) if rng.random() < 0.4}
        books.pool.forget([r.pages[0][i] for i in gone])
        again = request(list(range(33)))

        def complete(hit: int, gone: set[int] = gone) -> bool:
            visible = range(max(0, hit * SIZE - window + 1), hit * SIZE)
            return not any(position // SIZE in gone for position in visible)

        assert books.find(again) == SIZE * max(hit for hit in range(9) if complete(hit))


def test_all_groups_agree_on_a_hit():
    """A hit of b pages needs page b-1 of the near group, and pages b-2 and b-1 of the far one."""
    books = tables(5, 9)
    r = start(books, list(range(32)))
    near, far = r.pages
    books.pool.forget([near[4], far[5]])
    # near allows 7; far then 5, for lack of far[5]; that again is forbidden by near[4]; both allow 4
    assert books.find(request(list(range(29)))) == 4 * SIZE


def test_the_window_moves_and_pages_come_back():
    books = tables(None, 6, pages=20, chunk=4)
    r = request(list(range(40)))
    books.adopt(r, 0)
    for end in range(4, 41, 4):
        compute(books, r, end)
        held = sum(page != NULL for table in r.pages for page in table)
        assert held <= pages_for(make_layout([LayerCache(1, 8), LayerCache(1, 8, 6)], SIZE, 2), end, 4)
    assert r.pages[1][-3:].count(NULL) == 0
    assert r.pages[1][:6] == [NULL] * 6
    books.check([r])
    books.free(r)
    books.check([])


def test_demand_is_never_exceeded_on_the_way():
    rng = random.Random(1)
    for _ in range(100):
        chunk = rng.randint(1, 9)
        books = tables(*rng.choice([(None,), (3,), (None, 5), (2, 11)]), chunk=chunk)
        old = start(books, list(range(30)))
        if rng.random() < 0.5:
            books.free(old)
        r = request(list(range(rng.randint(2, 40))))
        hit = books.find(r)
        books.adopt(r, hit)
        r.computed = hit
        promised, least = books.demand(r, len(r.tokens)), books.pool.free
        before = books.pool.free
        while r.computed < len(r.tokens):
            compute(books, r, min(len(r.tokens), r.computed + rng.randint(1, chunk)))
            least = min(least, books.pool.free)
        assert before - least <= promised


def test_a_fork_shares_full_pages_and_copies_the_rest():
    books = tables(None, 6)
    parent = start(books, list(range(10)))
    child = request([*range(10), 77])
    sources = books.fork(child, parent, 9)
    assert child.pages[0] == parent.pages[0][:2]
    assert child.pages[1] == [NULL, parent.pages[1][1]], "a query at 9 sees 4 ... 9"
    assert sources == [table[2] for table in parent.pages]
    books.pool.drop(sources)
    books.check([parent, child])
    even = request(list(range(9)))
    assert books.fork(even, parent, 8) == [], "no valid token would be copied"
    books.check([parent, child, even])


def test_a_fork_needs_what_the_parent_may_have_given_back():
    books = tables(5, chunk=1)
    parent = start(books, list(range(12)), end=8)
    for end in range(9, 13):
        compute(books, parent, end)
        assert books.can_fork(parent, end - 1), "one token back is always possible"
    assert not books.can_fork(parent, 5)
    assert not books.can_fork(parent, 13), "not there yet"
    assert not books.can_fork(request([1]), 0), "no pages at all"


def test_nothing_is_found_without_prefix_caching():
    books = tables(None)
    books.prefix_caching = False
    r = start(books, list(range(10)))
    assert books.find(request(list(range(10)))) == 0
    assert r.keys == []


class State(Full):
    """A recurrent state: one page, written anew with every row, of which nothing earlier can be found."""

    @staticmethod
    def most(spec, tokens, page_size, chunk):
        return 1

    def need(self, request, end):
        return 1 - len(request.pages[self.number])

    def best(self, request, pages, below=None):
        return 0

    def can_fork(self, parent, tokens):
        return False

    def publish(self, request, first, last): ...


@dataclass(frozen=True)
class StateCache(LayerCache):
    kind = "state"

    def page_bytes(self, page_size, element_bytes):
        return self.kv_heads * self.head_dim**2 * element_bytes


def test_a_kind_of_ones_own(monkeypatch):
    monkeypatch.setitem(KINDS, "state", State)
    layout = make_layout([LayerCache(1, 8), StateCache(1, 64), LayerCache(1, 8), StateCache(1, 64)], SIZE, 2)
    assert [(group.kind, group.layers) for group in layout.groups] == [("full", (0, 2)), ("state", (1, 3))]
    assert layout.page_bytes == 64 * 64 * 2
    assert pages_for(layout, 400, 8) == 100 + 1
    books = Tables(layout, 20, 8, prefix_caching=True)
    tokens = list(range(21))
    first = start(books, tokens, 9)
    assert [len(table) for table in first.pages] == [3, 1]
    compute(books, first, 21)
    assert [len(table) for table in first.pages] == [6, 1]
    assert books.find(request(tokens)) == 0 and not books.can_fork(first, 8)
    books.check([first])
    books.free(first)
    assert books.pool.free == 20
