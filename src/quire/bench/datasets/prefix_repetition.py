"""`prefix_repetition`: a few prefixes, each shared by many prompts that end differently. It shows a prefix cache's worth."""

import numpy as np

from quire.bench.datasets.options import DatasetOptions, TokenCounter
from quire.bench.samples import RandomPrompts, Sample


async def samples(options: DatasetOptions, alphabet: RandomPrompts, _: TokenCounter) -> list[Sample]:
    rng = options.rng
    prefixes = [
        alphabet.draw(rng, options.prefix_repetition_prefix_len) for _index in range(options.prefix_repetition_num_prefixes)
    ]
    made = []
    for index in range(options.count):
        prompt = np.concatenate([prefixes[index % len(prefixes)], alphabet.draw(rng, options.prefix_repetition_suffix_len)])
        made.append(Sample(alphabet.write(prompt), options.prefix_repetition_output_len, len(prompt)))
    return [made[index] for index in rng.permutation(len(made))] if options.shuffle else made
