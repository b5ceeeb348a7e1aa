"""Random conversations in which pictures repeat and change order: no answer comes from another picture's cache entry.

QUIRE_MATRIX=all runs 1,000 of them.
"""

import random

import numpy as np
import pytest
from random_conversations import ASK, TOLERANCE, Conversation, Oracle, conversations, engine, pictures, run

import selection

COUNT = 1000 if selection.ALL else 150
# pages for about two conversations, parts of pictures in a step, an encoder cache of a few pictures or of one
WAYS = {
    "chunks and preemption": {
        "block_size": 8, "num_gpu_blocks_override": 26, "max_num_batched_tokens": 40, "mm_encoder_cache_size": 64,
        "max_num_seqs": 6,
    },
    "an encoder cache of one picture": {
        "block_size": 4, "num_gpu_blocks_override": 70, "max_num_batched_tokens": 48, "long_prefill_token_threshold": 7,
        "mm_encoder_cache_size": 16, "max_num_seqs": 5, "mm_processor_cache_gb": 0.0001,
    },
    "one step each": {"block_size": 16, "max_num_batched_tokens": 512, "enable_chunked_prefill": False, "max_num_seqs": 8},
}  # fmt: skip


pytestmark = pytest.mark.usefixtures("processed_here")


@pytest.fixture(scope="module")
def oracle():
    return Oracle()


@pytest.mark.parametrize("way", WAYS)
def test_every_answer_is_that_of_its_own_pictures(way, oracle):
    rng = random.Random(way)
    asked = conversations(-(-COUNT // len(WAYS)), rng)
    with engine(**WAYS[way]) as llm:
        answers = run(llm, asked, rng, together=8)
        stats = llm.llm_engine.core.stats
    assert max(oracle.difference(one, answer) for one, answer in zip(asked, answers, strict=True)) < TOLERANCE
    shown = {name for one in asked for name in one.names}
    assert stats.hits and stats.encoder.hits  # of the prefix cache, and of the encoder cache
    if way != "one step each":
        assert stats.preemptions and stats.encoder.encoded > len(shown)


def test_an_altered_pixel_changes_the_answer(oracle):
    """Or else the test above could not notice a mistaken picture."""
    for name in (each for each in pictures() if each.endswith("'")):
        one, other = Conversation((name, ASK)), Conversation((name[:-1], ASK))
        assert np.abs(oracle.logprobs(one, []) - oracle.logprobs(other, [])).max() > 10 * TOLERANCE
