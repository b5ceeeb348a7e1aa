"""A step that is like the one before is planned in a shorter way, to the same plan."""

import random

import pytest
from desk import Desk
from msgspec import structs

from quire.sched import scheduler
from quire.sched.repeat import steady_decode


def run(seed, choices, depth):
    """Requests that come and go; every plan, as numbers."""
    dice = random.Random(seed)
    desk = Desk(
        choices["windows"], depth=depth, drafts=3, wrong=choices["wrong"], host=True, pages=choices["pages"], max_seqs=3,
        budget=choices["budget"], adaptive=choices["adaptive"],
    )  # fmt: skip
    names = [f"r{i}" for i in range(6)]
    for i, name in enumerate(names):
        stop = [dice.randrange(50)] if dice.random() < 0.3 else []
        desk.add(name, [dice.randrange(50) for _ in range(dice.randint(1, 6))], dice.randint(1, 24), stop=stop)
        desk.step(dice.choice([0, 1, 7]))
        if dice.random() < 0.2:
            desk.core.abort([names[dice.randrange(i + 1)]])
    desk.finish()
    desk.scheduler.roster.check()
    return [numbers(plan) for plan in desk.plans], {name: desk.tokens(name) for name in names}


def numbers(plan):
    told = {name: value.tolist() for name, value in structs.asdict(plan).items() if hasattr(value, "tolist")}
    shapes = [plan.count.tolist(), plan.drafts.tolist(), plan.outputs.sample_after.tolist()]
    return plan.step, [admission.slot for admission in plan.admitted], shapes, told


@pytest.mark.parametrize("depth", [0, 1])
def test_the_same_plans(monkeypatch, depth):
    repeated = 0

    def counted(*given):
        nonlocal repeated
        found = steady_decode(*given)
        repeated += found is not None
        return found

    for seed in range(8):
        dice = random.Random(seed)
        choices = {
            "windows": dice.choice([(None,), (None, 6)]), "wrong": dice.choice([1, 2, 3, 100]), "pages": dice.choice([14, 40]),
            "budget": dice.choice([3, 8, 64]), "adaptive": dice.random() < 0.3,
        }  # fmt: skip
        monkeypatch.setattr(scheduler, "steady_decode", counted)
        short = run(seed, choices, depth)
        monkeypatch.setattr(scheduler, "steady_decode", lambda *_: None)
        assert short == run(seed, choices, depth)
    assert repeated > 8
