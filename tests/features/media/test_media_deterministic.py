"""`deterministic` with images and videos: a request has the tokens and logprobs that it has alone on an empty cache.

Engines run it next to other images, in chunks, after prefix hits that end within an image, with few pages and with drafts.
"""

import functools
import random

import pytest
import test_qwen_vl
import torch
from media_models import MediaCase, pictures

import media_towers
import selection
from quire import LLM, SamplingParams
from quire.ops.native import multiplies_floats

CPU = pytest.mark.skipif(torch.cuda.is_available() or not multiplies_floats(), reason="for a CPU with C kernels for float32")
pytestmark = pytest.mark.usefixtures("processed_here")
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "adaptive": False}
VARIANTS = {
    "prefix hits": {},
    "chunks": {"max_num_batched_tokens": 96},
    "few pages": {"num_gpu_blocks_override": 40},
    "drafts": {"speculative_config": DRAFTS},
}
ON_A_GPU = {"eager": {"enforce_eager": True}, "pages of 32": {"block_size": 32}}


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    """Checkpoints with heads of 16 values: the attention kernels of CPUs require multiples of 16."""

    @functools.cache
    def make(name):
        with pytest.MonkeyPatch.context() as patch:
            for field, size in {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}.items():
                patch.setitem(media_towers.TEXT, field, size)
            patch.setitem(test_qwen_vl.MROPE, "mrope_section", [2, 2, 4])
            return MediaCase(name, tmp_path_factory.mktemp(name))

    return make


def asked(case):
    """Return prompts; the last three begin as others do, up to their image, so that prefix hits end within it."""
    one, two, *_ = pictures()
    return [*case.prompts, [one, "who is it?"], [one, " it"], ["see ", two, " or say"]]


def answers(llm, case, chosen):
    """Return the tokens and logprobs of requests by their numbers."""
    prompts = asked(case)
    params = [
        SamplingParams(temperature=0.9 * (i % 2), seed=i, max_tokens=8, ignore_eos=True, logprobs=1, prompt_logprobs=0)
        for i in chosen
    ]
    outputs = llm.generate([case.prompt(prompts[i]) for i in chosen], params, use_tqdm=False)

    def values(steps):
        return [sorted((token, value.logprob) for token, value in (step or {}).items()) for step in steps]

    return {
        i: (list(output.outputs[0].token_ids), values(output.outputs[0].logprobs), values(output.prompt_logprobs))
        for i, output in zip(chosen, outputs, strict=True)
    }


def check(case, variants, **options):
    options = {"deterministic": True, "max_num_seqs": 8, "max_model_len": 1024, "max_num_batched_tokens": 512,
               "kv_cache_memory_bytes": 16 << 20} | options  # fmt: skip
    count = len(asked(case))
    with LLM(str(case.directory), enable_prefix_caching=False, **options) as llm:
        expected = {i: answers(llm, case, [i])[i] for i in range(count)}
        assert answers(llm, case, range(count)) == expected, "all at once"
    for name, changes in variants.items():
        with LLM(str(case.directory), **options | changes) as llm:
            for order in (range(count), random.Random(0).sample(range(count), count)):
                found = answers(llm, case, order)
                assert not [i for i in range(count) if found[i] != expected[i]], name


@pytest.mark.parametrize("name", ["gemma3", "qwen2.5-vl"])
def test_short_steps_of_a_cpu_have_transformers_logprobs(case, name):
    """Up to 64 tokens run on bound memory, where a kernel attends causally and with rotary positions of one axis."""
    row = case(name)
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, prompt_logprobs=0)
    with LLM(str(row.directory), device="cpu", dtype="float32", max_model_len=1024, kv_cache_memory_bytes=16 << 20) as llm:
        for parts in row.prompts[:2]:
            [output] = llm.generate(row.prompt(parts), params, use_tqdm=False)
            ids, entries = output.prompt_token_ids, output.prompt_logprobs
            assert len(ids) <= 64
            expected = row.logprobs(ids, parts)
            for at in range(1, len(ids)):
                assert abs(entries[at][ids[at]].logprob - float(expected[at - 1, ids[at]])) < 1e-4, (parts, at)


@CPU
@pytest.mark.parametrize("name", ["llava", "gemma3", "paligemma", "qwen2.5-vl"] if selection.ALL else ["gemma3", "qwen2.5-vl"])
def test_on_a_cpu(case, name):
    check(case(name), VARIANTS if selection.ALL else {"chunks": VARIANTS["chunks"], "drafts": VARIANTS["drafts"]}, device="cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llava", "gemma3", "paligemma", "internvl", "pixtral", "qwen2.5-vl", "qwen3-vl"])
def test_on_a_gpu(case, name):
    check(case(name), VARIANTS | ON_A_GPU, device="cuda", dtype="bfloat16")
