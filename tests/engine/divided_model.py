"""A model divided among processes, held against one process: what tests of ranks and of stages ask of both."""

from quire import LLM, SamplingParams
from quire.sampling_params import StructuredOutputsParams
from tiny_model import TEXT

GREEDY = SamplingParams(temperature=0.0, repetition_penalty=1.5, max_tokens=16, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.9, top_p=0.95, top_k=50, seed=7, max_tokens=16, ignore_eos=True)


def family_engine(directory, **args) -> LLM:
    defaults = {
        "skip_tokenizer_init": True, "device": "cpu", "block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 64,
        "kv_cache_memory_bytes": 4 << 20,
    }  # fmt: skip
    return LLM(str(directory), **(defaults | args))


def ids(llm, prompts, params):
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert not any(choice.error for output in outputs for choice in output.outputs)
    return [[list(choice.token_ids) for choice in output.outputs] for output in outputs]


def check_grammars_and_several_answers(divided: LLM, alone: LLM) -> None:
    for rules in ({"regex": "(fox|dog) [a-z]{3}"}, {"json": {"type": "object", "properties": {"a": {"type": "integer"}}}}):
        params = SamplingParams(
            temperature=0.8, seed=3, n=3, max_tokens=30, structured_outputs=StructuredOutputsParams(**rules), bad_words=["lazy"]
        )
        assert ids(divided, TEXT, params) == ids(alone, TEXT, params)
    assert ids(divided, TEXT, GREEDY) == ids(alone, TEXT, GREEDY)


def check_logprobs(divided: LLM, alone: LLM) -> None:
    """Close, and of the same tokens."""
    params = SamplingParams(temperature=0.0, max_tokens=8, logprobs=4, prompt_logprobs=3, ignore_eos=True)
    for ours, theirs in zip(*(llm.generate(TEXT, params, use_tqdm=False) for llm in (divided, alone)), strict=True):
        assert ours.outputs[0].token_ids == theirs.outputs[0].token_ids
        for here, there in zip(
            [*ours.prompt_logprobs[1:], *ours.outputs[0].logprobs],
            [*theirs.prompt_logprobs[1:], *theirs.outputs[0].logprobs],
            strict=True,
        ):
            assert here.keys() == there.keys()
            assert all(abs(here[token].logprob - there[token].logprob) < 1e-4 for token in here)


def check_prefix_hits(divided: LLM, alone: LLM) -> None:
    shared = "a page is a page, a quire is a gathering of pages "
    divided.generate(shared, GREEDY, use_tqdm=False)
    [output] = divided.generate(shared + "the fox", GREEDY, use_tqdm=False)
    assert output.num_cached_tokens > 0
    assert list(output.outputs[0].token_ids) == ids(alone, [shared + "the fox"], GREEDY)[0][0]
    assert divided.reset_prefix_cache()
