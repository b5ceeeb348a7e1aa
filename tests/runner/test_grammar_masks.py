"""Masks of bits on logits."""

import numpy as np
import pytest
import torch

from quire.runner.sampler.edits import Masks, forbid


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("vocabulary", [7, 32, 100])
def test_only_what_a_mask_allows_is_left(device, vocabulary):
    dice = np.random.default_rng(vocabulary)
    allowed = dice.random((2, vocabulary)) < 0.5
    words = -(-vocabulary // 32)
    padded = np.zeros((2, 32 * words), np.bool_)
    padded[:, :vocabulary] = allowed
    bits = np.packbits(padded, axis=1, bitorder="little").view(np.uint32)
    logits = torch.from_numpy(dice.normal(size=(4, vocabulary)).astype(np.float32)).to(device)
    expected = logits.clone()
    expected[[1, 3]] = expected[[1, 3]].masked_fill(~torch.from_numpy(allowed).to(device), -torch.inf)
    assert torch.equal(forbid(logits, Masks(np.array([1, 3]), bits)), expected)
