"""Draft tokens that nobody asks for: only the first of several ranks does."""

import numpy as np
import torch

from quire.features.speculation.device.drafter import MAX_COMING, Guessed


def test_draft_tokens_are_not_kept():
    guessed = Guessed(slots=4, most=3)
    for step in range(5 * MAX_COMING):
        guessed.note(np.array([step % 2], np.int32), torch.tensor([[step, step + 1]]))
        assert len(guessed._coming) <= MAX_COMING
    asked = guessed.of(np.array([0, 0, 0, 1, 1]), np.array([0, 1, 2, 0, 1]))
    assert asked.tolist() == [18, 19, -1, 19, 20]  # the latest of each slot
