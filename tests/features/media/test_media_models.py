"""Every family that reads images or videos, through `LLM`: transformers' greedy tokens and logits, however prompts are run."""

import functools

import pytest
import torch
from media_models import MODELS, NEW_TOKENS, MediaCase

import selection
from quire import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=-1)
PAGE = 4
# of each kind: one size, tiles, rows with marks, quarters, windows, three axes, deep stack, recurrent layers, undivided rows
CORE = ("llava", "llava-onevision", "pixtral", "idefics2", "qwen2.5-vl", "qwen3-vl", "qwen3.5", "gemma3", "paligemma")

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


def run(llm, row, params=GREEDY, turns=1):
    """Generate from all prompts of a case together, and compare. Return the last outputs."""
    outputs = []
    for _ in range(turns):
        outputs = llm.generate([row.prompt(parts) for parts in row.prompts], params, use_tqdm=False)
        check(row, outputs, row.prompts)
    return outputs


def tight(row):
    """Return settings: steps that divide images, pages for the longest prompt and little more, and an encoder cache for a
    single item or, where prompts are computed in one step, for the items of one prompt."""
    whole = row.family.bidirectional == "prompt"
    longest = row.longest + NEW_TOKENS
    images = row.family.max_tokens("image", row.processor.to_dict())
    videos = row.family.max_tokens("video", row.video_settings) if row.entry.video else 0
    return {
        "max_num_batched_tokens": longest if whole else 24, "long_prefill_token_threshold": 7, "max_model_len": longest,
        "mm_encoder_cache_size": longest if whole else min(max(images, videos), longest),
        "num_gpu_blocks_override": longest // PAGE + 6,
    }  # fmt: skip


def interrupted(llm, row):
    """Preempt all requests again and again, wherever they are, and forget all that is cached; then compare."""
    engine, outputs, step = llm.llm_engine, {}, 0
    for index, parts in enumerate(row.prompts):
        engine.add_request(f"{index}", row.prompt(parts), GREEDY)
    while engine.has_unfinished_requests():
        outputs |= {output.request_id: output for output in engine.step() if output.finished}
        step += 1
        if step % 3 == 0 and step < 20:
            assert llm.reset_prefix_cache(reset_running_requests=True)
    check(row, [outputs[f"{index}"] for index in range(len(row.prompts))], row.prompts)
    assert sum(output.metrics.num_preemptions for output in outputs.values()) > 3


def several(llm, row):
    params = SamplingParams(n=3, temperature=1.0, top_k=1, max_tokens=NEW_TOKENS, ignore_eos=True)
    for parts in (row.prompts[0], row.prompts[3]):
        [output] = llm.generate(row.prompt(parts), params, use_tqdm=False)
        assert [found.token_ids for found in output.outputs] == [row.answer(output.prompt_token_ids, parts)[0]] * 3


@pytest.mark.parametrize("name", MODELS)
def test_batched_and_cached(case, name):
    row = case(name)
    with engine(row) as llm:
        outputs = run(llm, row, turns=2)
    shared = row.family.bidirectional != "prompt"  # else keys depend on later tokens
    assert [output.num_cached_tokens > 0 for output in outputs] == [shared] * len(outputs)


@pytest.mark.parametrize("name", [name for name in MODELS if selection.ALL or name in CORE])
def test_divided_preempted_and_encoded_again(case, name):
    row = case(name)
    with engine(row, **tight(row)) as llm:
        run(llm, row, turns=2)
        several(llm, row)
        interrupted(llm, row)
        encoding = llm.llm_engine.core.scheduler._encoding
        encoding.check()
        items = {part.tobytes() for parts in row.prompts for part in parts if not isinstance(part, str)}
        assert encoding.counts.queries - encoding.counts.hits > len(items), "some were encoded again"
