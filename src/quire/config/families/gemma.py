"""Gemma."""

from collections.abc import Mapping
from typing import Any

from quire.config.families.card import GGUF, ROPE, Card, Config
from quire.config.gguf_values import number
from quire.files.gguf import GGUFHeader

_TITLE = "Gemma 1 to 4, 3n, VaultGemma"
_SHAPE = {"head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6, "tie_word_embeddings": True}
_GEMMA2 = {**ROPE, **_SHAPE, "sliding_window": 4096, "sliding_window_pattern": 2, "query_pre_attn_scalar": 256,
           "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}  # fmt: skip
_LOCAL_ROPE = {"rope_theta": 1e6, "rope_local_base_freq": 1e4}
_PER_LAYER = {"hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262144}
_GEMMA4 = {**_SHAPE, "sliding_window": 512, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 262144,
           "max_position_embeddings": 131072,
           "rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                               "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25,
                                                  "rope_theta": 1e6}}}  # fmt: skip
_GEMMA4_SIZES = {"hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30}
_GELU = {"hidden_activation": "gelu_pytorch_tanh", "hidden_act": "gelu_pytorch_tanh", "attention_bias": False}


def _finish_gguf(header: GGUFHeader, config: dict[str, Any]) -> None:
    """The largest sizes scale queries by the hidden size per head, the others by the head size."""
    large = {"gemma2": 46, "gemma3_text": 62}[config["model_type"]] == config["num_hidden_layers"]
    per_head = config["hidden_size"] // config["num_attention_heads"]
    scale = number(header, "attention.scale", 0)
    config["query_pre_attn_scalar"] = round(scale**-2) if scale else per_head if large else config["head_dim"]
    pattern = header.get("attention.sliding_window_pattern", config["sliding_window_pattern"])
    if isinstance(pattern, list):
        config["layer_types"] = ["sliding_attention" if slides else "full_attention" for slides in pattern]
    else:
        config["sliding_window_pattern"] = pattern
    if config["model_type"] == "gemma3_text":
        local = {"rope_type": "default", "rope_theta": number(header, "rope.freq_base_swa", 1e4)}
        config["rope_parameters"] = {"full_attention": config["rope_parameters"], "sliding_attention": local}


def _gemma3n(config: Config) -> Config:
    """Every fifth layer has full attention."""
    count = config.get("num_hidden_layers")
    if config.get("layer_types") or not isinstance(count, int):
        return {}
    return {"layer_types": ["sliding_attention" if (index + 1) % 5 else "full_attention" for index in range(count)]}


def gemma4(config: Config) -> Config:
    """Every sixth layer and the last have full attention, with heads of another size."""
    count, types = config.get("num_hidden_layers"), config.get("layer_types")
    if not isinstance(count, int) or count < 1:
        return {}
    if not types:
        types = ["sliding_attention" if (index + 1) % 6 else "full_attention" for index in range(count)]
    if not isinstance(types, list):
        return {}
    types = [*types[:-1], "full_attention"]
    usual = config.get("num_key_value_heads"), config.get("head_dim")
    wide = usual[0], config.get("global_head_dim") or 512
    if config.get("attention_k_eq_v") and config.get("num_global_key_value_heads"):
        wide = config["num_global_key_value_heads"], wide[1]
    shapes = [usual if kind == "sliding_attention" else wide for kind in types]
    each = config.get("per_layer_config")
    if isinstance(each, Mapping):  # newer files list every layer that differs
        shapes = [usual] * len(types)
        for index, layer in each.items():
            if str(index).isdecimal() and int(index) < len(shapes) and isinstance(layer, Mapping):
                shapes[int(index)] = layer.get("num_key_value_heads", usual[0]), layer.get("head_dim", usual[1])
    return {"layer_types": types, "layer_shapes": shapes}


CARDS = (
    Card(
        _TITLE, "dense", "gemma:Gemma", ("GemmaForCausalLM",), {"gemma": {**ROPE, **_SHAPE}}, text=("gemma",),
        sizes={"vocab_size": 256000, "hidden_size": 3072, "intermediate_size": 24576, "num_hidden_layers": 28,
               "num_attention_heads": 16, "num_key_value_heads": 16, "max_position_embeddings": 8192},
        gguf=(GGUF("gemma", _GELU, norm_plus_one=True),),
    ),
    Card(
        _TITLE, "dense", "gemma:Gemma2", ("Gemma2ForCausalLM",), {"gemma2": _GEMMA2}, text=("gemma2",),
        overflows_in_float16=True,
        sizes={"vocab_size": 256000, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
               "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 8192},
        gguf=(GGUF("gemma2", {**_GELU, "sliding_window_pattern": 2}, finish=_finish_gguf, norm_plus_one=True),),
    ),
    Card(
        _TITLE, "dense", "gemma:Gemma3", ("Gemma3ForCausalLM",),
        {"gemma3_text": {**_LOCAL_ROPE, **_SHAPE, "sliding_window": 4096, "sliding_window_pattern": 6,
                         "query_pre_attn_scalar": 256, "num_attention_heads": 8, "num_key_value_heads": 4,
                         "vocab_size": 262208, "max_position_embeddings": 131072}},
        text=("gemma3_text",), overflows_in_float16=True,
        sizes={"hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26},
        gguf=(GGUF("gemma3", {**_GELU, "sliding_window_pattern": 6}, finish=_finish_gguf, norm_plus_one=True),),
    ),
    Card(
        _TITLE, "dense", "gemma3n:Gemma3n", ("Gemma3nForCausalLM",),
        {"gemma3n_text": {**_LOCAL_ROPE, **_SHAPE, **_PER_LAYER, "sliding_window": 512, "num_kv_shared_layers": 15,
                          "final_logit_softcapping": 30.0, "num_attention_heads": 8, "num_key_value_heads": 2,
                          "max_position_embeddings": 32768, "vocab_size": 262400}},
        derive=_gemma3n, text=("gemma3n_text",), overflows_in_float16=True,
        sizes={"hidden_size": 2048, "intermediate_size": 16384, "num_hidden_layers": 35},
    ),
    Card(
        _TITLE, "dense, MoE", "gemma4:Gemma4", ("Gemma4ForCausalLM",), {"gemma4_text": {**_GEMMA4, **_PER_LAYER}},
        derive=gemma4, text=("gemma4_text",), overflows_in_float16=True, sizes=_GEMMA4_SIZES,
    ),
    Card(
        _TITLE, "dense, MoE", "gemma4:Gemma4", ("Gemma4UnifiedForCausalLM",),
        {"gemma4_unified_text": {**_GEMMA4, "sliding_window": 1024, "max_position_embeddings": 262144}},
        derive=gemma4, text=("gemma4_unified_text",), overflows_in_float16=True, sizes=_GEMMA4_SIZES,
    ),
    Card(_TITLE, "dense", "gemma:VaultGemma", ("VaultGemmaForCausalLM",), {"vaultgemma": _GEMMA2}),
)  # fmt: skip
