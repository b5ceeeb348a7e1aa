"""The draws' random numbers: exact integers, sound statistics, and no dependence on anything but seed, position and index."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from runner_support import CPU, admission, draw

from quire.runner.sampler import gumbel
from quire.runner.sampler.gumbel import bits_of, noisiest_of_many

WORD = 2**64


def mix_reference(word: int) -> int:
    word %= WORD
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) % WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) % WORD
    return word ^ (word >> 31)


def bits_reference(seed: int, position: int, index: int) -> int:
    golden = 0x9E3779B97F4A7C15
    return mix_reference(mix_reference(seed + (position + 1) * golden) + (index + 1) * golden)


def mix_on_device(words: torch.Tensor) -> torch.Tensor:
    """What `mix` does where numpy cannot be used."""
    for shift, factor in ((30, gumbel.FIRST_FACTOR), (27, gumbel.SECOND_FACTOR), (31, 1)):
        words = (words ^ gumbel._shifted(words, shift)) * gumbel.as_signed(factor)
    return words


@given(seed=st.integers(-(2**63), WORD - 1), position=st.integers(0, 2**31), index=st.integers(0, 300_000))
def test_bits_are_those_of_big_integers(seed, position, index):
    keys = gumbel.row_keys(torch.tensor([gumbel.as_signed(seed)]), torch.tensor([position]))
    step = gumbel.steps(1, CPU) * (index + 1)
    bits = gumbel.random_bits(keys, step)
    assert int(bits) % WORD == bits_reference(seed, position, index)
    expected = min(max(np.float32((int(bits) % WORD) >> 11) * np.float32(2.0**-53), np.float32(2.0**-54)), 1 - 2.0**-24)
    assert float(gumbel.uniform(bits)) == float(expected)


def test_signed_and_unsigned_arithmetic_agree():
    words = torch.tensor([0, 1, -1, 2**63 - 1, -(2**63), 0x0123456789ABCDEF, -(2**40)])
    assert mix_on_device(words.clone()).tolist() == gumbel.mix(words.clone()).tolist()


def test_extreme_bits_give_finite_noise():
    u = gumbel.uniform(torch.tensor([0, -1, 1, -(2**63)]))
    assert (u > 0).all() and (u < 1).all()
    assert torch.log(-torch.log1p(-u)).isfinite().all()


@pytest.mark.parametrize("params", [{}, {"temperature": 0.7}, {"temperature": 1.7}])
def test_draws_follow_the_distribution(params):
    """Chi-square with 7 degrees of freedom; its 0.999 quantile is 24.3."""
    logits, draws = torch.tensor([[2.0, 1.5, 0.0, -1.0, 1.0, 0.5, 2.5, -0.5]]), 4000
    ids = draw(logits.expand(draws, -1), *(admission(seed, seed=seed, **params) for seed in range(draws))).ids
    expected = torch.softmax(logits[0] / params.get("temperature", 1.0), 0) * draws
    observed = torch.bincount(ids, minlength=8)
    assert float(((observed - expected) ** 2 / expected).sum()) < 24.3


def test_positions_draw_independently():
    """One seed along a sequence: the draws and the pairs of neighbours are uniform."""
    draws = 2000
    ids = draw(torch.zeros(draws, 4), *(admission(n, [1] * (n + 1), seed=5) for n in range(draws))).ids.tolist()
    pairs = np.bincount([4 * a + b for a, b in itertools.pairwise(ids)], minlength=16)
    assert ((pairs - draws / 16) ** 2 / (draws / 16)).sum() < 37.7  # 15 degrees of freedom, 0.999


def test_noise_has_the_moments_of_a_gumbel():
    keys = gumbel.row_keys(torch.arange(20), torch.arange(20))
    noise = gumbel.gumbel(keys[:, None], gumbel.steps(10_000, CPU))
    assert float(noise.mean()) == pytest.approx(np.euler_gamma, abs=0.01)
    assert float(noise.std()) == pytest.approx(math.pi / math.sqrt(6), abs=0.01)


def test_a_draw_depends_on_seed_and_position_alone():
    logits = torch.randn(1, 500, generator=torch.Generator().manual_seed(1))
    alone = [int(draw(logits, admission(tokens=[3] * 9, seed=s)).ids) for s in range(8)]
    crowd = [admission(slot=7 - s, tokens=[4] * 9, prompt=2, seed=s) for s in range(8)]
    assert draw(logits.expand(8, -1), *crowd).ids.tolist() == alone
    assert len(set(alone)) > 3
    moved = [int(draw(logits, admission(tokens=[3] * 10, seed=s)).ids) for s in range(8)]
    assert moved != alone


def test_few_candidates_draw_the_same_as_all_with_the_rest_at_minus_infinity():
    """Noise is made for the tokens left alone when they are few: the token must not change."""
    logits = torch.randn(1, 400, generator=torch.Generator().manual_seed(2))
    kept = logits.topk(10).values[0, -1]
    noise = gumbel.gumbel(gumbel.row_keys(torch.tensor([9]), torch.tensor([3])), gumbel.steps(400, CPU))
    expected = torch.where(logits >= kept, logits + noise, -torch.inf).argmax(1)
    assert draw(logits, admission(seed=9, top_k=10)).ids.tolist() == expected.tolist()


@pytest.mark.parametrize("scale", [0.0, 0.01, 1.0, 20.0, 1e4, 1e30])
def test_who_is_worth_a_logarithm_decides_nothing(scale):
    """Of many tokens only those are looked at closely that can win: the draw is that of all of them."""
    numbers = np.random.default_rng(3)
    for seed in range(40):
        logits = (numbers.standard_normal(int(numbers.integers(1, 6000))) * scale).astype(np.float32)
        odd = numbers.integers(len(logits), size=len(logits) // 3 if seed % 4 else 0)
        logits[odd] = (np.finfo(np.float32).min, -np.inf, np.inf)[seed % 3]
        bits = bits_of(np.uint64(seed), gumbel.steps(len(logits), CPU).numpy().view(np.uint64))
        assert noisiest_of_many(logits, bits) == int(np.argmax(logits + gumbel.gumbel_unsigned(bits)))


def test_noise_is_the_same_for_one_and_for_many():
    keys, steps = gumbel.row_keys(torch.tensor([7]), torch.tensor([1])), gumbel.steps(5000, CPU)
    few = gumbel.gumbel_unsigned(gumbel.random_bits(keys, steps).numpy().view(np.uint64))
    assert gumbel.gumbel(keys, steps).numpy() == pytest.approx(few, rel=1e-6, abs=1e-6)
