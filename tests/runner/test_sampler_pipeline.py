"""The stages together: their order, mixed batches, logprobs, and rows that fail alone."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from runner_support import admission, draw, rows_of, sampler_of

from quire.ops.arguments import BROKEN, GOOD, NOTHING_ALLOWED

INF = float("inf")


def logits_of(rows: int, vocabulary: int = 40, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * 3


def test_greedy_takes_the_first_of_the_largest():
    assert draw(torch.tensor([[0.0, 5.0, 5.0, 1.0]]), admission(temperature=0)).ids.tolist() == [1]


def test_greedy_follows_edits():
    logits = torch.tensor([[0.0, 5.0, 4.0, 1.0]])

    def best(**params):
        return int(draw(logits, admission(tokens=[3, 1], prompt=1, temperature=0, **params)).ids)

    assert best() == 1
    assert best(logit_bias={3: 10}) == 3
    assert best(repetition_penalty=2.0) == 2
    assert best(presence_penalty=1.5) == 2
    assert best(allowed_token_ids=[0, 3]) == 3
    assert best(bad_words=((1,),)) == 2
    assert best(min_tokens=3, stop_ids=(1,)) == 2


def test_bans_come_before_the_bias_and_penalties_after_it():
    logits = torch.tensor([[1.0, 2.0, 3.0]])
    assert draw(logits, admission(temperature=0, allowed_token_ids=[0], logit_bias={1: 100})).ids.tolist() == [0]
    both = admission(tokens=[2], temperature=0, logit_bias={2: 9}, repetition_penalty=2.0, logprobs=0)
    assert draw(logits, both, mode="processed_logits").report.values.tolist() == [[6.0]]  # (3 + 9) / 2, not 3 / 2 + 9


def test_min_p_is_judged_after_temperature():
    """At temperature 1 the second token has 0.37 of the first's probability, at 0.5 it has 0.14."""
    logits = torch.tensor([[1.0, 0.0]])
    drawn = {t: {int(draw(logits, admission(seed=s, temperature=t, min_p=0.3)).ids) for s in range(60)} for t in (1.0, 0.5)}
    assert drawn == {1.0: {0, 1}, 0.5: {0}}


def test_top_p_is_judged_on_what_top_k_left():
    """Half of the mass is on token 0, a quarter on each of two others; of the first two alone, token 0 has two thirds."""
    logits = torch.tensor([[0.5, 0.25, 0.25]]).log() + torch.tensor([[0.0, 1e-3, 0.0]])
    seen = {int(draw(logits, admission(seed=s, top_k=2, top_p=0.6)).ids) for s in range(60)}
    assert seen == {0}
    assert {int(draw(logits, admission(seed=s, top_p=0.6)).ids) for s in range(60)} == {0, 1}


PARAMS = [
    {"temperature": 0},
    {"temperature": 0.6},
    {"top_k": 3},
    {"top_p": 0.7, "temperature": 1.4},
    {"top_k": 9, "top_p": 0.5, "min_p": 0.1},
    {"min_p": 0.4},
    {"temperature": 0, "repetition_penalty": 1.4, "logprobs": 3},
    {"frequency_penalty": 1.0, "presence_penalty": -0.5, "logprobs": 0},
    {"logit_bias": {4: 5.0}, "min_tokens": 9},
    {"allowed_token_ids": [1, 2, 30], "logprob_token_ids": [5, 4]},
]


@settings(max_examples=40, deadline=None)
@given(
    picks=st.lists(st.integers(0, len(PARAMS) - 1), min_size=1, max_size=9),
    mode=st.sampled_from(["raw_logprobs", "processed_logits"]),
)
def test_a_mixed_batch_equals_its_rows_alone(picks, mode):
    rng = np.random.default_rng(len(picks))
    tenants = []
    for slot, pick in enumerate(picks):
        tokens = rng.integers(0, 40, 3 + slot)
        words = ((int(tokens[-1]), 5), (6,))
        tenants.append(admission(slot, tokens, prompt=2, seed=slot * 11, stop_ids=(0, 1), bad_words=words, **PARAMS[pick]))
    logits = logits_of(len(picks), seed=len(picks))
    together = draw(logits, *tenants, mode=mode)
    for i, tenant in enumerate(tenants):
        alone = draw(logits[i : i + 1], tenant, mode=mode)
        assert alone.ids.tolist() == together.ids[i : i + 1].tolist()
        if alone.report is not None:
            where = together.reported.tolist().index(i)
            width = together.widths[where] + 1
            assert together.report.ids[where, :width].tolist() == alone.report.ids[0].tolist()
            torch.testing.assert_close(together.report.values[where, :width], alone.report.values[0])
            assert together.report.rank[where] == alone.report.rank[0]


@pytest.mark.parametrize("broken", [[float("nan"), 1.0, 2.0], [INF, 1.0, 2.0], [-INF, -INF, -INF]])
@pytest.mark.parametrize(
    "params", [{"temperature": 0}, {}, {"top_k": 2, "top_p": 0.9}, {"allowed_token_ids": [1], "min_p": 0.2}]
)
def test_a_broken_row_fails_alone(broken, params):
    logits = torch.tensor([[1.0, 2.0, 9.0], broken, [9.0, 2.0, 1.0]])
    tenants = [admission(0, temperature=0), admission(1, **params), admission(2, temperature=0)]
    drawn = draw(logits, *tenants)
    assert drawn.fault.tolist() == [GOOD, BROKEN, GOOD]
    assert drawn.ids[[0, 2]].tolist() == [2, 0]
    assert 0 <= int(drawn.ids[1]) < 3


def test_nothing_allowed_is_a_fault_of_its_own():
    drawn = draw(logits_of(2, 4), admission(0, allowed_token_ids=[2], bad_words=((2,),)), admission(1))
    assert drawn.fault.tolist() == [NOTHING_ALLOWED, GOOD]


def test_a_new_tenant_inherits_nothing():
    logits = torch.tensor([[0.0, 5.0, 4.0]])
    first = admission(temperature=0, logit_bias={0: 50}, logprobs=2)
    sampler = sampler_of(3, first)
    assert sampler.sample(logits.clone(), rows_of(first)).ids.tolist() == [0]
    second = admission(temperature=0)
    sampler.admit(0, second)
    drawn = sampler.sample(logits.clone(), rows_of(second))
    assert drawn.ids.tolist() == [1] and drawn.report is None


def test_logprobs_of_the_raw_distribution():
    logits = logits_of(1, 30)
    values = torch.log_softmax(logits[0], 0)
    drawn = draw(logits, admission(seed=4, temperature=2.0, top_k=20, repetition_penalty=1.5, logprobs=3))
    chosen, ids = int(drawn.ids), drawn.report.ids[0].tolist()
    assert ids == [chosen, *values.topk(3).indices.tolist()]
    torch.testing.assert_close(drawn.report.values[0], values[ids])
    assert int(drawn.report.rank) == sorted(values.tolist(), reverse=True).index(float(values[chosen])) + 1


@pytest.mark.parametrize(("asked", "width"), [(0, 1), (2, 3), (-1, 31), (99, 31)])
def test_logprobs_count(asked, width):
    drawn = draw(logits_of(1, 30), admission(temperature=0, logprobs=asked))
    assert drawn.report.ids.shape == (1, width) and drawn.report.rank.tolist() == [1]
    if width == 31:
        assert sorted(drawn.report.ids[0, 1:].tolist()) == list(range(30))


def test_named_ids_are_reported_as_named():
    drawn = draw(logits_of(1, 30), admission(temperature=0, logprobs=3, logprob_token_ids=[9, 2, 17]))
    assert drawn.report.ids.tolist() == [[int(drawn.ids), 9, 2, 17]]


@pytest.mark.parametrize("mode", ["raw_logits", "raw_logprobs", "processed_logits", "processed_logprobs"])
def test_logprobs_modes(mode):
    logits = torch.tensor([[1.0, 2.0, 3.0], [3.0, 1.0, 2.0]])
    greedy = admission(0, temperature=0, logit_bias={0: 9.0}, logprobs=-1)
    random = admission(1, temperature=0.5, top_k=2, logprobs=-1)
    drawn = draw(logits, greedy, random, mode=mode)
    expected = {
        "raw": logits,
        "processed": torch.tensor([[10.0, 2.0, 3.0], [6.0, -INF, 4.0]]),
    }[mode.split("_")[0]]
    if mode.endswith("logprobs"):
        expected = expected.log_softmax(1)
    for row in range(2):
        got = dict(zip(drawn.report.ids[row].tolist(), drawn.report.values[row].tolist(), strict=True))
        assert [got[i] for i in range(3)] == pytest.approx(expected[row].tolist())


def test_equals_share_the_better_rank():
    drawn = draw(torch.tensor([[2.0, 2.0, 5.0, 1.0]]), admission(temperature=0, allowed_token_ids=[1], logprobs=0))
    assert drawn.report.rank.tolist() == [2]
