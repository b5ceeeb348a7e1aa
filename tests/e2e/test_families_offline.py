"""Families in turn, and a sample of the decoders that transformers runs, through the whole engine: the tokens are transformers'
greedy ones whatever the batching, chunks, cache, preemption.

A repetition penalty keeps the tiny random models from saying one token for ever.
"""

import copy

import pytest
import torch

import selection
from more_families import MORE
from oracle import FAMILIES, TINY
from quire import LLM, SamplingParams
from quire.cache.layout import make_layout, pages_for
from quire.types.errors import ConfigError

NEW_TOKENS = 40
LENGTHS = (33, 5, 18, 49)
# transformers changes the rope factors of a text that grows long; an engine that caches rotated keys cannot
LONG = {"phi3-longrope": (33, 40, 37, 49)}
PENALTY = 1.5
GREEDY = SamplingParams(temperature=0.0, repetition_penalty=PENALTY, max_tokens=NEW_TOKENS, ignore_eos=True)

ENGINES = {
    "plain": {},
    "chunks of 1": {"long_prefill_token_threshold": 1},
    "chunks of 7": {"long_prefill_token_threshold": 7},
    "a small budget, a step ahead": {"max_num_batched_tokens": 24, "async_scheduling": True},
}


# an activation of its own
SAMPLE = ("persimmon",)
CORE, CHANGED = 4, 2


@pytest.fixture(scope="module", params=[*selection.select(sorted({*FAMILIES} - {*MORE}), FAMILIES, CORE, CHANGED), *SAMPLE])
def name(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def family(name, checkpoint):
    return checkpoint(name)


@pytest.fixture(scope="module")
def prompts(name) -> list[list[int]]:
    generator = torch.Generator().manual_seed(11)
    lengths = LONG.get(name, LENGTHS)
    return [torch.randint(3, TINY["vocab_size"], (n,), generator=generator).tolist() for n in lengths]


def engine(checkpoint, **args) -> LLM:
    defaults = {
        "skip_tokenizer_init": True, "dtype": "float32", "device": "cpu", "block_size": 4, "max_num_seqs": 8,
        "max_num_batched_tokens": 512, "kv_cache_memory_bytes": 32 << 20,
    }  # fmt: skip
    return LLM(str(checkpoint.directory), **(defaults | args))


def tokens(outputs) -> list[list[int]]:
    assert all(output.outputs[0].finish_reason == "length" for output in outputs)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def expected(family, prompts) -> list[list[int]]:
    """transformers' own greedy continuations, one prompt at a time."""
    out = []
    for prompt in prompts:
        with torch.inference_mode():
            ids = family.reference.generate(
                torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), do_sample=False,
                min_new_tokens=NEW_TOKENS, max_new_tokens=NEW_TOKENS, eos_token_id=None, pad_token_id=0,
                repetition_penalty=PENALTY,
            )  # fmt: skip
        out.append(ids[0, len(prompt) :].tolist())
    return out


@pytest.mark.parametrize("how", ENGINES)
def test_batched(family, prompts, expected, how):
    llm = engine(family, **ENGINES[how])
    assert tokens(llm.generate(prompts, GREEDY, use_tqdm=False)) == expected


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["plain", "chunks of 7", "a small budget, a step ahead"])
def test_on_cuda(family, prompts, expected, how):
    llm = engine(family, device="cuda", **ENGINES[how])
    assert tokens(llm.generate(prompts, GREEDY, use_tqdm=False)) == expected


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_as_close_as_transformers_own(family, prompts, dtype):
    """Log-probabilities of prompts and drawn tokens: hardly further from float32 than transformers in the same type."""
    try:
        llm = engine(family, device="cuda", dtype=dtype)
    except ConfigError as refusal:
        assert "overflows in float16" in str(refusal)
        pytest.skip(str(refusal))
    greedy = SamplingParams(temperature=0.0, prompt_logprobs=0, logprobs=0, max_tokens=8, ignore_eos=True)
    half = copy.deepcopy(family.reference).to("cuda", getattr(torch, dtype))
    ours, theirs = [], []
    for prompt, output in zip(prompts, llm.generate(prompts, greedy, use_tqdm=False), strict=True):
        drawn = output.outputs[0]
        ids = prompt + list(drawn.token_ids)
        reported = [step[token].logprob for step, token in zip(output.prompt_logprobs[1:], prompt[1:], strict=True)]
        reported += [step[token].logprob for step, token in zip(drawn.logprobs, drawn.token_ids, strict=True)]
        exact, rounded = (chosen_logprobs(model, ids) for model in (family.reference, half))
        ours.append(torch.tensor(reported) - exact)
        theirs.append(rounded - exact)
    error, allowed = (torch.cat(found).abs().mean().item() for found in (ours, theirs))
    assert error < 2 * allowed + 1e-3


def chosen_logprobs(model, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits = model(torch.tensor([ids], device=model.device)).logits[0, :-1].float().cpu()
    return logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


def test_alone_and_again_from_the_prefix_cache(family, prompts, expected):
    llm = engine(family)
    for prompt, answer in zip(prompts[:2], expected, strict=False):
        first = llm.generate(prompt, GREEDY, use_tqdm=False)
        again = llm.generate(prompt, GREEDY, use_tqdm=False)
        assert tokens(first) == tokens(again) == [answer]
        assert again[0].num_cached_tokens == (len(prompt) - 1) // 4 * 4
    longer = prompts[0] + expected[0][:20]
    rest = SamplingParams(temperature=0.0, repetition_penalty=PENALTY, max_tokens=NEW_TOKENS - 20, ignore_eos=True)
    hit = llm.generate(longer, rest, use_tqdm=False)
    assert tokens(hit) == [expected[0][20:]]
    assert hit[0].num_cached_tokens > len(prompts[0])


def test_after_preemption_for_want_of_pages(family, prompts, expected):
    """Pages for one whole request in every cache group, and one more."""
    if all(layer.window for layer in family.facts.layers):
        pytest.skip("windows keep a request's pages so few that whoever was admitted never lacks one")
    longest, budget = max(map(len, prompts)) + NEW_TOKENS, 16
    pages = pages_for(make_layout(family.facts.layers, 4, 4), longest, budget) + 1
    llm = engine(family, num_gpu_blocks_override=pages, max_model_len=longest, max_num_batched_tokens=budget)
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert sum(output.metrics.num_preemptions for output in outputs) > 0
    assert tokens(outputs) == expected


def test_after_preemption_by_a_better_priority(family, prompts, expected):
    core = engine(family, scheduling_policy="priority", max_num_seqs=2).llm_engine
    outputs = {}

    def step():
        outputs.update((output.request_id, output) for output in core.step())

    for i in (0, 1):
        core.add_request(str(i), prompts[i], GREEDY, priority=5)
    for _ in range(20):
        step()
    for i in (2, 3):
        core.add_request(str(i), prompts[i], GREEDY, priority=1)
    while core.has_unfinished_requests():
        step()
    assert [outputs[str(i)].metrics.num_preemptions for i in range(4)] == [1, 1, 0, 0]
    assert tokens([outputs[str(i)] for i in range(4)]) == expected
