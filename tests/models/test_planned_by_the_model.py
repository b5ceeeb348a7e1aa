"""Models of transformers whose caches only they themselves can plan, and those that are run without keys and values."""

import json

import pytest
import torch

from family import Family
from oracle import TINY, make_checkpoint, open_reference
from quire import LLM, SamplingParams
from quire.config.facts import read_facts
from quire.files.resolve import resolve_model
from quire.models.registry import complete_facts
from quire.types.errors import ModelError

BART = {
    **dict.fromkeys(("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size")),
    "d_model": 48,
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 64,
    "encoder_layers": 1,
    "encoder_ffn_dim": 64,
    "encoder_attention_heads": 4,
    "init_std": 0.2,
    "is_decoder": True,
    "is_encoder_decoder": False,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "initializer_range": None,
}
CASES = {
    "counts its positions": (Family("BartConfig", "BartForCausalLM", BART), "has no position_ids"),
    "attends twice in a layer": (Family("DiffLlamaConfig", "DiffLlamaForCausalLM"), ""),
    "heads of several sizes, shared keys": (
        Family(
            "Gemma4TextConfig",
            "Gemma4ForCausalLM",
            {
                "head_dim": 8,
                "hidden_size_per_layer_input": 8,
                "vocab_size_per_layer_input": 199,
                "num_hidden_layers": 4,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
                "sliding_window": 6,
                "per_layer_config": {"01": {"head_dim": 16}, "03": {"head_dim": 16}},
            },
        ),
        "",
    ),
}
NEW_TOKENS = 8
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=0, prompt_logprobs=0)
PROMPTS = [torch.randint(3, TINY["vocab_size"], (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (21, 5)]


@pytest.mark.parametrize("name", CASES)
def test_tokens_and_logprobs(tmp_path, caplog, name):
    """In chunks of 8 tokens, with pages for little more than one request, and then from the prefix cache."""
    family, why = CASES[name]
    make_checkpoint(family, tmp_path)
    llm = LLM(
        str(tmp_path), skip_tokenizer_init=True, dtype="float32", device="cpu", block_size=4, max_num_seqs=4,
        max_model_len=29, max_num_batched_tokens=8, kv_cache_memory_bytes=1 << 20, model_impl="transformers",
    )  # fmt: skip
    facts = llm.llm_engine.config.facts
    assert why in facts.recomputed and bool(why) == bool(facts.recomputed)
    assert ("without a KV cache" in caplog.text) == bool(why)
    reference = open_reference(tmp_path)
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    again = llm.generate(PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True), use_tqdm=False)[0]
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        drawn = output.outputs[0]
        ids = prompt + list(drawn.token_ids)
        with torch.inference_mode():
            expected = reference(input_ids=torch.tensor([ids]), use_cache=False).logits[0].log_softmax(-1)
        assert drawn.token_ids == expected[len(prompt) - 1 : -1].argmax(-1).tolist()
        reported = [step[token].logprob for step, token in zip(output.prompt_logprobs[1:], prompt[1:], strict=True)]
        reported += [step[token].logprob for step, token in zip(drawn.logprobs, drawn.token_ids, strict=True)]
        chosen = expected[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(reported), chosen, atol=1e-4, rtol=0)
    assert again.num_cached_tokens == 20 and again.outputs[0].token_ids == outputs[0].outputs[0].token_ids


def test_what_looks_ahead_is_refused(tmp_path):
    make_checkpoint(Family("BertConfig", "BertLMHeadModel", {"num_key_value_heads": None}), tmp_path)
    with pytest.raises(ModelError, match=r"later tokens change the hidden states of earlier ones \(it is not causal\)"):
        LLM(str(tmp_path), skip_tokenizer_init=True, dtype="float32", device="cpu", max_model_len=32)


def test_only_the_fallback_asks_the_model(tmp_path):
    """A family of our own is planned by its configuration; what that cannot tell is refused where nobody else may be asked."""
    config = {"model_type": "bart", "architectures": ["BartForCausalLM"], "vocab_size": 99, "d_model": 32, "hidden_size": 32}
    (tmp_path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 64}))
    files = resolve_model(tmp_path, weights=False)
    with pytest.raises(ModelError, match="none of num_attention_heads, n_head, n_heads"):
        read_facts(files)
    facts = read_facts(files, lenient=True)
    assert facts.layers == () and "none of num_attention_heads" in facts.unsupported_reason
    with pytest.raises(ModelError, match="none of num_attention_heads"):
        complete_facts(facts, "quire")
