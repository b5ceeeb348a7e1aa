"""How many pages a request takes at a time, and what it leaves behind on them."""

from desk import Desk, Faults

A = tuple(range(10, 22))  # three pages of four


def taken(desk: Desk) -> list[int]:
    """How many pages each plan so far brought."""
    return [len(plan.entry_page) for plan in desk.plans]


def test_where_pages_are_plenty_a_request_takes_some_ahead_and_never_more_than_it_can_fill():
    desk = Desk(pages=100, max_seqs=2)
    desk.add("a", A, 25)  # 36 positions are stored: 9 pages
    desk.finish()
    assert [count for count in taken(desk) if count] == [3 + 3, 3]
    assert desk.right("a") and desk.scheduler.stats.free_pages == 100


def test_where_pages_are_few_it_takes_what_it_needs():
    small = Desk(pages=20, max_seqs=2)  # too few for what all its slots might take ahead
    small.add("a", A, 9)  # 20 positions are stored: 5 pages
    small.finish()
    assert [count for count in taken(small) if count] == [3, 1, 1]
    full = Desk(pages=24, max_seqs=2, budget=128, max_model_len=90)
    full.add("big", range(73), 4)
    full.add("a", A, 9)
    full.finish()
    assert [count for count in taken(full) if count] == [19 + 3, 1, 1]
    assert small.right("a") and full.right("a", "big")


def test_nobody_gives_way_to_pages_that_are_not_needed_yet():
    desk = Desk(pages=24, max_seqs=2, budget=128, max_model_len=90)
    desk.add("a", range(40), 30)
    desk.step()
    assert taken(desk) == [10 + 3]
    desk.add("b", [*reversed(range(41))], 8)  # 11 pages, all there are
    assert desk.step().slot.tolist() == [0, 1] and taken(desk)[1] == 11
    assert desk.scheduler.stats.preemptions == 0
    desk.finish()
    assert desk.right("a", "b")


def test_who_is_aborted_leaves_its_full_pages_behind():
    desk = Desk()
    desk.add("a", A[:4], 20)
    desk.step(10)
    said = desk.tokens("a")
    desk.core.abort(["a"])
    desk.add("b", [*A[:4], *said], 1)
    desk.finish()
    assert len(said) == 10 and desk.heard["b"][0].cached_tokens == 12


def test_what_a_failed_row_wrote_is_forgotten_even_when_its_request_is_gone():
    desk = Desk(depth=1, faults=Faults(rows=((0, 0),)))
    desk.add("a", A, 4)
    desk.step()
    desk.core.abort(["a"])
    desk.step()
    desk.add("b", A, 4)
    desk.finish()
    assert desk.heard["b"][0].cached_tokens == 0 and desk.right("b")
