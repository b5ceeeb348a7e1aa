"""`random`: prompts of random tokens, all of one length or spread evenly around it, after a prefix that all share."""

import math

import numpy as np

from quire.bench.datasets.options import DatasetOptions, TokenCounter
from quire.bench.samples import RandomPrompts, Sample


async def samples(options: DatasetOptions, alphabet: RandomPrompts, _: TokenCounter) -> list[Sample]:
    rng = options.rng
    prefix = alphabet.draw(rng, options.random_prefix_len)
    made = []
    for _index in range(options.count):
        length = around(rng, options.random_input_len, options.random_range_ratio, 0 if prefix.size else 1)
        output = around(rng, options.random_output_len, options.random_range_ratio, 1)
        prompt = np.concatenate([prefix, alphabet.draw(rng, length)])
        made.append(Sample(alphabet.write(prompt), output, len(prompt)))
    return made


def around(rng: np.random.Generator, length: int, ratio: float, least: int) -> int:
    """A whole number from length * (1 - ratio) to length * (1 + ratio), all equally likely."""
    low, high = math.floor(length * (1 - ratio)), math.ceil(length * (1 + ratio))
    return max(least, int(rng.integers(low, high, endpoint=True)))
