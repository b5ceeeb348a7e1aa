"""Rows with drafts: how many there are, what they cost, and what comes of those that are right or wrong."""

import numpy as np
import pytest
from desk import Desk
from test_constrained import FORCED, GRAMMAR, Script, desk_with
from workload import check_windows

PROMPT = [1, 2, 3, 4, 5]


def turns(desk: Desk) -> int:
    return len(desk.plans)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_right_drafts_save_steps_and_wrong_ones_cost_none(depth):
    plain, right, wrong = (Desk(depth=depth, drafts=k, wrong=w) for k, w in ((0, 1), (3, 100), (3, 1)))
    for desk in (plain, right, wrong):
        desk.add("a", PROMPT, 16)
        desk.finish()
        assert desk.right("a")
    assert turns(right) <= 5 + depth
    assert turns(wrong) <= turns(plain) + 3 * depth  # at the end it waits: the drafts might have been right
    assert max(len(delta.token_ids) for delta in right.heard["a"]) == 4
    assert all(len(delta.token_ids) == 1 for delta in wrong.heard["a"] if delta.token_ids)


def test_a_row_has_no_more_drafts_than_there_is_room_for():
    desk = Desk(drafts=3, wrong=100, budget=3, pages=4, max_model_len=16)
    desk.add("a", PROMPT, 11)
    desk.finish()
    assert desk.right("a")
    assert all(plan.tokens <= 3 and plan.end.max() <= 15 for plan in desk.plans)
    assert any(plan.drafts.any() for plan in desk.plans)
    short = Desk(drafts=3, wrong=100)
    short.add("a", PROMPT, 2)
    short.finish()
    assert [plan.drafts.tolist() for plan in short.plans] == [[0], [0]]


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_stop_in_the_middle_of_what_was_accepted_is_the_end(depth):
    desk = Desk(depth=depth, drafts=3, wrong=100)
    stop = desk.model.generate(PROMPT, seed=0, max_tokens=4)[2]
    desk.add("a", PROMPT, 12, stop=[stop], hold=True)
    desk.finish()
    assert desk.right("a") and desk.tokens("a")[-1] == stop and len(desk.tokens("a")) == 3
    assert desk.heard["a"][-1].finish_reason == "stop"
    desk.add("b", [*PROMPT, *desk.tokens("a"), 7], 6, fork_of="a")  # what was accepted behind the end is nobody's
    desk.finish()
    assert desk.right("b")


def test_pages_with_rejected_tokens_are_never_found():
    desk = Desk(drafts=3, wrong=2, depth=1)
    desk.add("a", PROMPT, 20)
    for _ in range(40):
        desk.step()
        pool = desk.scheduler.pool
        request = desk.scheduler._live.get("a")
        if request is None:
            break
        for page in request.pages[0][: request.published]:
            assert pool.refs[page]
        assert request.published * 4 <= len(request.tokens)
    desk.add("b", [*PROMPT, *desk.tokens("a"), 9], 5)
    desk.finish()
    assert desk.right("a", "b") and desk.cached("b") >= 16


@pytest.mark.parametrize("windows", [(3,), (None, 2)])
def test_a_window_moves_on_with_what_is_sure(windows):
    """All drafts are wrong: rows in flight may go back further than the host's bound, and find their pages there."""
    desk = Desk(windows, drafts=3, wrong=1, depth=2)
    desk.add("a", PROMPT, 30)
    while desk.core.has_unfinished:
        desk.step()
        check_windows(desk.scheduler, desk.layout)
    assert desk.right("a")


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("wrong", [2, 100])
def test_drafts_go_up_to_a_thinking_budget_and_on_behind_it(depth, wrong):
    ends = [40, 41]
    desk = desk_with(Script(), depth=depth, drafts=3, wrong=wrong)
    desk.core.constraints.grammars.tokens["a"] = []  # it follows no grammar, but asks for masks
    desk.add("a", PROMPT, 24, thinking_token_budget=9, thinking_end_ids=ends)
    desk.finish()
    thought = desk.model.generate(PROMPT, seed=0, max_tokens=9)
    assert desk.tokens("a") == [
        *thought, *ends, *desk.model.generate([*PROMPT, *thought, *ends], seed=0, max_tokens=13),
    ]  # fmt: skip
    drafted = [int(plan.end[0] - plan.drafts[0]) - len(PROMPT) for plan in desk.plans if plan.drafts.any()]
    assert min(drafted) < 9 and max(drafted) > 11
    assert all(not plan.drafts[plan.sample_row[plan.masked]].any() for plan in desk.plans)


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("wrong", [2, 100])
def test_masks_hold_along_drafts(depth, wrong):
    """What is forced is drawn, whatever the drafts were; late masks cost a step, not a token."""
    late = iter([0, 0, 1, 0, 0, 0, 2, *[0] * 99])
    script = Script(forced={n: tokens[:1] for n, tokens in FORCED.items()}, tardy=lambda: next(late))
    script.forced = list  # nothing is given: all is drawn
    desk = desk_with(script, depth=depth, drafts=3, wrong=wrong)
    desk.add("a", PROMPT, 14, structured_outputs=GRAMMAR)
    desk.add("b", [3, 2, 1], 14)
    desk.finish()
    tokens, expected = desk.tokens("a"), []
    for place in range(14):
        drawn = desk.model.generate([*PROMPT, *expected], seed=0, max_tokens=1)[0]
        expected.append(FORCED[place][0] if place in FORCED else drawn)
    assert tokens == expected and desk.right("b")
    masked = [plan.drafts[plan.sample_row[plan.masked]] for plan in desk.plans if len(plan.masked)]
    assert np.concatenate(masked).max() > 0
