"""Replayed steps of a model that pools: the vectors are those of eager steps."""

import random

import numpy as np
import pytest
from recorded_steps import PAGE, recording  # noqa: F401
from tiny import open_model

from quire import PoolingParams

RANDOM = random.Random(5)
PROMPTS = [[RANDOM.randrange(5, 200) for _ in range(count)] for count in (21, 1, 2, 40, 33, 64, 3, 5)]


def vectors(model, kind, **args):
    llm = open_model(
        model, runner="pooling", pooler_config={"pooling_type": kind}, block_size=PAGE, num_gpu_blocks_override=64,
        max_num_seqs=4, **args,
    )  # fmt: skip
    with llm:
        prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        found = [one.outputs.embedding for _ in range(3) for one in llm.embed(prompts, use_tqdm=False)]
        tokens = llm.encode(prompts, PoolingParams(task="token_embed"), use_tqdm=False)
        found += [one.outputs.data.tolist() for one in tokens]
        return found, llm.llm_engine.core.executor._runner.graphs


@pytest.mark.parametrize("args", [{}, {"max_num_batched_tokens": 24}], ids=["whole", "chunks"])
@pytest.mark.parametrize("kind", ["LAST", "MEAN"])
def test_vectors_are_those_of_eager_steps(tiny_model, recording, kind, args):  # noqa: F811
    eager, none = vectors(tiny_model, kind, enforce_eager=True, **args)
    replayed, graphs = vectors(tiny_model, kind, **args)
    assert none is None and graphs.captures and graphs.replays
    for one, other in zip(replayed, eager, strict=True):  # padding changes how a matrix product sums
        np.testing.assert_allclose(one, other, atol=1e-6)
