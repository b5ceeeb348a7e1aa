"""Which drafts were right, and what a step says of draws that went wrong behind them."""

import numpy as np
import pytest
import torch
from runner_support import plan

from quire.ops.arguments import BROKEN, GOOD
from quire.runner.draft.verify import NO_DRAFT, accept
from quire.runner.flight import StepFlight
from quire.runner.sampler.pipeline import Drawn


def lengths(ids, drafts, first, faults=None):
    result = torch.tensor([ids, faults or [GOOD] * len(ids)], dtype=torch.int32)
    return accept(result, torch.tensor(first), torch.tensor(drafts))


@pytest.mark.parametrize("seed", range(20))
def test_leading_drafts_that_were_drawn_are_accepted(seed):
    numbers = np.random.default_rng(seed)
    ids, drafts, first, expected = [], [], [], []
    for _ in range(numbers.integers(1, 6)):
        own = numbers.integers(0, 3, numbers.integers(1, 5)).tolist()
        guessed = numbers.integers(0, 3, len(own) - 1).tolist()
        right = next((i for i, (a, b) in enumerate(zip(own, guessed, strict=False)) if a != b), len(guessed))
        expected.append(right + 1)
        first.append(len(ids))
        ids, drafts = ids + own, [*drafts, *guessed, NO_DRAFT]
    assert lengths(ids, drafts, first).tolist() == expected


def test_a_row_that_fails_behind_a_right_draft_brings_what_came_before():
    step = plan(3, [(0, 3, 3, True, 2), (1, 2, 2, False), (2, 3, 3, True, 2), (3, 1, 1, True)])
    ids = [5, 6, 7, 8, 9, 4, 3]
    faults = [GOOD, BROKEN, GOOD, GOOD, GOOD, BROKEN, GOOD]
    drafts = [5, 6, NO_DRAFT, 1, 9, NO_DRAFT, NO_DRAFT]
    taken = lengths(ids, drafts, [0, 3, 6], faults)
    assert taken.tolist() == [2, 1, 1]
    drawn = Drawn(torch.tensor([ids, faults], dtype=torch.int32), lengths=taken)
    result = StepFlight(step, [], drawn).result()
    assert (result.lengths.tolist(), result.ids.tolist(), list(result.failed)) == ([1, 0, 1, 1], [5, 8, 3], [0])
