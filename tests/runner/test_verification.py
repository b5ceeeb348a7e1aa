"""Which drafts were right, and what a step says of draws that went wrong behind them."""

import numpy as np
import pytest
import torch
from msgspec import structs
from runner_support import plan

from quire.features.speculation.device.part import unroll
from quire.ops.arguments import BROKEN, GOOD
from quire.runner.flight import StepFlight, accept
from quire.runner.sampler.pipeline import Sampled


@pytest.mark.parametrize("seed", range(20))
def test_leading_drafts_that_were_drawn_are_accepted(seed):
    numbers = np.random.default_rng(seed)
    ids, drafts, rows, expected = [], [], [], []
    for _ in range(numbers.integers(1, 6)):
        own = numbers.integers(0, 3, numbers.integers(1, 5)).tolist()
        guessed = numbers.integers(0, 3, len(own) - 1).tolist()
        right = next((i for i, (a, b) in enumerate(zip(own, guessed, strict=False)) if a != b), len(guessed))
        expected.append(right + 1)
        rows.append((len(rows), len(own), len(own), True, len(guessed)))
        ids, drafts = ids + own, drafts + guessed
    assert accept(plan(0, rows), np.array(ids), np.full(len(ids), GOOD), np.array(drafts)).tolist() == expected


def test_a_row_with_drafts_as_rows_of_one_token():
    step = plan(0, [(4, 3, 9, True, 2), (1, 5, 5, False), (0, 1, 7, True), (2, 6, 6, True, 1)])
    unrolled, owner = unroll(step)
    assert owner.tolist() == [0, 0, 0, 1, 2, 3, 3]
    assert unrolled.slot.tolist() == [4, 4, 4, 1, 0, 2, 2] and unrolled.end.tolist() == [7, 8, 9, 5, 7, 5, 6]
    assert unrolled.count.tolist() == [1, 1, 1, 5, 1, 5, 1] and not unrolled.drafts.any()
    assert unrolled.outputs.sample_after.tolist() == step.outputs.sample_after.tolist()
    assert unrolled.sample_row.tolist() == [0, 1, 2, 4, 5, 6]


def test_a_row_that_fails_behind_a_right_draft_brings_what_came_before():
    step = plan(3, [(0, 3, 3, True, 2), (1, 2, 2, False), (2, 3, 3, True, 2), (3, 1, 1, True)])
    ids = [5, 6, 7, 8, 9, 4, 3]
    faults = [GOOD, BROKEN, GOOD, GOOD, GOOD, BROKEN, GOOD]
    step = structs.replace(step, draft_token=np.array([5, 6, 1, 9], np.int32))
    assert accept(step, np.array(ids), np.array(faults), step.draft_token).tolist() == [2, 1, 1]
    result = StepFlight(step, [], Sampled(torch.tensor([ids, faults], dtype=torch.int32))).result()
    assert (result.lengths.tolist(), result.ids.tolist(), list(result.failed)) == ([1, 0, 1, 1], [5, 8, 3], [0])
