"""The real default model: fetched from the package index, loaded from GGUF, held against transformers."""

import functools

import gguf
import pytest
import torch

from oracle import Sequences
from quire import LLM, SamplingParams

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def smollm2() -> LLM:
    return LLM("smollm2", device="cpu", dtype="float32", max_model_len=1024, kv_cache_memory_bytes=256 << 20)


def test_the_capital_of_france(smollm2):
    params = SamplingParams(temperature=0.0, max_tokens=8)
    completion = smollm2.generate("The capital of France is", params, use_tqdm=False)[0]
    assert completion.outputs[0].text.startswith(" Paris")
    answer = smollm2.chat(
        [{"role": "user", "content": "What is the capital of France? Answer in one word."}], params, use_tqdm=False
    )[0]
    assert "Paris" in answer.outputs[0].text
    assert answer.outputs[0].finish_reason == "stop"


def test_the_authors_sampling_defaults_are_used(smollm2):
    params = smollm2.get_default_sampling_params()
    assert (params.temperature, params.top_p) == (0.2, 0.9)


def test_digits_are_tokens_of_their_own(smollm2):
    """What sets this model's tokenizer apart; a rebuild from GGUF easily forgets it."""
    tokenizer = smollm2.get_tokenizer()
    assert [tokenizer.decode([i]) for i in tokenizer.encode("2026")] == ["2", "0", "2", "6"]


def test_logits_are_those_of_the_dequantized_model_in_transformers(smollm2, monkeypatch):
    import transformers

    for name in ("GGUFReader", "get_tensor_name_map"):  # it asks twice for the one, and for every module for the other
        monkeypatch.setattr(gguf, name, functools.cache(getattr(gguf, name)))
    path = smollm2.llm_engine.config.facts.files.path
    reference = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    ids = smollm2.get_tokenizer().encode("Water boils at 100 degrees. The capital of France is")
    with torch.inference_mode():
        expected = reference(torch.tensor([ids])).logits[0]
    model = smollm2.llm_engine.core.executor._runner._model
    bound = [(attention.kv, attention.group) for attention in model.attentions]
    found = Sequences(model, count=1, length=len(ids)).step([(0, ids)])[0]
    for attention, (kv, group) in zip(model.attentions, bound, strict=True):
        attention.bind(kv, group)
    assert torch.allclose(found, expected, atol=1e-3, rtol=1e-4)
    assert torch.equal(found.argmax(-1), expected.argmax(-1))
