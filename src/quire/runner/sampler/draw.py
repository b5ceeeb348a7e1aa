"""The random draw: Gumbel-max over the tokens that the filters kept."""

import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.runner.sampler.filters import largest
from quire.runner.sampler.random import WORD, as_signed, gumbel, gumbel_unsigned, mix_unsigned, row_keys, steps
from quire.runner.sampler.stage import Columns, Rows
from quire.types.plan import Admission

FEW = 8  # noise is computed only for kept tokens if they are less than 1/FEW of the vocabulary
RARE = 64  # one in RARE tokens is loud: its noise is
LOUD = 4.152  # above this; -log(-log(1 - 1/RARE)) is 4.151
ROUNDING = 1e-6  # relative error of a sum of logit and noise
LOWEST = float(np.finfo(np.float32).min)

Logits = npt.NDArray[np.float32]
Words = npt.NDArray[np.uint64]


class Draw:
    def __init__(self, columns: Columns, vocabulary: int) -> None:
        self.seed = columns.make(np.int64, 0)
        self._steps = steps(vocabulary, columns.device)  # [V]

    def admit(self, slot: int, admission: Admission) -> None:
        self.seed[slot] = as_signed(admission.seed)

    def choose(self, logits: Tensor, rows: Rows) -> Tensor:
        """logits [N, V] -> ids [N] int64."""
        keys = row_keys(self.seed.at(rows.slot), rows.end)
        if logits.device.type == "cpu":  # row by row: one fits the processor's cache
            chosen = [self._choose_one(row, key) for row, key in zip(logits.numpy(), keys.numpy().view(np.uint64), strict=True)]
            return torch.tensor(chosen, dtype=torch.int64)
        return largest(gumbel(keys[:, None], self._steps).add_(logits))[1]

    def _choose_one(self, logits: Logits, key: np.uint64) -> int:
        """Return the drawn token. Filtered tokens need no noise."""
        steps = self._steps.numpy().view(np.uint64)
        left = logits > -np.inf
        if np.count_nonzero(left) * FEW > len(logits):
            return noisiest_of_many(logits, bits_of(key, steps))
        kept = np.flatnonzero(left)
        return int(kept[_noisiest(logits[kept], bits_of(key, steps[kept]))]) if len(kept) else 0


def bits_of(key: np.uint64, steps: Words) -> Words:
    """Return a row's random bits."""
    bits = steps + key
    mix_unsigned(bits)
    return bits


def _noisiest(logits: Logits, bits: Words) -> int:
    """Return the index of the largest sum of logit and noise. logits, bits: [C]."""
    return int(np.argmax(logits + gumbel_unsigned(bits)))


def noisiest_of_many(logits: Logits, bits: Words) -> int:
    """Compute logarithms for few tokens: the best loud token bounds the logit that another one must have."""
    loud = np.flatnonzero(bits < np.uint64(WORD // RARE))
    if not len(loud):
        return _noisiest(logits, bits)
    sums = logits[loud] + gumbel_unsigned(bits[loud])
    best = np.argmax(sums)
    reached = float(sums[best])
    if math.isfinite(reached):
        reached = max(reached - LOUD - ROUNDING * abs(reached), LOWEST)
    large = logits >= np.float32(reached)
    large[loud[best]] = True
    places = np.flatnonzero(large)
    return int(places[_noisiest(logits[places], bits[places])])
