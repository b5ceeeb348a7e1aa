"""Drafters with weights: how many guesses they are asked for, by what these cost and bring."""

import pytest
from desk import Desk

from quire.sched.draft.ahead import SpeculationAhead
from quire.sched.draft.costs import Prior

PROMPT = [1, 2, 3, 4, 5]


class Companion:
    """Asked here for all texts together; every `wrong`th of its tokens is."""

    def __init__(self, desk: Desk) -> None:
        self.desk, self.asked, self.left, self.closed, self.read = desk, [], [], False, {}
        self.fresh = 0  # tokens that it had not read

    def propose_all(self, texts, most):
        self.asked.append((len(texts), most))
        for name, text in texts.items():
            self.fresh += max(0, len(text.tokens) - self.read.get(name, 0) - most - 1)
            self.read[name] = len(text.tokens)
        return {name: self.desk.guess(text.tokens.tolist(), self.desk.specs[name].seed, most) for name, text in texts.items()}

    def leave(self, name):
        self.left.append(name)

    def idle(self):
        return False

    def close(self):
        self.closed = True


class Device:
    """A clock: a step takes a second and so much more for each draft, and so does each guess behind a row, and each token of a
    text that is read before."""

    reading = 0.0

    def __init__(self, each: float, guess: float) -> None:
        self.each, self.guess, self.now, self.desk, self.seen, self.guessed = each, guess, 0.0, None, 0, 0

    def __call__(self) -> float:
        if self.desk is not None:
            for plan in self.desk.plans[self.seen :]:
                self.now += 1.0 + self.each * int(plan.drafts.sum())
            self.seen = len(self.desk.plans)
            asked = self.desk.companion.asked
            self.now += self.guess * sum(texts * most for texts, most in asked[self.guessed :])
            self.now += self.reading * self.desk.companion.fresh
            self.guessed, self.desk.companion.fresh = len(asked), 0
        return self.now


def play(each=0.05, guess=0.02, wrong=1000, requests=1, tokens=50, adaptive=True, known=None, **options):
    device = Device(each, guess)
    desk = Desk(clock=device, **{"pages": 2000, "max_seqs": 8, "budget": 64, "max_model_len": 1000, "wrong": wrong, **options})
    companion = desk.companion = Companion(desk)
    desk.scheduler.speculation = SpeculationAhead(
        companion, 3, adaptive=adaptive, known=known, prior=Prior(ridge=20.0, guess=0.02, each=0.02)
    )
    desk.scheduler.roster.on_leave.append(desk.scheduler.speculation.forget)
    device.desk = desk
    for i in range(requests):
        desk.add(f"r{i}", [i, 9, 8, 7], tokens)
    while desk.core.has_unfinished:
        desk.step()
    assert desk.right(*desk.specs) and sorted(companion.left) == sorted(desk.specs)
    return desk, device


@pytest.mark.parametrize("wrong", [1, 3, 1000])
def test_the_same_tokens_whatever_is_guessed(wrong):
    desk, _ = play(wrong=wrong, requests=3, tokens=14, adaptive=False, pages=9, max_seqs=3)
    assert desk.core.stats.preemptions > 0 and any(texts > 1 for texts, _ in desk.companion.asked)
    counts = desk.core.stats.drafts
    assert (counts.accepted == 0) == (wrong == 1) and counts.tokens > 9
    desk.core.stop()
    assert desk.companion.closed


@pytest.mark.parametrize("requests", [1, 6])
def test_guesses_that_are_cheap_and_right_are_asked_for(requests):
    """At first they are tried, when that is a small part of the time; whoever has learnt what they cost and bring does not."""
    cheap = {"each": 0.05 / requests, "guess": 0.02 / requests, "requests": requests}
    desk, device = play(tokens=800, **cheap)
    assert device.now < 0.8 * 800 and desk.core.stats.drafts.accepted > 300 * requests
    known = desk.scheduler.speculation._measured()
    desk, device = play(known=known, **cheap)
    assert device.now < 0.5 * 50 and desk.core.stats.drafts.accepted > 20 * requests


@pytest.mark.parametrize(("guess", "wrong"), [(0.02, 1), (3.0, 1000), (1.0, 2)])
def test_guesses_that_are_wrong_or_dear_are_not(guess, wrong):
    """A few are asked for, to find out; then hardly any. At first that may lose as much as a hundredth of 256 steps, and what
    a step takes that was expected to be far quicker (twice; these are 30 and 80 times as long); later next to nothing."""
    for tokens, most in ((40, 2.56 if guess < 1 else 5), (900, 9)):
        desk, device = play(guess=guess, wrong=wrong, tokens=tokens)
        assert device.now <= tokens + most
    assert 0 < len(desk.companion.asked) < 30


def test_they_are_tried_again_and_a_step_without_is_measured():
    desk, device = play(guess=3.0, tokens=8)
    device.guess, before = 0.02, len(desk.companion.asked)
    desk.add("late", PROMPT, 600)
    while desk.core.has_unfinished:
        desk.step()
    assert desk.right("late") and len(desk.companion.asked) > before + 20
    desk, _ = play(tokens=1400, max_model_len=1500)
    assert any(not plan.drafts.any() and not plan.next_drafts for plan in desk.plans[-100:])


@pytest.mark.parametrize("reading", [0.0, 0.3])
def test_a_text_is_read_only_if_there_is_enough_to_come(reading):
    """Long prompts, short answers, one after the other: found out with the first of them."""
    desk, device = play(tokens=900)
    device.reading, began, asked = reading, device.now, len(desk.companion.asked)
    for i in range(8):
        desk.add(f"long {i}", [i, *range(40), *range(40), *range(40)], 20)
        desk.finish()
        assert desk.right(f"long {i}")
    often = len(desk.companion.asked) - asked
    assert (often > 35) if not reading else (often < 12 and device.now - began < 8 * 22 + 45)
