"""Draft tokens are drawn with the target's random numbers: where the two distributions agree, sampled drafts are accepted."""

import json

import pytest
import torch
from msgspec import structs
from recorded_steps import PAGE, recording  # noqa: F401
from safetensors.torch import load_file, save_file
from tiny import make_model, open_model

from quire import SamplingParams

SIZE, VOCABULARY = 32, 320
PROMPTS = [{"prompt_token_ids": [5 + 7 * i % 40 for i in range(size)]} for size in (9, 4, 17)]
LONG = {"max_tokens": 24, "ignore_eos": True}
SAMPLED = [
    SamplingParams(temperature=1.0, seed=3, **LONG),
    SamplingParams(temperature=0.8, top_p=0.9, top_k=40, **LONG),
    SamplingParams(temperature=1.2, min_p=0.01, seed=5, frequency_penalty=0.7, logit_bias={9: 2.0}, **LONG),
]
GLM = {
    "hidden_size": SIZE, "intermediate_size": 48, "moe_intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": VOCABULARY, "max_position_embeddings": 256, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1, "eos_token_id": 1, "bos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip


def forget_context(tensors, one_state=False):
    """Layers add nothing, and norms change nothing: the next token depends on the last one alone, or on none."""
    for name, value in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            value.zero_()
        elif "norm" in name and name.endswith("weight"):
            value.fill_(1.0)
    embedded = tensors["model.embed_tokens.weight"]
    if one_state:
        embedded[:] = embedded[:1].clone()
    embedded /= embedded.square().mean(-1, keepdim=True).sqrt()
    return tensors


def make_target(directory, one_state=False):
    path = make_model(directory) / "model.safetensors"
    save_file(forget_context(load_file(path), one_state), path)
    return directory


def only_the_token():
    """[SIZE, 2 SIZE]: of a token's embedding and a state, the embedding."""
    return torch.cat((torch.eye(SIZE), torch.zeros(SIZE, SIZE)), 1)


def write_head(directory, tensors, **config):
    directory.mkdir()
    save_file({name: value.contiguous() for name, value in tensors.items()}, directory / "model.safetensors")
    known = {"hidden_size": SIZE, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    (directory / "config.json").write_text(json.dumps(known | {"max_position_embeddings": 256} | config))
    return {"model": str(directory)}


def layer_of(tensors):
    return {name.removeprefix("model."): value for name, value in tensors.items() if name.startswith("model.layers.0.")}


def eagle_head(target, directory):
    layer = layer_of(load_file(target / "model.safetensors"))
    del layer["layers.0.input_layernorm.weight"]
    return {"method": "eagle", **write_head(directory, layer | {"fc.weight": only_the_token()}, num_hidden_layers=1)}


def eagle3_head(target, directory):
    """A head of a smaller vocabulary. It predicts from the state of the token before the last, so the target has one state."""
    tensors = load_file(target / "model.safetensors")
    layer, kept = layer_of(tensors), torch.cat((torch.arange(10, 200), torch.arange(210, VOCABULARY)))
    for name in ("q_proj", "k_proj", "v_proj"):
        weight = layer[f"layers.0.self_attn.{name}.weight"]
        layer[f"layers.0.self_attn.{name}.weight"] = torch.cat((weight, weight), 1)
    own = {
        "fc.weight": torch.eye(SIZE), "layers.0.hidden_norm.weight": torch.ones(SIZE), "norm.weight": torch.ones(SIZE),
        "lm_head.weight": tensors["lm_head.weight"][kept], "d2t": kept - torch.arange(len(kept)),
    }  # fmt: skip
    taps = {"eagle_aux_hidden_state_layer_ids": [0], "draft_vocab_size": len(kept), "num_hidden_layers": 1}
    return {"method": "eagle3", **write_head(directory, layer | own, **taps)}


def medusa_head(target, directory):
    head = load_file(target / "model.safetensors")["lm_head.weight"]
    tensors = {f"medusa_heads.{i}.0.linear.weight": torch.zeros(SIZE, SIZE) for i in range(3)}
    tensors |= {f"medusa_heads.{i}.1.weight": head.clone() for i in range(3)}
    return {"method": "medusa", **write_head(directory, tensors, medusa_num_heads=3, medusa_num_layers=1)}


def mtp_target(directory):
    from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

    make_model(directory)  # the tokenizer's files
    torch.manual_seed(3)
    Glm4MoeForCausalLM(Glm4MoeConfig(**GLM, initializer_range=0.3)).save_pretrained(directory)
    path = directory / "model.safetensors"
    tensors = forget_context(load_file(path))
    own = {name.removeprefix("model.layers.1."): value.clone() for name, value in tensors.items() if ".layers.1." in name}
    own |= {f"{name}.weight": torch.ones(SIZE) for name in ("enorm", "hnorm", "shared_head.norm")}
    own |= {"eh_proj.weight": only_the_token(), "shared_head.head.weight": tensors["lm_head.weight"].clone()}
    own["embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors | {f"model.layers.2.{name}": value for name, value in own.items()}, path)
    return directory


def set_up(name, path):
    """-> a target, and who drafts for it with the same distributions."""
    target = path / "target"
    target.mkdir()
    if name == "mtp":
        return mtp_target(target), {"method": "mtp"}
    if name == "itself":
        return make_model(target), {"model": str(target)}
    make_target(target, one_state=name in ("medusa", "eagle3"))
    make = {"eagle": eagle_head, "eagle3": eagle3_head, "medusa": medusa_head}[name]
    return target, make(target, path / "head")


def answer(target, params, **args):
    llm = open_model(target, dtype="float32", seed=11, block_size=PAGE, **args)
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    counts = llm.llm_engine.core.stats.drafts
    llm.llm_engine.shutdown()
    return [list(output.outputs[0].token_ids) for output in outputs], counts


def check(name, path):
    target, drafter = set_up(name, path)
    params = SAMPLED
    if name == "eagle3":  # tokens that the head has
        allowed = [10, 11, 12, 60, 61, 62, 150, 151, 152, 250, 251, 252]
        params = [structs.replace(each, allowed_token_ids=allowed) for each in SAMPLED]
    wanted, _ = answer(target, params)
    drafts = {"speculative_config": {**drafter, "num_speculative_tokens": 3, "adaptive": False}}
    tokens, counts = answer(target, params, **drafts)
    assert tokens == wanted
    assert len({token for tokens in wanted for token in tokens}) > 8, "nothing is sampled where one token is certain"
    assert counts.tokens > 40 and counts.accepted > 0.9 * counts.tokens, (counts.accepted, counts.tokens)


@pytest.mark.parametrize("name", ["itself", "eagle", "eagle3", "medusa", "mtp"])
def test_a_drafter_with_the_targets_distribution_is_right_at_any_temperature(name, tmp_path):
    check(name, tmp_path)


def test_a_recorded_draft_model_draws_with_the_targets_numbers(tmp_path, recording):  # noqa: F811
    check("itself", tmp_path)
