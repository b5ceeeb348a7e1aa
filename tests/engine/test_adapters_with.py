"""An adapter with several answers, grammars, beams, log probabilities and prefixes: as the model with the adapter in its
matrices."""

import shutil

import pytest
from test_adapters_llm import GREEDY, PROMPT
from tiny import TEXT, open_model
from transformers import LlamaForCausalLM

from adapters import IDS, KINDS, merge
from quire import SamplingParams
from quire.lora.request import LoRARequest
from quire.types.sampling import BeamSearchParams
from quire.types.structured import StructuredOutputsParams


@pytest.fixture(scope="module")
def both(tiny_model, tmp_path_factory):
    """The model with room for an adapter, and the two as one; and what to ask the first with."""
    folder = tmp_path_factory.mktemp("with")
    merged = shutil.copytree(tiny_model, folder / "merged")
    model = LlamaForCausalLM.from_pretrained(tiny_model, dtype="float32")
    path = merge(model, folder / "adapter", *KINDS["all"])
    model.save_pretrained(merged)
    args = {"dtype": "float32", "disable_log_stats": True}
    adapted, whole = open_model(tiny_model, enable_lora=True, **args), open_model(merged, **args)
    yield adapted, whole, LoRARequest("all", 1, str(path))
    for llm in (adapted, whole):
        llm.llm_engine.shutdown()


CASES = {
    "several answers": SamplingParams(n=3, temperature=1.0, seed=3, top_k=40, max_tokens=10, ignore_eos=True),
    "a grammar": SamplingParams(temperature=0, max_tokens=12, structured_outputs=StructuredOutputsParams(regex="[a-f]{3,9}")),
    "several in a grammar": SamplingParams(
        n=2, temperature=1.0, seed=1, max_tokens=12, structured_outputs=StructuredOutputsParams(choice=["yes", "no", "perhaps"])
    ),
    "penalties": SamplingParams(temperature=0, repetition_penalty=1.4, presence_penalty=0.5, min_tokens=4, max_tokens=10),
}


def told(outputs):
    return [[(choice.token_ids, choice.text, choice.finish_reason) for choice in output.outputs] for output in outputs]


@pytest.mark.parametrize("name", CASES)
def test_parameters(both, name):
    adapted, whole, lora = both
    expected = whole.generate([TEXT[0], TEXT[1]], CASES[name], use_tqdm=False)
    assert told(adapted.generate([TEXT[0], TEXT[1]], CASES[name], use_tqdm=False, lora_request=lora)) == told(expected)
    plain = adapted.generate([TEXT[0], TEXT[1]], CASES[name], use_tqdm=False)
    again = adapted.generate([TEXT[0], TEXT[1]], CASES[name], use_tqdm=False, lora_request=[None, lora])
    assert told(again) == [told(plain)[0], told(expected)[1]], "an adapter never reads what others left in the cache"


def test_beams(both):
    adapted, whole, lora = both
    params = BeamSearchParams(beam_width=3, max_tokens=8, ignore_eos=True)

    def beams(llm, **more):
        [found] = llm.beam_search([PROMPT], params, **more)
        return [sequence.tokens for sequence in found.sequences]

    assert beams(adapted, lora_request=lora) == beams(whole) != beams(adapted)


def test_log_probabilities(both):
    adapted, whole, lora = both
    params = SamplingParams(temperature=0, max_tokens=5, logprobs=3, prompt_logprobs=2, ignore_eos=True)
    [ours] = adapted.generate(PROMPT, params, use_tqdm=False, lora_request=lora)
    [theirs] = whole.generate(PROMPT, params, use_tqdm=False)
    for got, expected in zip(
        [*ours.prompt_logprobs[1:], *ours.outputs[0].logprobs],
        [*theirs.prompt_logprobs[1:], *theirs.outputs[0].logprobs],
        strict=True,
    ):
        assert list(got) == list(expected)
        assert [value.logprob for value in got.values()] == pytest.approx([v.logprob for v in expected.values()], abs=1e-4)


def test_a_prefix_is_an_adapters_own(both):
    adapted, whole, lora = both
    adapted.reset_prefix_cache()
    long = {"prompt_token_ids": IDS * 3}
    [expected] = whole.generate(long, GREEDY, use_tqdm=False)
    for given, cached in ((None, False), (lora, False), (lora, True)):
        [output] = adapted.generate(long, GREEDY, use_tqdm=False, lora_request=given)
        assert (output.num_cached_tokens > 0) == cached
    assert output.outputs[0].token_ids == expected.outputs[0].token_ids
