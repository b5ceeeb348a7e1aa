"""The steps run before an engine is ready: possible ones, of every shape, and nothing stays behind."""

import numpy as np
import pytest
import torch

from quire.runner.slots import Slots
from quire.runner.warmup import KINDS, LONG, largest_step, warm_up_steps


@pytest.mark.parametrize(("seqs", "tokens", "longest"), [(256, 8192, LONG), (1, 1, 1), (3, 64, 20), (512, 16, 300)])
def test_every_step_is_one_the_engine_could_be_asked_for(seqs, tokens, longest):
    slots = Slots(seqs, longest, 1, 16, torch.device("cpu"))
    for plan in warm_up_steps(seqs, tokens, longest):
        slots.take_in(plan)
        slots.check(plan)
        assert len(plan.slot) <= seqs
        assert plan.tokens <= tokens
        assert plan.end.max(initial=0) <= longest
        slots.advance(plan)
    assert not slots.known.any()


def test_without_a_cache_every_request_is_whole_in_its_step():
    plans = [plan for plan in warm_up_steps(256, 8192, 512, whole=True) if len(plan.slot)]
    assert all((plan.end == plan.count).all() for plan in plans)
    assert max(plan.end.max() for plan in plans) > 100


def test_all_shapes_are_there():
    plans = list(warm_up_steps(256, 8192, LONG))
    single = [plan for plan in plans if len(plan.slot) and (plan.count == 1).all()]
    assert {1, 64, 256} <= {len(plan.slot) for plan in single}
    assert {1, LONG} <= {int(end) for plan in single for end in plan.end}
    assert any(len(plan.slot) > 1 and plan.count.max() > 1 and plan.count.min() == 1 for plan in plans)
    assert {plan.tokens for plan in plans if len(plan.slot) == 1} >= {1, 16, 1024}
    drawn = [admission.params for plan in plans for admission in plan.admitted]
    assert all(params in drawn for params in KINDS)


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize(("seqs", "tokens", "longest"), [(8, 100, 1000), (4, 4096, 100), (1, 50, 50), (16, 8, 3), (3, 11, 4)])
def test_the_largest_step_is_possible(seqs, tokens, longest, drafts):
    plan = largest_step(seqs, tokens, longest, drafts)
    drafts = min(drafts, longest - 1)
    assert plan.count.max() <= longest and (plan.count > plan.drafts).all()
    assert len(plan.slot) == min(seqs, tokens // (1 + drafts))
    assert len(plan.outputs.sample_after) == len(plan.slot) * (1 + drafts)
    assert min(tokens, len(plan.slot) * longest) - len(plan.slot) < plan.tokens <= tokens
    assert np.array_equal(plan.count, plan.end)
