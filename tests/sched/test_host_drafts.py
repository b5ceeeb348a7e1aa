"""Drafts of the host: what rows they make, what is learnt of them, and when they are not worth their time."""

import itertools

import numpy as np
import pytest
from desk import Desk
from test_constrained import FORCED, GRAMMAR, Script, desk_with

from quire.sched.draft.costs import StepCosts

PROMPT = [1, 2, 3, 4, 5]


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("wrong", [1, 2, 100])
def test_the_same_tokens_in_fewer_steps(depth, wrong):
    plain, desk = Desk(depth=depth), Desk(depth=depth, drafts=3, wrong=wrong, host=True)
    for each in (plain, desk):
        each.add("a", PROMPT, 16, tenant="key", salt=("s",))
        each.add("b", [9, 9], 9, logprobs=1)
        each.finish()
        assert each.right("a", "b")
    if not depth:  # what is in flight cannot be guessed on from
        assert len(desk.plans) <= len(plain.plans) and (wrong == 1 or len(desk.plans) < len(plain.plans))
        assert any(plan.drafts.any() for plan in desk.plans)
    counts = desk.core.stats.drafts
    assert counts.rows == sum(int((plan.drafts > 0).sum()) for plan in desk.plans)
    assert counts.tokens == sum(int(plan.drafts.sum()) for plan in desk.plans) == sum(len(p.draft_token) for p in desk.plans)
    assert counts.accepted == sum(counts.per_position) and (wrong > 1 or not counts.accepted)
    assert sorted(scope for _, scope in desk.finished_texts) == [("",), ("key", "s")]
    accepted = 0
    for news in desk.heard["a"]:  # a stop string may make any of them the last that is heard
        accepted += max(0, len(news.token_ids) - 1)
        assert news.drafts[2] == accepted if news.drafts else len(news.token_ids) < 2
    last = desk.heard["a"][-1]
    assert (last.drafts or (0, 0, 0))[2] == len(desk.tokens("a")) - sum(1 for d in desk.heard["a"] if d.token_ids)


def test_a_stop_inside_what_was_accepted_and_an_abort_between():
    desk = Desk(drafts=3, wrong=100, host=True)
    stop = desk.model.generate(PROMPT, seed=0, max_tokens=4)[2]
    desk.add("a", PROMPT, 12, stop=[stop], hold=True)
    desk.add("b", [7, 7, 7], 12)
    desk.step(2)
    desk.core.abort(["b"])
    desk.finish()
    assert desk.right("a") and desk.tokens("a")[-1] == stop and len(desk.tokens("a")) == 3
    desk.add("c", [*PROMPT, *desk.tokens("a"), 7], 6, fork_of="a")
    desk.finish()
    assert desk.right("c")


def test_preempted_requests_go_on():
    desk = Desk(drafts=3, wrong=3, host=True, pages=9, max_seqs=3)
    for i in range(3):
        desk.add(f"r{i}", [i, i, i, i], 14)
    desk.finish()
    assert desk.right("r0", "r1", "r2") and desk.core.stats.preemptions > 0


@pytest.mark.parametrize("wrong", [2, 100])
def test_masks_hold_along_drafts_and_what_is_forced_is_no_draft(wrong):
    late = iter([0, 0, 1, 0, 0, 0, 2, *[0] * 99])
    script = Script(forced={n: tokens[:1] for n, tokens in FORCED.items()}, tardy=lambda: next(late))
    script.forced = list  # nothing is given: all is drawn
    desk = desk_with(script, drafts=3, wrong=wrong, host=True)
    desk.add("a", PROMPT, 14, structured_outputs=GRAMMAR)
    desk.add("b", [3, 2, 1], 14)
    desk.finish()
    expected = []
    for place in range(14):
        drawn = desk.model.generate([*PROMPT, *expected], seed=0, max_tokens=1)[0]
        expected.append(FORCED[place][0] if place in FORCED else drawn)
    assert desk.tokens("a") == expected and desk.right("b")
    assert np.concatenate([plan.drafts[plan.sample_row[plan.masked]] for plan in desk.plans if len(plan.masked)]).max() > 0
    given = desk_with(Script(forced=FORCED, tardy=lambda: 0), drafts=3, wrong=wrong, host=True)
    given.add("a", PROMPT, 14, structured_outputs=GRAMMAR)
    given.finish()
    assert given.tokens("a") == expected


# ---- how many


class Device:
    """A clock that knows what steps cost: each takes a second, and each of its drafts so much more."""

    def __init__(self, each: float) -> None:
        self.each, self.now, self.desk = each, 0.0, None

    def __call__(self) -> float:
        if self.desk is not None and len(self.desk.plans) > getattr(self, "seen", 0):
            self.seen = len(self.desk.plans)
            self.now += 1.0 + self.each * int(self.desk.plans[-1].drafts.sum())
        return self.now


def play(each, wrong, requests=1, tokens=50, **options):
    device = Device(each)
    desk = device.desk = Desk(
        drafts=3, wrong=wrong, host=True, adaptive=True, clock=device, pages=200, max_seqs=8, budget=64, **options
    )
    for i in range(requests):
        desk.add(f"r{i}", [i, 9, 8, 7], tokens)
    desk.finish()
    assert desk.right(*desk.specs)
    return desk, device


@pytest.mark.parametrize("requests", [1, 6])
def test_drafts_that_are_cheap_and_right_are_run(requests):
    desk, device = play(0.05 / requests, 1000, requests)
    assert device.now < 0.55 * 50
    assert desk.core.stats.drafts.accepted > 20 * requests


@pytest.mark.parametrize(("each", "wrong"), [(0.05, 1), (2.0, 1000), (0.6, 2)])
@pytest.mark.parametrize("requests", [1, 6])
def test_drafts_that_are_wrong_or_dear_cost_next_to_nothing(each, wrong, requests):
    _, device = play(each, wrong, requests)
    assert device.now <= 50 * 1.06  # what it costs to find out, of a run that is short


def test_drafts_are_tried_again_when_they_have_become_cheap():
    device = Device(3.0)
    desk = device.desk = Desk(
        drafts=3, wrong=1000, host=True, adaptive=True, clock=device, pages=400, max_model_len=1500, max_seqs=1
    )
    desk.add("a", PROMPT, 1400)
    for _ in range(30):
        desk.step()
    before = desk.core.stats.drafts.tokens
    assert before > 0
    device.each = 0.05
    while desk.core.has_unfinished:
        desk.step()
    assert desk.right("a") and desk.core.stats.drafts.tokens > before + 40


def test_a_limit_by_the_size_of_the_batch():
    desk = Desk(drafts=3, wrong=100, host=True)
    desk.speculation._largest_batch = 1
    for name, prompt in (("a", PROMPT), ("b", [6, 6])):
        desk.add(name, prompt, 8 if name == "a" else 20)
    desk.finish()
    assert desk.right("a", "b")
    assert all(not plan.drafts.any() or len(plan.slot) == 1 for plan in desk.plans)
    assert any(plan.drafts.any() for plan in desk.plans)
    desk = Desk(drafts=3, wrong=100, host=True)
    desk.speculation._schedule = ((1, 1, 2), (2, 9, 1))
    desk.add("a", PROMPT, 9)
    desk.add("b", [6, 6], 20)
    desk.finish()
    assert {(len(p.slot), int(p.drafts.max())) for p in desk.plans if p.drafts.any()} == {(2, 1), (1, 2), (1, 1)}


def test_costs_are_read_between_what_was_measured():
    costs = StepCosts()
    assert costs.plain(4) is None
    costs.took(4, 0, 1.0)
    assert costs.seconds(4, 3) == pytest.approx(1 + 3 / 7)  # nothing is known but what such devices do
    costs.took(4, 4, 2.0)
    assert [costs.seconds(4, d) for d in (1, 2, 4, 8)] == [1.25, 1.5, 2.0, 3.0]
    costs.took(4, 8, 2.4)
    assert costs.seconds(4, 6) == pytest.approx(2.2)
    costs.took(4, 8, 100.0)
    assert costs.seconds(4, 8) == 2.4  # the least of the first few
    costs.took(4, 16, 100.0)
    assert costs.seconds(4, 16) == pytest.approx(1 + 2 * 16 / 7)  # of which the first is hardly believed
    for _ in itertools.repeat(None, 60):
        costs.took(4, 8, 1.0)
    assert costs.seconds(4, 8) == pytest.approx(1.0, abs=0.01)
    assert costs.seconds(4, 8) <= costs.seconds(4, 9)


@pytest.mark.parametrize("depth", [1, 2])
def test_in_turns_drafts_are_run_while_other_steps_are_in_flight(depth):
    device = Device(0.0)
    desk = device.desk = Desk(
        drafts=3, wrong=5, host=True, adaptive=True, depth=depth, turns=depth + 1, clock=device, pages=200, max_seqs=8
    )
    for i in range(2 * depth + 2):
        desk.add(f"r{i}", [i, 9, 8, 7], 40)
    beside = 0
    while desk.core.has_unfinished:
        ahead = len(desk.core._flights)
        plan = desk.step()
        beside += plan is not None and bool(plan.drafts.any()) and ahead == depth
    assert desk.right(*desk.specs) and beside > 10
    assert all(len(plan.slot) <= 2 for plan in desk.plans[2 * depth + 2 :])


class Overlapped:
    """A clock of a host that plans for a third of a second and a device that runs a step in one, and longer with drafts."""

    def __init__(self, desk: Desk, each: float) -> None:
        self.now = self.free = 0.0
        desk.core._clock, schedule, submit = (lambda: self.now), desk.scheduler.schedule, desk.executor.submit

        def plan(now):
            self.now += 0.3
            return schedule(now)

        def launch(plan):
            flight = submit(plan)
            self.free = landed = max(self.now, self.free) + 1.0 + each * int(plan.drafts.sum())
            result = flight.result

            def wait():
                self.now = max(self.now, landed)
                return result()

            flight.result = wait
            return flight

        desk.scheduler.schedule, desk.executor.submit = plan, launch


@pytest.mark.parametrize(
    ("each", "wrong", "least", "most"), [(0.1, 2, 1.0, 1.05), (0.3, 1000, 1.0, 1.05), (0.004, 1000, 0.2, 0.7)]
)
def test_a_step_ahead_nobody_waits_in_vain(each, wrong, least, most):
    """Of many requests some are looked at; what is expected of all of them has to come true when they are waited for."""
    desk = Desk(drafts=3, wrong=wrong, host=True, adaptive=True, depth=1, pages=400, max_seqs=12, max_model_len=120)
    device = Overlapped(desk, each)
    for i in range(12):
        desk.add(f"r{i}", [i, 9, 8, 7], 100)
    desk.finish()
    assert desk.right(*desk.specs) and least * 100 <= device.now <= most * 100
