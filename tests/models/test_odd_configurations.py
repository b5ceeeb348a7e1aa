"""Configurations and checkpoints that differ from the usual: through LLM, served as transformers does, or refused by name."""

import json

import pytest
import torch

from oracle import TINY
from quire import LLM, SamplingParams
from quire.config.transformers_types import class_of
from quire.types.errors import ModelError
from tiny_model import make_model

PROMPT = {"prompt_token_ids": [3 + 7 * i % 90 for i in range(20)]}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, repetition_penalty=1.5)


def answer(path, **args):
    llm = open_llm(path, **args)
    tokens = list(llm.generate(PROMPT, GREEDY, use_tqdm=False)[0].outputs[0].token_ids)
    llm.llm_engine.shutdown()
    return tokens


def open_llm(path, **args):
    small = {"device": "cpu", "dtype": "float32", "kv_cache_memory_bytes": 4 << 20, "block_size": 16}
    return LLM(str(path), **small | {"skip_tokenizer_init": True} | args)


def change(path, changes, without=()):
    file = path / "config.json"
    config = {name: value for name, value in json.loads(file.read_text()).items() if name not in without}
    file.write_text(json.dumps(config | changes))


@pytest.mark.parametrize("impl", ["quire", "transformers"])
def test_dynamic_rope_does_not_depend_on_max_model_len(impl, tmp_path):
    make_model(tmp_path, max_position_embeddings=128)
    plain = answer(tmp_path, model_impl=impl)
    change(tmp_path, {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}})
    first, *others = [answer(tmp_path, model_impl=impl, max_model_len=length) for length in (64, 100, 256)]
    assert others == [first, first] and first != plain


def test_phimoe_with_other_than_two_experts_per_token_is_refused(tmp_path):
    from transformers import PhimoeConfig

    named = {"architectures": ["PhimoeForCausalLM"]}
    PhimoeConfig(**TINY, num_local_experts=4, num_experts_per_tok=3, **named).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"num_experts_per_tok must be 2 for PhimoeForCausalLM.*got 3"):
        open_llm(tmp_path, load_format="dummy")


@pytest.mark.parametrize("value_dim", [8, 10])
def test_olmo_hybrid_with_convolutions_in_equal_shares(value_dim, tmp_path):
    """As transformers saves them, whatever keys and values have."""
    from safetensors.torch import load_file
    from transformers import OlmoHybridConfig, OlmoHybridForCausalLM

    torch.manual_seed(5)
    sizes = {"linear_num_key_heads": 4, "linear_num_value_heads": 4, "linear_key_head_dim": 6}
    sizes |= {"linear_value_head_dim": value_dim, "layer_types": ["linear_attention", "linear_attention", "full_attention"]}
    model = OlmoHybridForCausalLM(OlmoHybridConfig(**TINY | sizes)).eval()
    model.save_pretrained(tmp_path)
    kept = load_file(tmp_path / "model.safetensors")
    shares = [len(kept[f"model.layers.0.linear_attn.{name}_conv1d.weight"]) for name in "qkv"]
    assert shares != [24, 24, 4 * value_dim]
    ids, length = torch.tensor([PROMPT["prompt_token_ids"]]), {"max_new_tokens": 12, "min_new_tokens": 12}
    out = model.generate(ids, **length, do_sample=False, repetition_penalty=1.5, eos_token_id=None)
    assert answer(tmp_path) == out[0, 20:].tolist()


def test_prophetnet_is_refused_in_plain_words(tmp_path):
    from transformers import ProphetNetConfig

    sizes = {"hidden_size": 32, "decoder_ffn_dim": 48, "num_decoder_layers": 2, "num_decoder_attention_heads": 4}
    alone = {"is_decoder": True, "is_encoder_decoder": False, "architectures": ["ProphetNetForCausalLM"]}
    ProphetNetConfig(vocab_size=199, max_position_embeddings=64, **sizes, **alone).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"prophetnet models are not supported: their decoder attends to several streams"):
        open_llm(tmp_path, load_format="dummy")


@pytest.mark.parametrize("named", [None, []])
def test_the_architecture_follows_from_the_model_type(named, tmp_path):
    make_model(tmp_path)
    expected = answer(tmp_path)
    change(tmp_path, {} if named is None else {"architectures": named}, without=["architectures"])
    assert answer(tmp_path) == expected
    change(tmp_path, {"model_type": "brand_new"})
    with pytest.raises(ModelError, match="architectures"):
        open_llm(tmp_path)


def test_architectures_are_those_that_transformers_takes():
    from transformers.models.auto import modeling_auto as auto

    theirs = {**auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, **auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
    named = {kind: name for kind, name in theirs.items() if isinstance(name, str)}
    assert len(named) > 150 and {kind: class_of(kind) for kind in named} == named
