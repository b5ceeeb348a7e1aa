"""Each stage against a plain numpy reference, for one row at a time."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from runner_support import CPU, admission, rows_of

from quire.runner.sampler.edits import Allowed, BadWords, Bias, MinTokens, Penalties
from quire.runner.sampler.filters import MASS_CANDIDATES, MinP, Temperature, Truncation
from quire.runner.sampler.stage import Columns

INF = np.inf
SLOTS = 4


def apply(stage, logits, *admissions):
    """The stage's work on one row of logits per admission; rows where it is not active stay as they are."""
    for a in admissions:
        stage.admit(a.slot, a)
    rows, out = rows_of(*admissions), torch.tensor(np.array(logits, np.float32))
    return (stage.apply(out, rows) if stage.active(rows) else out).numpy()


def test_allowed_forbids_all_others_of_its_row():
    out = apply(Allowed(CPU), [[1, 2, 3, 4], [5, 6, 7, 8]], admission(0, allowed_token_ids=[1, 3]), admission(1))
    assert out.tolist() == [[-INF, 2, -INF, 4], [5, 6, 7, 8]]


def test_bias_is_added_and_strings_are_ids():
    out = apply(Bias(CPU), [[1, 2, 3], [1, 2, 3]], admission(0, logit_bias={"1": 2.5, 2: -100}), admission(1))
    assert out.tolist() == [[1, 4.5, -97], [1, 2, 3]]


@pytest.mark.parametrize(("outputs", "stops"), [(0, True), (2, True), (3, False), (4, False)])
def test_min_tokens_counts_outputs(outputs, stops):
    a = admission(tokens=[1] * (5 + outputs), prompt=5, stop_ids=(0, 2), min_tokens=3)
    out = apply(MinTokens(SLOTS, CPU), [[1, 2, 3]], a)
    assert out.tolist() == [[-INF, 2, -INF] if stops else [1, 2, 3]]


@pytest.mark.parametrize(
    ("tokens", "banned"),
    [
        ([9, 9], {4}),  # the single token always
        ([9, 9, 1], {4, 2}),  # 1 → 2 forbidden after 1
        ([9, 9, 1, 2], {4, 3}),  # 1 2 → 3
        ([9, 9, 2], {4}),
        ([9, 1], {4}),  # the prompt does not begin a word
        ([9, 1, 2], {4}),
        ([9, 9, 1, 2, 1], {4, 2}),
    ],
)
def test_bad_words_forbid_the_last_token(tokens, banned):
    words = ((4,), (1, 2), (1, 2, 3), (8, 2))  # 2 ends two words: one match is enough
    out = apply(BadWords(CPU), np.zeros((2, 10)), admission(0, tokens, prompt=2, bad_words=words), admission(1))
    assert set(np.flatnonzero(out[0] == -INF)) == banned
    assert (out[1] == 0).all()


def penalties_reference(logits, tokens, prompt, repetition, frequency, presence):
    logits = np.array(logits, np.float64)
    for token in set(tokens):
        logits[token] = logits[token] / repetition if logits[token] > 0 else logits[token] * repetition
    for token in set(tokens[prompt:]):
        logits[token] -= frequency * tokens[prompt:].count(token) + presence
    return logits


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_penalties(data):
    rows, expected = [], []
    logits = np.array(data.draw(st.lists(st.lists(st.floats(-9, 9, width=32), min_size=6, max_size=6), min_size=3, max_size=3)))
    for slot in range(3):
        tokens = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=12))
        prompt = data.draw(st.integers(1, len(tokens)))
        repetition = data.draw(st.sampled_from([1.0, 1.3, 0.5]))
        frequency, presence = data.draw(st.sampled_from([(0.0, 0.0), (0.5, 0.0), (0.0, -1.5), (2.0, 0.25)]))
        rows.append(
            admission(
                slot,
                tokens,
                prompt=prompt,
                repetition_penalty=repetition,
                frequency_penalty=frequency,
                presence_penalty=presence,
            )
        )
        expected.append(penalties_reference(logits[slot], tokens, prompt, repetition, frequency, presence))
    np.testing.assert_allclose(apply(Penalties(Columns(SLOTS, CPU), 6), logits, *rows), expected, rtol=1e-5, atol=1e-5)


def test_temperature_divides():
    rows = admission(0, temperature=0.5), admission(1, temperature=1.0)
    out = apply(Temperature(Columns(SLOTS, CPU)), [[1, 2], [1, 2]], *rows)
    assert out.tolist() == [[2, 4], [1, 2]]


@settings(max_examples=60, deadline=None)
@given(logits=st.lists(st.floats(-9, 9, width=32), min_size=5, max_size=5), min_p=st.sampled_from([0.0, 0.05, 0.3, 1.0]))
def test_min_p_keeps_what_is_likely_beside_the_likeliest(logits, min_p):
    out = apply(MinP(Columns(SLOTS, CPU)), [logits], admission(min_p=min_p))[0]
    relative = np.exp(np.array(logits) - max(logits))
    assert out[relative > min_p + 1e-5].tolist() == [x for x, r in zip(logits, relative, strict=True) if r > min_p + 1e-5]
    assert (out[relative < min_p - 1e-5] == -INF).all()
    assert out[np.argmax(logits)] > -INF


def truncation_reference(logits, k, p):
    """Every token at least as good as the k-th; then tokens by falling probability, lower id first, until the mass is p."""
    logits = np.array(logits, np.float64)
    if 0 < k < len(logits):
        logits[logits < np.sort(logits)[-k]] = -INF
    if p < 1:
        probability = np.exp(logits - logits.max())
        probability /= probability.sum()
        order = np.argsort(-logits, kind="stable")
        before = np.cumsum(probability[order]) - probability[order]
        logits[order[(before >= p) & (np.arange(len(order)) > 0)]] = -INF
    return logits


@settings(max_examples=200, deadline=None)
@given(
    logits=st.lists(st.sampled_from([-3.0, -1.25, 0.0, 0.3, 0.5, 1.7, 2.0, 4.0]), min_size=12, max_size=12),
    k=st.sampled_from([-1, 0, 1, 2, 3, 7, 12, 50]),
    p=st.sampled_from([1.0, 0.93, 0.71, 0.42, 0.0011]),
)
def test_truncation_with_ties(logits, k, p):
    out = apply(Truncation(Columns(SLOTS, CPU), 12), [logits], admission(top_k=k, top_p=p))
    np.testing.assert_array_equal(out[0], truncation_reference(logits, k, p).astype(np.float32))


@pytest.mark.parametrize("spread", [0.0, 0.3, 2.0, 8.0])
@pytest.mark.parametrize("levels", [None, 40])
def test_truncation_of_a_large_vocabulary(spread, levels):
    """Flat rows need more than a first look at the largest values; rounded ones have ties at every border."""
    size = 6 * MASS_CANDIDATES
    noise = np.random.default_rng(3).normal(size=(4, size)) * spread
    logits = (np.round(noise * levels) / levels if levels else noise).astype(np.float32)
    params = [{"top_p": 0.9}, {"top_k": 40, "top_p": 0.8}, {"top_k": 5000}, {}]
    out = apply(Truncation(Columns(SLOTS, CPU), size), logits, *(admission(i, **p) for i, p in enumerate(params)))
    for i, p in enumerate(params):
        expected = truncation_reference(logits[i], p.get("top_k", 0), p.get("top_p", 1.0)) > -INF
        differing = np.flatnonzero((out[i] > -INF) != expected)
        assert len(differing) <= 1 if p.get("top_p") else len(differing) == 0  # a sum in float32 may end one token off
        assert (out[i][out[i] > -INF] == logits[i][out[i] > -INF]).all()


@pytest.mark.parametrize(
    "stage",
    [
        Allowed(CPU),
        BadWords(CPU),
        MinTokens(SLOTS, CPU),
        Bias(CPU),
        Penalties(Columns(SLOTS, CPU), 6),
        Temperature(Columns(SLOTS, CPU)),
        MinP(Columns(SLOTS, CPU)),
        Truncation(Columns(SLOTS, CPU), 5),
    ],
    ids=lambda stage: type(stage).__name__,
)
def test_a_stage_forgets_a_tenant_that_left(stage):
    full = admission(
        1, [1, 2], prompt=1, stop_ids=(2,), bad_words=((1,),), min_tokens=4, logit_bias={0: 1.0}, allowed_token_ids=[1],
        presence_penalty=1.0, temperature=0.5, min_p=0.5, top_k=2, top_p=0.5,
    )  # fmt: skip
    stage.admit(1, full)
    assert stage.active(rows_of(full))
    stage.retire(1)
    assert not stage.active(rows_of(full))
