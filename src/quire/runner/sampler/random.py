"""Random numbers as a pure function of (seed, position, vocabulary index).

    key  = mix(seed + (position + 1) · GOLDEN)         one per row
    bits = mix(key + (index + 1) · GOLDEN)             one per candidate: the SplitMix64 sequence that starts at `key`

There is no generator state, so a token does not depend on the batch, the slot or the chunking it was drawn in, and a
replayed request draws the same tokens again. The integers are the same on every device; 64-bit words are held as signed
int64, where additions and products wrap and a logical shift is an arithmetic one with the sign's copies masked off.
"""

from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

WORD = 2**64
LARGEST_BELOW_ONE = 1.0 - 2.0**-24
HALF_STEP = 2.0**-54

Words = TypeVar("Words", npt.NDArray[np.int64], Tensor)


def as_signed(word: int) -> int:
    """The int64 with the same 64 bits."""
    word %= WORD
    return word - WORD if word >= WORD // 2 else word


GOLDEN = as_signed(0x9E3779B97F4A7C15)
FIRST_FACTOR = as_signed(0xBF58476D1CE4E5B9)
SECOND_FACTOR = as_signed(0x94D049BB133111EB)


def mix(words: Words) -> Words:
    """SplitMix64's finalizer, in place."""
    words ^= _shifted(words, 30)
    words *= FIRST_FACTOR
    words ^= _shifted(words, 27)
    words *= SECOND_FACTOR
    words ^= _shifted(words, 31)
    return words


def row_keys(seeds: Tensor, positions: Tensor) -> Tensor:
    """seeds, positions [N] int64 -> keys [N] int64. `positions` are those of the tokens to be drawn."""
    return mix(seeds + (positions + 1) * GOLDEN)


def random_bits(keys: Tensor, index: Tensor) -> Tensor:
    """keys and index int64, broadcast against each other -> 64 random bits for each pair."""
    words = keys + (index + 1) * GOLDEN
    if words.device.type == "cpu":
        mix(words.numpy())  # the same memory; numpy's integer loops are the faster ones
    else:
        mix(words)
    return words


def uniform(bits: Tensor) -> Tensor:
    """float32 strictly inside (0, 1). Small values keep their full precision down to 2**-54: the tail that decides draws."""
    return _shifted(bits, 11).to(torch.float32).mul_(2.0**-53).clamp_(HALF_STEP, LARGEST_BELOW_ONE)


def gumbel(keys: Tensor, index: Tensor) -> Tensor:
    """Gumbel noise, float32: argmax(logits + noise) is a draw from softmax(logits)."""
    waiting = uniform(random_bits(keys, index)).neg_().log1p_().neg_()  # exponential: -log(1 - u)
    return waiting.log_().neg_()


def _shifted(words: Words, by: int) -> Words:
    shifted: Words = (words >> by) & (2 ** (64 - by) - 1)
    return shifted
