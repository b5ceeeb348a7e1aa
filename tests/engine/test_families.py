"""Every family, through the whole engine, gives transformers' greedy tokens: whatever the batching, chunking, cache or preemption."""

import pytest
import torch

from models.oracle import FAMILIES, TINY
from quire import LLM, SamplingParams

NEW_TOKENS = 64
LENGTHS = (33, 5, 18, 49)
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)

ENGINES = {
    "plain": {},
    "chunks of 1": {"long_prefill_token_threshold": 1},
    "chunks of 7": {"long_prefill_token_threshold": 7},
    "chunks of 16": {"long_prefill_token_threshold": 16},
    "chunks of 64": {"long_prefill_token_threshold": 64},
    "a small budget, a step ahead": {"max_num_batched_tokens": 24, "async_scheduling": True},
}


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(11)
    return [torch.randint(3, TINY["vocab_size"], (n,), generator=generator).tolist() for n in LENGTHS]


def engine(checkpoint, **args) -> LLM:
    defaults = {
        "skip_tokenizer_init": True, "dtype": "float32", "device": "cpu", "block_size": 4, "max_num_seqs": 8,
        "max_num_batched_tokens": 512, "kv_cache_memory_bytes": 32 << 20,
    }  # fmt: skip
    return LLM(str(checkpoint.directory), **(defaults | args))


def tokens(outputs) -> list[list[int]]:
    assert all(output.outputs[0].finish_reason == "length" for output in outputs)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def family(request, checkpoints):
    return checkpoints(request.param)


@pytest.fixture(scope="module")
def expected(family) -> list[list[int]]:
    """transformers' own greedy continuations, one prompt at a time."""
    out = []
    for prompt in prompts():
        with torch.inference_mode():
            ids = family.reference.generate(
                torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), do_sample=False,
                min_new_tokens=NEW_TOKENS, max_new_tokens=NEW_TOKENS, eos_token_id=None, pad_token_id=0,
            )  # fmt: skip
        out.append(ids[0, len(prompt) :].tolist())
    return out


@pytest.mark.parametrize("name", ENGINES)
def test_batched(family, expected, name):
    llm = engine(family, **ENGINES[name])
    assert tokens(llm.generate(prompts(), GREEDY, use_tqdm=False)) == expected


def test_alone_and_again_from_the_prefix_cache(family, expected):
    llm = engine(family)
    for prompt, answer in zip(prompts(), expected, strict=True):
        first = llm.generate(prompt, GREEDY, use_tqdm=False)
        again = llm.generate(prompt, GREEDY, use_tqdm=False)
        assert tokens(first) == tokens(again) == [answer]
        assert again[0].num_cached_tokens == (len(prompt) - 1) // 4 * 4
    longer = prompts()[0] + expected[0][:20]
    hit = llm.generate(longer, SamplingParams(temperature=0.0, max_tokens=44, ignore_eos=True), use_tqdm=False)
    assert tokens(hit) == [expected[0][20:]]
    assert hit[0].num_cached_tokens > len(prompts()[0])


def test_after_preemption(family, expected):
    llm = engine(family, kv_cache_memory_bytes=None, num_gpu_blocks_override=_pages_for_about_two(family), max_model_len=120)
    outputs = llm.generate(prompts(), GREEDY, use_tqdm=False)
    assert sum(output.metrics.num_preemptions for output in outputs) > 0
    assert tokens(outputs) == expected


def _pages_for_about_two(family) -> int:
    """Room for one whole request in every cache group and a little more."""
    from quire.cache.capacity import pages_for
    from quire.cache.layout import make_layout

    layout = make_layout(family.facts.layers, 4, 4)
    return pages_for(layout, 120, 512) * 5 // 4 + 1
