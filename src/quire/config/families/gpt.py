"""Decoders with the shape of GPT-2, GPT-J and GPT-NeoX: LayerNorm, biases, learned positions, ALiBi or partial rope."""

from typing import Any

from quire.config.families.card import FIELDS, GGUF, ROPE, SILU, Card, Config
from quire.config.gguf_values import number
from quire.files.gguf import GGUFHeader
from quire.types.errors import ModelError

_GPT2, _GPTJ, _FALCON = "GPT-2, GPT-BigCode (StarCoder)", "CodeGen, GPT-J", "Falcon"
_LAYER_NORM = FIELDS | {"attention.layer_norm_epsilon": "layer_norm_eps"}
_COHERE_FLAGS = {"use_qk_norm": "attn_q_norm.weight", "attention_bias": "attn_q.bias"}
_TIED = {"tie_word_embeddings": True}
_HALF_ROPE = {**ROPE, "partial_rotary_factor": 0.5}
_FALCON_FIELDS = FIELDS | {"attention.layer_norm_epsilon": "layer_norm_epsilon", "feed_forward_length": "ffn_hidden_size"}
_FALCON_DEFAULTS = {**ROPE, "max_position_embeddings": 2048}
_FALCON_FIXED = {"parallel_attn": True, "bias": False, "alibi": False, "multi_query": True}
_FALCON_NAMES = ("word_embeddings", "ln_f", "self_attention.query_key_value", "self_attention.dense", "mlp.dense_h_to_4h",
                 "mlp.dense_4h_to_h")  # fmt: skip


def _finish_cohere(header: GGUFHeader, config: dict[str, Any]) -> None:
    config["logit_scale"] = number(header, "logit_scale", 1.0)


def _has_two_norms(header: GGUFHeader) -> bool:
    return "blk.0.attn_norm_2.weight" in header.tensors


def _finish_falcon(header: GGUFHeader, config: dict[str, Any]) -> None:
    config["new_decoder_architecture"] = _has_two_norms(header)
    config["num_kv_heads"] = config.pop("num_key_value_heads", 1)
    if not config["new_decoder_architecture"] and config["num_kv_heads"] != 1:
        raise ModelError(f"{header.path}: a Falcon of several key heads has norms of its own for attention (attn_norm_2)")


def _falcon(config: Config) -> Config:
    """Only the new decoder architecture means its `num_kv_heads`."""
    if config.get("new_decoder_architecture"):
        return {"num_key_value_heads": config.get("num_kv_heads")}
    return {"num_key_value_heads": 1 if config.get("multi_query", True) else None, "num_kv_heads": None}


def _refined_web(config: Config) -> Config:
    """The larger of the first Falcons has what later was called the new decoder architecture."""
    new = config.get("new_decoder_architecture", config.get("model_type") == "RefinedWeb")
    more = {"new_decoder_architecture": new, "num_kv_heads": config.get("n_head_kv")}
    return {**more, **_falcon({**config, **more})}


def _gpt_bigcode(config: Config) -> Config:
    """Some files have a `num_key_value_heads` that is wrong."""
    return {"num_key_value_heads": 1 if config.get("multi_query", True) else None}


def _gptj(config: Config) -> Config:
    rotary, width, heads = (config.get(name) for name in ("rotary_dim", "n_embd", "n_head"))
    if not (isinstance(rotary, int) and isinstance(width, int) and isinstance(heads, int) and width and heads):
        return {}
    return {"partial_rotary_factor": rotary * heads / width}


CARDS = (
    Card(
        _GPT2, "dense", "gpt2:GPT2", ("GPT2LMHeadModel",), {"gpt2": _TIED}, text=("gpt2",),
        gguf=(
            GGUF(
                "gpt2",
                {"activation_function": "gelu_new", "without": ("rope",)},
                {
                    "block_count": "n_layer", "context_length": "n_positions", "embedding_length": "n_embd",
                    "feed_forward_length": "n_inner", "attention.head_count": "n_head",
                    "attention.layer_norm_epsilon": "layer_norm_epsilon",
                },
                layers="transformer.h",
                names=("wte", "wpe", "ln_f", "ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj"),
                transposed=frozenset({"attn_qkv", "attn_output", "ffn_up", "ffn_down"}),
            ),
        ),
    ),
    Card(_GPT2, "dense", "gpt2:GPTBigCode", ("GPTBigCodeForCausalLM",), {"gpt_bigcode": {"multi_query": True, **_TIED}},
         derive=_gpt_bigcode),
    Card(
        "StarCoder 2", "dense", "gpt2:StarCoder2", ("Starcoder2ForCausalLM",), {"starcoder2": ROPE},
        gguf=(
            GGUF(
                "starcoder2", {"hidden_act": "gelu_pytorch_tanh"}, FIELDS | {"attention.layer_norm_epsilon": "norm_epsilon"},
                flags={"use_bias": "attn_q.bias"}, names=("mlp.c_fc", "mlp.c_proj"),
            ),
        ),
    ),
    Card(_GPTJ, "dense", "gpt_neox:CodeGen", ("CodeGenForCausalLM",), {"codegen": {**ROPE, "rotary_dim": 64}}, derive=_gptj),
    Card(_GPTJ, "dense", "gpt_neox:GPTJ", ("GPTJForCausalLM",), {"gptj": {**ROPE, "rotary_dim": 64}}, derive=_gptj),
    Card(
        "GPT-NeoX (Pythia)", "dense", "gpt_neox:GPTNeoX", ("GPTNeoXForCausalLM",),
        {"gpt_neox": {**ROPE, "partial_rotary_factor": 0.25}},
        names={"rotary_emb_base": "rope_theta", "rotary_pct": "partial_rotary_factor"},
    ),
    Card(
        _FALCON, "dense", "falcon:Falcon", ("FalconForCausalLM",), {"falcon": _FALCON_DEFAULTS},
        derive=_falcon,
        gguf=(
            GGUF("falcon", _FALCON_FIXED, _FALCON_FIELDS, _finish_falcon, layers="transformer.h",
                 names=(*_FALCON_NAMES, "input_layernorm"), by_key_head=True),
            GGUF("falcon", _FALCON_FIXED, _FALCON_FIELDS, _finish_falcon, when=_has_two_norms, layers="transformer.h",
                 names=(*_FALCON_NAMES, "ln_mlp", "ln_attn"), by_key_head=True),
        ),
    ),
    Card(
        _FALCON, "dense", "falcon:Falcon", ("RWForCausalLM",),
        {"RefinedWeb": _FALCON_DEFAULTS, "RefinedWebModel": _FALCON_DEFAULTS},
        names={"n_head": "num_attention_heads", "n_layer": "num_hidden_layers"}, derive=_refined_web,
    ),
    Card(
        "StableLM", "dense", "stablelm:StableLM", ("StableLmForCausalLM",),
        {"stablelm": {**ROPE, "partial_rotary_factor": 0.25}},
    ),
    Card(
        "StableLM", "dense", "stablelm:StableLM", ("StableLMEpochForCausalLM",),
        {"stablelm_epoch": {**ROPE, **SILU, "partial_rotary_factor": 0.25}},
        names={"rope_pct": "partial_rotary_factor", "norm_eps": "layer_norm_eps", "rotary_emb_base": "rope_theta"},
    ),
    Card("Bloom", "dense", "alibi:Bloom", ("BloomForCausalLM",), {"bloom": {"seq_length": 2048, **_TIED}}),
    Card("MPT", "dense", "alibi:MPT", ("MptForCausalLM", "MPTForCausalLM"), {"mpt": _TIED}),
    Card("OPT", "dense", "opt:OPT", ("OPTForCausalLM",), {"opt": _TIED}, text=("opt",)),
    Card("Phi 1 to 3", "dense", "gpt_neox:Phi", ("PhiForCausalLM",), {"phi": _HALF_ROPE}),
    Card("Nemotron", "dense", "nemotron:Nemotron", ("NemotronForCausalLM",), {"nemotron": _HALF_ROPE}),
    Card(
        "Command R (Cohere 1 and 2)", "dense", "cohere:Cohere", ("CohereForCausalLM",), {"cohere": {"rope_theta": 5e5}},
        gguf=(GGUF("command-r", SILU, _LAYER_NORM, _finish_cohere, flags=_COHERE_FLAGS),),
    ),
    Card(
        "Command R (Cohere 1 and 2)", "dense", "cohere:Cohere2", ("Cohere2ForCausalLM",),
        {"cohere2": {**ROPE, "sliding_window": 4096, "sliding_window_pattern": 4}},
        gguf=(GGUF("cohere2", {**SILU, "sliding_window_pattern": 4}, _LAYER_NORM, _finish_cohere, flags=_COHERE_FLAGS),),
    ),
)  # fmt: skip
