"""Random numbers as a pure function of (seed, position, vocabulary index).

    key  = mix(seed + (position + 1) · GOLDEN)         one per row
    bits = mix(key + (index + 1) · GOLDEN)             one per candidate: the SplitMix64 sequence that starts at `key`

There is no generator state, so a token does not depend on the batch, the slot or the chunking it was drawn in, and a
replayed request draws the same tokens again. The integers are the same on every device.
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

WORD = 2**64
GOLDEN = 0x9E3779B97F4A7C15
FIRST_FACTOR = 0xBF58476D1CE4E5B9
SECOND_FACTOR = 0x94D049BB133111EB
LARGEST_BELOW_ONE = 1.0 - 2.0**-24
HALF_STEP = 2.0**-54


def as_signed(word: int) -> int:
    """The int64 with the same 64 bits: how torch holds them."""
    word %= WORD
    return word - WORD if word >= WORD // 2 else word


def mix(words: Tensor) -> Tensor:
    """SplitMix64's finalizer, in place, on int64 words of any shape."""
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
    """The same for numpy, whose unsigned loops are the faster ones on a CPU."""
    words ^= words >> np.uint64(30)
    words *= np.uint64(FIRST_FACTOR)
    words ^= words >> np.uint64(27)
    words *= np.uint64(SECOND_FACTOR)
    words ^= words >> np.uint64(31)


def steps(count: int, device: torch.device) -> Tensor:
    """[count] int64: how far each of the first indices is from its key."""
    return torch.arange(1, count + 1, device=device) * as_signed(GOLDEN)


def row_keys(seeds: Tensor, positions: Tensor) -> Tensor:
    """seeds, positions [N] int64 -> keys [N] int64. `positions` are those of the tokens to be drawn."""
    return mix(seeds + (positions + 1) * as_signed(GOLDEN))


def random_bits(keys: Tensor, steps: Tensor) -> Tensor:
    """keys and steps int64, broadcast against each other -> 64 random bits for each pair."""
    return mix(keys + steps)


def uniform(bits: Tensor) -> Tensor:
    """float32 strictly inside (0, 1). Small values keep their full precision down to 2**-54: the tail that decides draws."""
    return _shifted(bits, 11).to(torch.float32).mul_(2.0**-53).clamp_(HALF_STEP, LARGEST_BELOW_ONE)


def gumbel(keys: Tensor, steps: Tensor) -> Tensor:
    """Gumbel noise, float32: argmax(logits + noise) is a draw from softmax(logits)."""
    waiting = uniform(random_bits(keys, steps)).neg_().log1p_().neg_()  # exponential: -log(1 - u)
    return waiting.log_().neg_()


def gumbel_unsigned(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.float32]:
    """The same of random bits for numpy, which begins sooner: for a few. It falls as they rise."""
    u = (words >> np.uint64(11)).astype(np.float32)
    u *= np.float32(2.0**-53)
    np.clip(u, np.float32(HALF_STEP), np.float32(LARGEST_BELOW_ONE), out=u)
    return -np.log(-np.log1p(-u))


def _shifted(words: Tensor, by: int) -> Tensor:
    """A logical shift to the right: torch's is arithmetic, so the copies of the sign are masked off."""
    return (words >> by).bitwise_and_(2 ** (64 - by) - 1)
