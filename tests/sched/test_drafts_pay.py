"""As many drafts as pay, on a card in numbers (`card.py`): gains are found in the first run or the second, and where there are
none next to nothing is lost."""

import pytest
from card import Card, Guessing

from quire.sched.draft.ahead import SpeculationAhead
from quire.sched.draft.costs import Prior
from quire.sched.draft.speculation import Speculation

LEAST = 0.99  # of the pace without drafts, whatever they bring


def by_host(most=8, **options):
    return Speculation(Guessing(), most, prior=Prior(150.0, 0.25), **options)


def by_model(most=4, **options):
    return SpeculationAhead(None, most, prior=Prior(150.0, 0.25, 0.225, reading=0.075), **options)


def paces(speculation, requests, rate, runs=2):
    """Of a run after the other by one engine, times the pace without drafts."""
    card = Card(speculation, rate)
    return [Card(None).run(requests) / card.run(requests) for _ in range(runs)]


@pytest.mark.parametrize(
    ("make", "requests", "rate", "most", "part"),
    [
        (by_host, 1, 0.7, 8, 0.9),
        (by_host, 16, 0.7, 4, 0.9),
        (by_host, 64, 0.7, 2, 0.8),  # 0.85 to 1.0, as the dice fall
        (by_model, 1, 0.9, 4, 0.9),
        (by_model, 16, 0.9, 4, 0.9),
    ],
)
def test_what_can_be_won_is_soon(make, requests, rate, most, part):
    [best] = paces(make(most, adaptive=False), requests, rate, runs=1)  # the best of all numbers
    speculation = make()
    first, second = paces(speculation, requests, rate)
    assert first > LEAST and second - 1 >= part * (best - 1) > 0.09
    [next_engine] = paces(make(known=speculation._measured()), requests, rate, runs=1)
    assert next_engine - 1 >= 0.7 * (best - 1)


@pytest.mark.parametrize(
    ("make", "requests", "rate"),
    [(by_host, 1, 0.0), (by_host, 16, 0.3), (by_host, 256, 0.7), (by_model, 1, 0.0), (by_model, 16, 0.0), (by_model, 16, 0.3)],
)
def test_where_nothing_can_be_won_nothing_is_lost(make, requests, rate):
    assert min(paces(make(), requests, rate)) > LEAST


def test_steps_that_recorded_a_graph_say_nothing_of_what_drafts_cost():
    card = Card(by_host(), 0.7, recording=25.0)
    first, second = (Card(None).run(16) / card.run(16) for _ in range(2))
    assert first > 1.2 and second > 1.5  # to record takes a twentieth of the first


def test_drafts_that_have_become_good_are_found_out():
    """A draft model that was never right is tried again, if ever more rarely."""
    card = Card(by_model(), 0.0)
    for _ in range(3):
        card.run(4)
    card.rate, began = 0.9, len(card.steps)
    for _ in range(6):
        card.run(4)
    assert 4 * 256 / (len(card.steps) - began) * 6 > 4 * 1.5  # tokens of a step
