"""Single rules of the scheduler."""

import pytest
from desk import Desk, Faults

from quire.types.errors import ConfigError, PromptTooLong, RequestError
from quire.types.outputs import TokenDelta
from quire.types.sampling import RepetitionDetectionParams

A = tuple(range(10, 22))  # three pages of four


# ---- admission and rows --------------------------------------------------------------------------------------------------


def test_rows_are_chunks_of_what_is_known():
    desk = Desk(budget=8, chunk_cap=5)
    desk.add("a", A)
    desk.add("b", (*A[:2], 1))
    plan = desk.step()
    assert (plan.count.tolist(), plan.end.tolist(), plan.sample.tolist()) == ([5, 3], [5, 3], [False, True])
    plan = desk.step()
    assert (plan.count.tolist(), plan.sample.tolist()) == ([5, 1], [False, True])
    desk.finish()
    assert desk.right("a", "b")
    assert desk.heard["a"][0].scheduled_at == 7.0


def test_without_chunks_a_row_waits_for_a_budget_that_takes_it_whole():
    desk = Desk(budget=15, chunked=False, max_model_len=15)
    desk.add("a", A, 3)
    desk.add("b", A[1:], 4)
    assert desk.step().count.tolist() == [12]
    assert desk.step().count.tolist() == [1, 11]
    desk.finish()
    assert desk.right("a", "b")


def test_admission_waits_for_all_known_tokens_and_counts_what_others_are_owed():
    desk = Desk(pages=6, budget=4)
    desk.add("a", A, 2)  # 3 pages, one of them at first
    desk.add("b", range(30, 44), 2)  # 4 pages: 5 are free but 2 of these are spoken for
    desk.step()
    desk.step()
    assert desk.running() == {"a"}
    desk.finish()
    assert desk.right("a", "b")
    assert desk.scheduler.stats.preemptions == 0


def test_slots_of_those_who_left_are_retired_with_the_next_plan():
    desk = Desk(max_seqs=1)
    desk.add("a", A, 1)
    assert desk.step().retired.tolist() == []
    assert desk.step() is None, "retirements alone make no plan"
    desk.add("b", A, 1)
    plan = desk.step()
    assert plan.retired.tolist() == [plan.admitted[0].slot]


# ---- refusals ------------------------------------------------------------------------------------------------------------


def test_what_can_never_fit_is_refused_at_once_with_numbers():
    desk = Desk(pages=3)
    with pytest.raises(PromptTooLong, match=r"grow to 15 tokens and 4 cache pages, .* only 3, 1 too few.* at least 3 tokens"):
        desk.add("a", A, 4)
    desk.add("a", A, 1)
    with pytest.raises(PromptTooLong, match="has 60 tokens and may have 60"):
        desk.add("b", range(60))
    with pytest.raises(RequestError, match="empty"):
        desk.add("c", ())
    with pytest.raises(PromptTooLong, match=r"12 tokens, but without chunked prefill .* step of 10 tokens.* at least 2"):
        Desk(budget=10, chunked=False).add("a", A, 1)
    desk.finish()
    assert desk.right("a")


def test_an_id_can_be_used_again_only_after_the_finish():
    desk = Desk()
    desk.add("a", A, 1, hold=True)
    with pytest.raises(RequestError, match="'a' is in use"):
        desk.add("a", A)
    desk.finish()
    desk.add("a", A, 1)
    desk.finish()
    assert desk.scheduler.stats.free_pages == 20, "the earlier one's hold has ended"


def test_impossible_numbers():
    with pytest.raises(ConfigError, match=r"chunk cap of 3 tokens needs chunked prefill"):
        Desk(chunked=False, chunk_cap=3)
    with pytest.raises(ConfigError, match="max_seqs"):
        Desk(max_seqs=0)
    with pytest.raises(ConfigError, match="pages"):
        Desk(pages=0)


# ---- prefix cache --------------------------------------------------------------------------------------------------------


def test_a_request_of_the_same_step_shares_the_pages():
    desk = Desk()
    desk.add("a", A)
    desk.add("b", A)
    plan = desk.step()
    assert plan.count.tolist() == [12, 4]
    desk.finish()
    assert desk.right("a", "b")
    assert (desk.cached("a"), desk.cached("b")) == (0, 8)
    assert (desk.scheduler.stats.queries, desk.scheduler.stats.hits) == (24, 8)


def test_what_a_row_of_one_token_writes_is_not_read_in_its_own_step():
    desk = Desk(budget=7)
    desk.add("a", A[:8])
    assert desk.step().count.tolist() == [7]
    desk.add("b", A[:9])
    assert desk.step().count.tolist() == [1, 5]  # b has the first page; the second is filled in this step
    desk.add("c", A[:9])
    assert desk.step().count.tolist() == [1, 1, 1]
    desk.finish()
    assert desk.right("a", "b", "c")


def test_sampled_tokens_are_found_again():
    for depth in (0, 1, 2):
        desk = Desk(depth=depth)
        desk.add("a", A, 9)
        desk.finish()
        desk.add("b", A + tuple(desk.answer("a")), 2)
        desk.finish()
        assert desk.right("a", "b")
        assert desk.cached("b") == 20


def test_salts_and_requests_that_do_not_read():
    desk = Desk()
    desk.add("a", A, salt=("x",))
    desk.finish()
    desk.add("b", A)
    desk.add("c", A, salt=("x",), prompt_logprobs=0)
    desk.add("d", A, salt=("x",))
    desk.add("e", A, salt=("x",), skip_reading_prefix_cache=True)
    desk.finish()
    assert [desk.cached(name) for name in "bcde"] == [0, 0, 8, 0]
    assert [t for d in desk.heard["c"] for top in d.prompt_logprobs for t in top.ids[:, 0].tolist()] == list(A[1:])


def test_one_that_does_not_read_still_publishes():
    desk = Desk()
    desk.add("a", A, skip_reading_prefix_cache=True)
    desk.finish()
    desk.add("b", A)
    desk.finish()
    assert desk.cached("b") == 8


def test_reset_refuses_while_someone_runs_and_drops_holds():
    desk = Desk()
    desk.add("a", A, 1, hold=True)
    desk.finish()
    desk.add("b", A)
    desk.step()
    assert not desk.core.reset_prefix_cache()
    desk.finish()
    assert desk.core.reset_prefix_cache()
    assert desk.scheduler.stats.free_pages == 20
    desk.add("c", A)
    desk.finish()
    assert desk.cached("c") == 0


# ---- preemption ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_the_newest_gives_way_keeps_its_tokens_and_comes_back_first(depth):
    desk = Desk(pages=6, depth=depth, max_seqs=2)
    desk.add("a", A[:7], 10)
    desk.add("b", range(30, 37), 10)
    desk.add("c", range(40, 43), 2)
    desk.finish()
    assert desk.right("a", "b", "c")
    assert [desk.heard[name][-1].preemptions for name in "abc"] == [0, 1, 0]
    first_token = {name: deltas[0].cached_tokens for name, deltas in desk.heard.items()}
    assert set(first_token) == {"a", "b", "c"}


def test_priority_order_and_ties():
    desk = Desk(max_seqs=1, policy="priority")
    for name, priority in (("low", 2), ("mid", 1), ("top", 0), ("mid2", 1)):
        desk.add(name, A, 1, priority=priority)
    order = []
    while desk.core.has_unfinished:
        desk.step()
        order = list(desk.heard)
    assert order == ["top", "mid", "mid2", "low"]


def test_fcfs_does_not_look_at_priorities():
    desk = Desk(max_seqs=1)
    desk.add("first", A, 1, priority=5)
    desk.add("second", A, 1, priority=-5)
    desk.finish()
    assert list(desk.heard) == ["first", "second"]


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_better_request_takes_the_slot_of_the_worst(depth):
    desk = Desk(max_seqs=2, policy="priority", depth=depth)
    desk.add("mid", A, 8, priority=1)
    desk.add("low", A[::-1], 8, priority=2)
    desk.step()
    desk.add("top", A[:5], 2, priority=0)
    desk.step()
    assert desk.running() == {"mid", "top"}
    desk.finish()
    assert desk.right("mid", "low", "top")
    assert desk.heard["low"][-1].preemptions == 1


def test_an_equal_priority_does_not_preempt():
    desk = Desk(max_seqs=1, policy="priority")
    desk.add("a", A, 5, priority=1)
    desk.step()
    desk.add("b", A, 1, priority=1)
    desk.finish()
    assert desk.scheduler.stats.preemptions == 0


def test_only_as_many_as_needed_give_way_for_pages():
    desk = Desk(pages=9, policy="priority")
    for i, priority in enumerate((0, 1, 2)):
        desk.add(f"p{priority}", range(i * 12, i * 12 + 9), 3, priority=priority)
    desk.step()
    desk.add("top", range(40, 49), 3, priority=-1)
    desk.step()
    assert desk.running() == {"top", "p0", "p1"}
    desk.finish()
    assert desk.right("p0", "p1", "p2", "top")


def test_nobody_gives_way_in_vain():
    desk = Desk(pages=9, policy="priority")
    desk.add("p0", range(12, 32), 4, priority=0)
    desk.add("p2", range(9), 4, priority=2)
    desk.step()
    desk.add("p1", range(30, 50), 4, priority=1)  # 5 pages: 1 is free, and p2 could give 3 more
    desk.step()
    assert desk.running() == {"p0", "p2"}
    desk.finish()
    assert desk.right("p0", "p1", "p2")
    assert desk.scheduler.stats.preemptions == 0


# ---- forks and holds -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("windows", [(None,), (None, 3), (2, 6)])
@pytest.mark.parametrize("depth", [0, 1])
def test_children_share_the_prompt_and_copy_the_last_page(windows, depth):
    desk = Desk(windows, depth=depth, pages=60)
    prompt = (*A, 1, 2)
    desk.add("a", prompt)
    desk.add("b", prompt, fork_of="a")
    desk.add("c", prompt, fork_of="a")
    assert desk.step().count.tolist() == [14], "they wait for their parent"
    plan = desk.step()
    assert plan.count.tolist() == [1, 1, 1]
    assert len(plan.copy_from) == 2 * len(windows)
    shared = [page for page in plan.entry_page.tolist() if plan.entry_page.tolist().count(page) == 2]
    assert shared or windows == (2, 6)
    desk.finish()
    assert desk.right("a", "b", "c")
    assert desk.cached("b") == desk.cached("c") == 13


def test_a_page_without_a_valid_token_is_not_copied():
    desk = Desk(prefix_caching=False)
    desk.add("a", (*A, 1))
    desk.add("b", (*A, 1), fork_of="a")
    desk.step()
    plan = desk.step()
    assert plan.copy_from.tolist() == []
    desk.finish()
    assert desk.cached("b") == 12
    assert desk.right("a", "b")


def test_children_wait_through_the_chunks_of_a_long_prompt():
    desk = Desk(budget=4)
    desk.add("a", A)
    desk.add("b", A, fork_of="a")
    desk.add("c", (1, 2, 3), 2)
    desk.step(3)
    assert desk.running() == {"a"}
    desk.step()
    assert desk.running() == {"a", "b", "c"}
    desk.finish()
    assert desk.right("a", "b", "c")


def test_the_token_ids_are_compared():
    desk = Desk(prefix_caching=False)
    desk.add("a", A)
    desk.step()
    desk.add("b", (*A[:6], 1, 2, 3), fork_of="a")
    desk.finish()
    assert desk.cached("b") == 6
    assert desk.right("a", "b")


def test_another_salt_or_a_full_reading_forbids_the_fork():
    desk = Desk(prefix_caching=False)
    desk.add("a", A, 8)
    desk.step()
    desk.add("b", A, fork_of="a", salt=("x",))
    desk.add("c", A, fork_of="a", prompt_logprobs=0)
    desk.add("d", A, fork_of="nobody")
    desk.finish()
    assert [desk.cached(name) for name in "bcd"] == [0, 0, 0]


def test_a_child_does_not_wait_for_a_parent_that_comes_after_it():
    desk = Desk(max_seqs=1, policy="priority")
    desk.add("other", A, 6, priority=0)
    desk.step()
    desk.add("a", A, 1, priority=2)
    desk.add("b", A, 1, priority=1, fork_of="a")
    desk.finish()
    assert list(desk.heard) == ["other", "b", "a"]


@pytest.mark.parametrize("event", ["abort", "fail"])
def test_orphans_are_admitted(event):
    desk = Desk(budget=4, faults=Faults(rows=[(0, 0)]) if event == "fail" else None)
    desk.add("a", A)
    desk.add("b", A, fork_of="a")
    desk.step()
    if event == "abort":
        desk.core.abort(["a"])
    desk.finish()
    assert desk.right("b")
    assert [desk.heard[name][-1].finish_reason for name in "ab"] == ["abort" if event == "abort" else "error", "length"]


def test_aborting_a_parked_child_leaves_nothing():
    desk = Desk(budget=4)
    desk.add("a", A)
    desk.add("b", A, fork_of="a")
    desk.step()
    desk.core.abort(["b", "b", "unknown"])
    desk.finish()
    assert [delta.finish_reason for delta in desk.heard["b"]] == ["abort"]


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_held_pages_serve_later_forks_until_released(depth):
    desk = Desk(prefix_caching=False, depth=depth)
    desk.add("a", (*A, 1, 2), 2, hold=True)
    desk.finish()
    held = desk.scheduler.stats.free_pages
    assert held < 20
    grown = (*A, 1, 2, desk.answer("a")[0])
    desk.add("b", (*grown, 5), 3, fork_of="a")
    desk.add("c", (*grown, 6), 3, fork_of="a")
    desk.finish()
    assert desk.cached("b") == desk.cached("c") == 15, "the prompt and the first sampled token, which was run"
    assert desk.right("b", "c")
    assert desk.scheduler.stats.free_pages == held
    desk.core.release(["a", "unknown"])
    assert desk.scheduler.stats.free_pages == 20


def test_a_fork_of_a_fork_in_the_same_step_waits_for_the_copy():
    desk = Desk(prefix_caching=False)
    desk.add("a", (*A, 1, 2), 1, hold=True)
    desk.finish()
    desk.add("b", (*A, 1, 2), 3, fork_of="a")
    desk.add("c", (*A, 1, 2), 3, fork_of="b")
    assert desk.step().count.tolist() == [1]
    assert desk.step().count.tolist() == [1, 1]
    desk.finish()
    assert desk.cached("c") == 13
    assert desk.right("b", "c")


def test_nor_is_a_copy_copied_when_both_come_back_in_one_step():
    desk = Desk(max_seqs=2, policy="priority", prefix_caching=False, pages=40)
    prompt = (*A, 1, 2)
    desk.add("a", prompt, 1, hold=True)
    desk.finish()
    desk.add("x", A[::-1], 20, priority=1)
    desk.add("b", prompt, 8, priority=2, fork_of="a")
    desk.step()
    desk.add("c", prompt, 3, priority=2, fork_of="b")
    desk.step()
    desk.add("top", A[::-1], 20, priority=0)
    desk.step()
    assert desk.running() == {"x", "top"}
    desk.core.abort(["x", "top"])
    plan = desk.step()
    assert len(plan.copy_from) == len(plan.slot) == 1
    assert desk.running() == {"b"}
    assert len(desk.step().copy_from) == 1
    desk.finish()
    assert desk.right("b", "c")


def test_holds_are_dropped_oldest_first_when_pages_are_short():
    desk = Desk(pages=8)
    for i, name in enumerate(("old", "young")):
        desk.add(name, range(10 * i, 10 * i + 8), 1, hold=True)
        desk.finish()
    desk.add("a", range(30, 46), 5)  # 4 pages are free, a fifth is needed on the way
    desk.finish()
    assert set(desk.scheduler._forks.held) == {"young"}
    assert desk.scheduler.stats.preemptions == 0
    desk.add("b", range(20, 45), 1)
    desk.finish()
    assert not desk.scheduler._forks.held
    assert desk.right("a", "b")


def test_aborted_and_failed_requests_hold_nothing():
    desk = Desk(faults=Faults(rows=[(1, 1)]))
    desk.add("a", A, hold=True)
    desk.add("b", A, hold=True)
    desk.step()
    desk.core.abort(["a"])
    desk.step()
    assert desk.scheduler.stats.free_pages == 20


# ---- endings -------------------------------------------------------------------------------------------------------------


def test_stop_ids_are_reported_and_included():
    desk = Desk()
    desk.add("probe", A, 8)
    desk.finish()
    tokens = desk.tokens("probe")
    last = max(i for i, token in enumerate(tokens) if token not in tokens[:i])
    for name, kind in (("a", {"stop": [tokens[last]]}), ("b", {"eos": [tokens[last]]})):
        desk.specs.clear()  # the same seed again
        desk.add(name, A, 8, **kind)
        desk.finish()
    assert desk.tokens("a") == desk.tokens("b") == tokens[: last + 1]
    ends = [(desk.heard[name][-1].finish_reason, desk.heard[name][-1].stop_reason) for name in "ab"]
    assert ends == [("stop", tokens[last]), ("stop", None)]


def test_the_context_limits_the_answer():
    desk = Desk(max_model_len=15)
    desk.add("a", A, 50)
    desk.finish()
    assert len(desk.tokens("a")) == 3
    assert desk.heard["a"][-1].finish_reason == "length"


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_an_abort_takes_effect_at_once_wherever_the_request_is(depth):
    desk = Desk(max_seqs=1, depth=depth)
    desk.add("running", A, 9)
    desk.add("waiting", A, 9)
    desk.step(2)
    desk.core.abort(["running", "waiting"])
    assert desk.scheduler.stats.free_pages == 20
    assert not desk.scheduler.has_unfinished
    desk.step(3)
    assert [desk.heard[name][-1].finish_reason for name in ("running", "waiting")] == ["abort", "abort"]
    assert not desk.core.has_unfinished
    desk.add("next", A, 3)
    desk.finish()
    assert desk.right("next")


def test_logprobs_ride_with_their_tokens():
    desk = Desk()
    desk.add("a", A, 3, logprobs=2)
    desk.finish()
    tops = [top for delta in desk.heard["a"] for top in delta.logprobs]
    assert [int(top.ids[0, 0]) for top in tops] == desk.tokens("a")
    assert tops[0].ids.shape == (1, 3)


def test_prompt_logprobs_come_once_even_after_a_preemption():
    desk = Desk(pages=6, budget=5, policy="priority", max_seqs=1)
    desk.add("a", A, 2, priority=1, prompt_logprobs=1)
    desk.step(2)
    desk.add("b", A[::-1], 2, priority=0)
    desk.finish()
    assert desk.heard["a"][-1].preemptions == 1
    assert [t for d in desk.heard["a"] for top in d.prompt_logprobs for t in top.ids[:, 0].tolist()] == list(A[1:])
    assert desk.right("a", "b")


# ---- failures ------------------------------------------------------------------------------------------------------------


def test_a_failed_row_ends_its_request_and_its_pages_are_not_found():
    desk = Desk(faults=Faults(rows=[(0, 0)]))
    desk.add("a", A)
    desk.add("other", (1, 2, 3))
    desk.finish()
    assert (desk.heard["a"][-1].finish_reason, desk.heard["a"][-1].error) == ("error", "failed on order")
    assert desk.right("other")
    desk.add("b", A)
    desk.finish()
    assert desk.cached("b") == 0


@pytest.mark.parametrize("way", ["submit", "result"])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_lost_step_ends_its_own_requests_and_empties_the_index(way, depth):
    desk = Desk(depth=depth, faults=Faults(**{way: [1]}), budget=14)
    desk.add("old", (1, 2), 6)
    desk.step()
    desk.add("a", A, 6)  # in step 1, together with `old`
    desk.step()
    desk.add("b", A, 6)  # after it: may have read pages that were never written
    desk.finish()
    assert {name: desk.heard[name][-1].finish_reason for name in desk.heard} == {"old": "error", "a": "error", "b": "length"}
    assert "step 1 failed on order" in desk.heard["a"][-1].error
    assert desk.right("b")
    desk.add("c", A, 6)
    desk.finish()
    assert desk.right("c")


def test_a_stray_row_lost_with_its_step_ends_the_hold():
    """The last token's keys were to be written by the row that turned out to be one too many."""
    desk = Desk(prefix_caching=False, depth=1, faults=Faults(result=[2]))
    first, second = desk.model.generate(A, seed=0, max_tokens=2)
    assert first != second
    desk.add("a", A, 8, hold=True, stop=[second])
    desk.finish()
    assert desk.scheduler.stats.free_pages < 20
    desk.step()
    assert desk.scheduler.stats.free_pages == 20
    desk.add("b", (*A, first, second, 5), 2, fork_of="a")
    desk.finish()
    assert desk.right("b")


def test_retired_slots_of_a_lost_step_are_told_again():
    desk = Desk(max_seqs=2, faults=Faults(submit=[1]))
    desk.add("a", A, 1)
    desk.add("b", A[::-1], 2)
    desk.step()
    assert desk.step().retired.tolist() == [0]
    desk.add("c", A, 2)
    assert sorted(desk.step().retired.tolist()) == [0, 1]
    desk.finish()
    assert desk.right("c")


# ---- deltas --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 1])
def test_a_token_in_the_middle_is_nothing_but_a_token(depth):
    """Whatever else there is to say of a request comes with the first and the last one."""
    desk = Desk(depth=depth)
    desk.add("z", A, 1)
    desk.finish()
    desk.add("a", A, 12)
    desk.finish()
    assert desk.right("a")
    first, *_, last = deltas = desk.heard["a"]
    assert len(deltas) == 12
    assert (first.cached_tokens, first.scheduled_at) == (last.cached_tokens, last.scheduled_at) == (8, 7.0)
    plain = [delta for delta in deltas if delta == TokenDelta("a", delta.token_ids)]
    assert len(plain) >= 6
    assert [delta.finish_reason for delta in deltas] == [None] * 11 + ["length"]


def test_a_preemption_is_told_with_the_next_token():
    desk = Desk(pages=9)
    desk.add("a", A, 12)
    desk.add("b", A[::-1], 12)
    desk.finish()
    assert desk.right("a", "b")
    assert desk.scheduler.stats.preemptions
    told = [delta.preemptions for delta in desk.heard["b"]]
    again = next(i for i, count in enumerate(told) if count)
    assert told[:again] == [0] * again
    assert again < len(told) - 1, "only the last one told it"


@pytest.mark.parametrize("pattern", [None, RepetitionDetectionParams(max_pattern_size=2, min_pattern_size=1, min_count=2)])
def test_pages_filled_by_output_are_found(pattern):
    desk = Desk(pages=40, depth=1)
    desk.add("a", A, 16, repetition_detection=pattern)
    desk.finish()
    whole = (*A, *desk.tokens("a"))
    desk.add("b", (*whole[:-1], 1), 1)
    desk.finish()
    assert desk.cached("b") == (len(whole) - 1) // 4 * 4
