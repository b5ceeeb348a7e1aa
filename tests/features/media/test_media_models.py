"""Every family that reads images or videos, through `LLM`: transformers' greedy tokens and logits, however prompts are run."""

import functools

import pytest
import torch
from media_models import MODELS, NEW_TOKENS, MediaCase

from quire import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=-1)
PAGE = 4

pytestmark = pytest.mark.usefixtures("processed_here")


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    return functools.cache(lambda name: MediaCase(name, tmp_path_factory.mktemp(name)))


def engine(case, **options):
    defaults = {
        "dtype": "float32", "device": "cpu", "block_size": PAGE, "max_num_seqs": 8, "kv_cache_memory_bytes": 16 << 20,
        "max_model_len": 1024, "max_logprobs": -1,
    }  # fmt: skip
    if "num_gpu_blocks_override" in options:
        del defaults["kv_cache_memory_bytes"]
    return LLM(str(case.directory), **defaults | options)


def check(case, outputs, asked):
    """Compare tokens and log-probabilities with those of transformers."""
    for output, parts in zip(outputs, asked, strict=True):
        tokens, logprobs = case.answer(output.prompt_token_ids, parts)
        [found] = output.outputs
        first = torch.tensor([found.logprobs[0][token].logprob for token in range(logprobs.shape[1])])
        assert (first - logprobs[0]).abs().max() < 1e-4, asked.index(parts)
        assert found.token_ids == tokens, asked.index(parts)
        every = torch.tensor([[step[token].logprob for token in range(logprobs.shape[1])] for step in found.logprobs])
        assert (every - logprobs).abs().max() < 1e-4


@pytest.mark.parametrize("name", MODELS)
def test_batched_and_cached(case, name):
    row = case(name)
    asked = row.prompts
    with engine(row) as llm:
        for _ in range(2):
            outputs = llm.generate([row.prompt(parts) for parts in asked], GREEDY, use_tqdm=False)
            check(row, outputs, asked)
        shared = row.family.bidirectional != "prompt"  # else keys depend on later tokens
        assert [output.num_cached_tokens > 0 for output in outputs] == [shared] * len(asked)
