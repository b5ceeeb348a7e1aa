"""Random sampling: Gumbel-max over the tokens that the filters kept, with random numbers that are a pure function.

    key  = mix(seed + (position + 1) · GOLDEN)         one per row
    bits = mix(key + (index + 1) · GOLDEN)             one per token of the vocabulary: the SplitMix64 sequence from `key`

There is no generator state. So a token does not depend on the batch, the slot or the chunking, and a replayed request samples
the same tokens again. The integers are the same on every device.
"""

import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.runner.sampler.filters import largest
from quire.runner.sampler.stage import Columns, Rows
from quire.types.plan import Admission

WORD = 2**64
GOLDEN = 0x9E3779B97F4A7C15
FIRST_FACTOR = 0xBF58476D1CE4E5B9
SECOND_FACTOR = 0x94D049BB133111EB
LARGEST_BELOW_ONE = 1.0 - 2.0**-24
HALF_STEP = 2.0**-54
FEW = 8  # noise is computed only for unfiltered tokens if they are less than 1/FEW of the vocabulary
RARE = 64  # the noise of one in RARE tokens is
LARGE_NOISE = 4.152  # above this; -log(-log(1 - 1/RARE)) is 4.151
ROUNDING = 1e-6  # relative error of a sum of logit and noise
LOWEST = float(np.finfo(np.float32).min)

Logits = npt.NDArray[np.float32]
Words = npt.NDArray[np.uint64]


def as_signed(word: int) -> int:
    """Return the int64 with the same 64 bits, as torch stores them."""
    word %= WORD
    return word - WORD if word >= WORD // 2 else word


def mix(words: Tensor) -> Tensor:
    """Apply SplitMix64's finalizer in place to int64 words of any shape."""
    if words.device.type == "cpu":
        mix_unsigned(words.numpy().view(np.uint64))
        return words
    words ^= _shifted(words, 30)
    words *= as_signed(FIRST_FACTOR)
    words ^= _shifted(words, 27)
    words *= as_signed(SECOND_FACTOR)
    words ^= _shifted(words, 31)
    return words


def mix_unsigned(words: npt.NDArray[np.uint64]) -> None:
    """Apply it to numpy words, whose unsigned loops are faster on a CPU."""
    words ^= words >> np.uint64(30)
    words *= np.uint64(FIRST_FACTOR)
    words ^= words >> np.uint64(27)
    words *= np.uint64(SECOND_FACTOR)
    words ^= words >> np.uint64(31)


def steps(count: int, device: torch.device) -> Tensor:
    """Return [count] int64: the distance of the first indices from their key."""
    return torch.arange(1, count + 1, device=device) * as_signed(GOLDEN)


def row_keys(seeds: Tensor, positions: Tensor) -> Tensor:
    """Return keys [N] int64 for seeds and positions [N] int64 of the tokens to be sampled."""
    return mix(seeds + (positions + 1) * as_signed(GOLDEN))


def random_bits(keys: Tensor, steps: Tensor) -> Tensor:
    """Return 64 random bits for each pair of keys and steps, int64, broadcast against each other."""
    return mix(keys + steps)


def uniform(bits: Tensor) -> Tensor:
    """Return float32 strictly inside (0, 1). Small values keep full precision down to 2**-54: the tail decides samples."""
    return _shifted(bits, 11).to(torch.float32).mul_(2.0**-53).clamp_(HALF_STEP, LARGEST_BELOW_ONE)


def gumbel(keys: Tensor, steps: Tensor) -> Tensor:
    """Return Gumbel noise, float32: argmax(logits + noise) is a sample from softmax(logits)."""
    waiting = uniform(random_bits(keys, steps)).neg_().log1p_().neg_()  # exponential: -log(1 - u)
    return waiting.log_().neg_()


def gumbel_unsigned(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.float32]:
    """Return the noise of random bits for numpy, which starts sooner: for few. It falls as the bits rise."""
    u = (words >> np.uint64(11)).astype(np.float32)
    u *= np.float32(2.0**-53)
    np.clip(u, np.float32(HALF_STEP), np.float32(LARGEST_BELOW_ONE), out=u)
    return -np.log(-np.log1p(-u))


def _shifted(words: Tensor, by: int) -> Tensor:
    """Shift right logically: torch's shift is arithmetic, so copies of the sign are masked off."""
    return (words >> by).bitwise_and_(2 ** (64 - by) - 1)


class GumbelSampling:
    """Sample tokens from filtered logits."""

    def __init__(self, columns: Columns, vocabulary: int) -> None:
        self.seed = columns.make(np.int64, 0)
        self._steps = steps(vocabulary, columns.device)  # [V]

    def admit(self, slot: int, admission: Admission) -> None:
        self.seed[slot] = as_signed(admission.seed)

    def choose(self, logits: Tensor, rows: Rows) -> Tensor:
        """Return token ids [N] int64 for logits [N, V]."""
        keys = row_keys(self.seed.at(rows.slot), rows.end)
        if logits.device.type == "cpu":  # row by row: one fits the processor's cache
            chosen = [self._choose_one(row, key) for row, key in zip(logits.numpy(), keys.numpy().view(np.uint64), strict=True)]
            return torch.tensor(chosen, dtype=torch.int64)
        return largest(gumbel(keys[:, None], self._steps).add_(logits))[1]

    def _choose_one(self, logits: Logits, key: np.uint64) -> int:
        """Return the sampled token. Filtered tokens need no noise."""
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
    """Return the sampled token with few logarithms: the best token with large noise bounds the logit that another one must
    have.
    """
    noisy = np.flatnonzero(bits < np.uint64(WORD // RARE))
    if not len(noisy):
        return _noisiest(logits, bits)
    sums = logits[noisy] + gumbel_unsigned(bits[noisy])
    best = np.argmax(sums)
    reached = float(sums[best])
    if math.isfinite(reached):
        reached = max(reached - LARGE_NOISE - ROUNDING * abs(reached), LOWEST)
    large = logits >= np.float32(reached)
    large[noisy[best]] = True
    index = np.flatnonzero(large)
    return int(index[_noisiest(logits[index], bits[index])])
