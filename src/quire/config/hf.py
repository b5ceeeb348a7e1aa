"""A Hugging Face config.json as a plain dict, made explicit: the text part only, family defaults filled in, rope in one form.

Checkpoints leave out what equals the default of their config class, and older ones spell rope as `rope_theta` and
`rope_scaling`. Whoever reads the result finds every field that matters, and `rope_parameters`, whatever the file's age.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.config.dialects import common_words
from quire.config.plausible import too_many
from quire.files.reading import read_object, shown
from quire.types.errors import ModelError

# model_type -> what its config class assumes when the file is silent
_GEMMA_SHAPE = {"head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6, "tie_word_embeddings": True}
_GEMMA4 = {**_GEMMA_SHAPE, "sliding_window": 512, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 262144,
           "max_position_embeddings": 131072,
           "rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                               "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25,
                                                  "rope_theta": 1e6}}}  # fmt: skip
_QWEN2_VL = {"rope_theta": 1e6, "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 80,
             "rms_norm_eps": 1e-5}  # fmt: skip
_QWEN35 = {"rope_theta": 1e7, "partial_rotary_factor": 0.25, "head_dim": 256, "rms_norm_eps": 1e-6}
_UNBOUNDED = {"max_position_embeddings": 131072}  # nothing in them ends there, but arrays have to
_GLM = {"rope_theta": 1e4, "partial_rotary_factor": 0.5, "head_dim": 128, "num_key_value_heads": 2, "rms_norm_eps": 1.5625e-7}
_LATENT = {"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
           "hidden_act": "silu", "rms_norm_eps": 1e-6}  # fmt: skip
_DEEPSEEK_V3 = {"rope_theta": 1e4, **_LATENT, "first_k_dense_replace": 3, "n_routed_experts": 256, "n_shared_experts": 1,
                "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "n_group": 8, "topk_group": 4,
                "routed_scaling_factor": 2.5, "norm_topk_prob": True}  # fmt: skip
_BAILING = {"rope_theta": 1e4, "hidden_act": "silu", "first_k_dense_replace": 0, "num_shared_experts": 0}
_LLAMA4 = {"rope_theta": 5e5, "head_dim": 128, "rms_norm_eps": 1e-5, "attention_chunk_size": 8192, "num_experts_per_tok": 1,
           "num_local_experts": 16, "hidden_act": "silu", "intermediate_size": 8192, "intermediate_size_mlp": 16384,
           "num_attention_heads": 40, "num_key_value_heads": 8}  # fmt: skip
FAMILY_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"rope_theta": 1e4},
    "mistral": {"rope_theta": 1e4, "sliding_window": 4096},
    "mixtral": {"rope_theta": 1e6, "sliding_window": None, "num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen2": {"rope_theta": 1e4, "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28},
    "qwen3": {"rope_theta": 1e4, "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28, "head_dim": 128},
    "qwen3_moe": {"rope_theta": 1e4, "use_sliding_window": False, "sliding_window": 4096, "norm_topk_prob": False},
    "qwen2_vl": _QWEN2_VL, "qwen2_vl_text": _QWEN2_VL, "qwen2_5_vl": _QWEN2_VL, "qwen2_5_vl_text": _QWEN2_VL,
    "qwen3_vl_text": {"rope_theta": 5e5, "head_dim": 128, "max_position_embeddings": 128000},
    "qwen3_vl_moe_text": {"rope_theta": 5e5, "max_position_embeddings": 128000, "norm_topk_prob": True},
    "gemma": {"rope_theta": 1e4, **_GEMMA_SHAPE},
    "gemma2": {"rope_theta": 1e4, **_GEMMA_SHAPE, "sliding_window": 4096, "sliding_window_pattern": 2,
               "query_pre_attn_scalar": 256, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    "gemma3_text": {"rope_theta": 1e6, "rope_local_base_freq": 1e4, **_GEMMA_SHAPE, "sliding_window": 4096,
                    "sliding_window_pattern": 6, "query_pre_attn_scalar": 256, "num_attention_heads": 8,
                    "num_key_value_heads": 4, "vocab_size": 262208, "max_position_embeddings": 131072},
    "gpt_oss": {"rope_theta": 1.5e5, "head_dim": 64, "sliding_window": 128, "sliding_window_pattern": 2, "rms_norm_eps": 1e-5,
                "num_local_experts": 128, "num_experts_per_tok": 4, "attention_bias": True, "swiglu_alpha": 1.702,
                "swiglu_limit": 7.0, "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
                                                      "truncate": False, "original_max_position_embeddings": 4096}},
    "phi3": {"rope_theta": 1e4, "sliding_window": None},
    "llama4_text": _LLAMA4, "llama4": _LLAMA4,
    "gpt2": {"tie_word_embeddings": True},
    "opt": {"tie_word_embeddings": True},
    "arcee": {"rope_theta": 1e4, "rms_norm_eps": 1e-5},
    "cohere": {"rope_theta": 5e5},
    "cohere2": {"rope_theta": 1e4, "sliding_window": 4096, "sliding_window_pattern": 4},
    "ernie4_5": {"rope_theta": 5e5, "head_dim": 128, "rms_norm_eps": 1e-5},
    "exaone": {"rope_theta": 1e4},
    "exaone4": {"rope_theta": 1e4, "sliding_window": 4096, "sliding_window_pattern": 4, "rms_norm_eps": 1e-5},
    "falcon": {"rope_theta": 1e4, "max_position_embeddings": 2048},
    "glm": _GLM, "glm4": _GLM,
    "gpt_bigcode": {"multi_query": True, "tie_word_embeddings": True},
    "gpt_neox": {"rope_theta": 1e4, "partial_rotary_factor": 0.25},
    "gptj": {"rope_theta": 1e4, "rotary_dim": 64}, "codegen": {"rope_theta": 1e4, "rotary_dim": 64},
    "granite": {"rope_theta": 1e4},
    "helium": {"rope_theta": 1e5, "head_dim": 128, "rms_norm_eps": 1e-8},
    "hunyuan_v1_dense": {"rope_theta": 1e4, "rms_norm_eps": 1e-5},
    "nemotron": {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
    "olmo": {"rope_theta": 1e4},
    "olmo2": {"rope_theta": 1e4, "rms_norm_eps": 1e-5},
    "olmo3": {"rope_theta": 5e5, "rms_norm_eps": 1e-5, "sliding_window": 4096, "sliding_window_pattern": 4},
    "phi": {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
    "seed_oss": {"rope_theta": 1e4, "head_dim": 128},
    "smollm3": {"rope_theta": 2e6, "use_sliding_window": False},
    "stablelm": {"rope_theta": 1e4, "partial_rotary_factor": 0.25},
    "starcoder2": {"rope_theta": 1e4},
    "bamba": {"rope_theta": 1e4, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5, "mamba_d_state": 256},
    "lfm2": {"rope_theta": 1e6, "hidden_act": "silu"}, "lfm2_moe": {"rope_theta": 1e6, "hidden_act": "silu"},
    "minimax": {"rope_theta": 1e6, "rms_norm_eps": 1e-5, "num_local_experts": 8, "num_experts_per_tok": 2},
    "mamba": _UNBOUNDED, "falcon_mamba": _UNBOUNDED, "mamba2": {**_UNBOUNDED, "n_groups": 8, "state_size": 128, "head_dim": 64},
    "granitemoehybrid": {"rope_theta": 1e4, "mamba_d_state": 256},
    "falcon_h1": {"rope_theta": 1e5, "mamba_d_ssm": 1024, "mamba_d_state": 256, "rms_norm_eps": 1e-5},
    "jamba": {"mamba_d_state": 16},
    "qwen3_next": {**_QWEN35, "norm_topk_prob": True},
    "qwen3_5_text": _QWEN35, "qwen3_5_moe_text": {**_QWEN35, "norm_topk_prob": True},
    "kimi_linear": {**_LATENT, "q_lora_rank": None, "rms_norm_eps": 1e-5, "num_experts": 256, "num_experts_per_token": 8,
                    "num_shared_experts": 1, "moe_renormalize": True, "num_expert_group": 1, "topk_group": 1,
                    "routed_scaling_factor": 2.446, "first_k_dense_replace": 1, "moe_intermediate_size": 1024,
                    "num_attention_heads": 32},
    "zamba2": {"rope_theta": 1e4, "hidden_act": "gelu", "rms_norm_eps": 1e-5, "mamba_d_state": 64, "n_mamba_heads": 8,
               "num_attention_heads": 32, "tie_word_embeddings": True},
    "olmo_hybrid": {"rms_norm_eps": 1e-6, "hidden_act": "silu"},
    "nemotron_h": {"head_dim": 128, "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128,
                   "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 7688,
                   "moe_shared_expert_intermediate_size": 7688},
    "bloom": {"seq_length": 2048, "tie_word_embeddings": True},
    "mpt": {"tie_word_embeddings": True},
    "baichuan": {"rope_theta": 1e4},
    "internlm2": {"rope_theta": 1e4}, "internlm3": {"rope_theta": 1e4},
    "minicpm": {"rope_theta": 1e4, "tie_word_embeddings": True},
    "dbrx": {"rope_theta": 1e4},
    "ernie4_5_moe": {"rope_theta": 5e5, "rms_norm_eps": 1e-5},
    "glm4_moe": {"rope_theta": 1e4, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5, "first_k_dense_replace": 1},
    "granitemoe": {"rope_theta": 1e4}, "granitemoeshared": {"rope_theta": 1e4},
    "hunyuan_v1_moe": {"rope_theta": 1e4, "rms_norm_eps": 1e-5},
    "minimax_m2": {"rope_theta": 5e6, "head_dim": 128},
    "olmoe": {"rope_theta": 1e4, "rms_norm_eps": 1e-5, "norm_topk_prob": False},
    "phimoe": {"rope_theta": 1e6, "rms_norm_eps": 1e-5},
    "qwen2_moe": {"rope_theta": 1e4, "use_sliding_window": False, "sliding_window": 4096, "norm_topk_prob": False},
    "deepseek_v2": {"rope_theta": 1e4, **_LATENT, "first_k_dense_replace": 0, "n_routed_experts": 64, "n_shared_experts": 2,
                    "moe_intermediate_size": 1407},
    "deepseek_v3": _DEEPSEEK_V3, "kimi_k2": _DEEPSEEK_V3,
    "axk1": {**_DEEPSEEK_V3, "first_k_dense_replace": 1, "n_routed_experts": 192},
    "glm4_moe_lite": {"rope_theta": 1e4, **_LATENT, "q_lora_rank": 768, "qk_nope_head_dim": 192, "v_head_dim": 256,
                      "rms_norm_eps": 1e-5, "n_routed_experts": 64, "n_shared_experts": 1, "routed_scaling_factor": 1.8,
                      "num_experts_per_tok": 4, "moe_intermediate_size": 1536, "first_k_dense_replace": 1},
    "minicpm3": {"rope_theta": 1e4, **_LATENT, "q_lora_rank": 768, "kv_lora_rank": 256, "qk_nope_head_dim": 64,
                 "qk_rope_head_dim": 32, "v_head_dim": None, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
                 "scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256},
    "youtu": {"rope_theta": 1e4, **_LATENT, "tie_word_embeddings": True},
    "aquila": {"rope_theta": 1e4}, "internlm": {"rope_theta": 1e4}, "iquestcoder": {"rope_theta": 1e4},
    "orion": {"rope_theta": 1e4}, "PanguEmbedded": {"rope_theta": 1e4}, "xverse": {"rope_theta": 1e4},
    "RefinedWeb": {"rope_theta": 1e4, "max_position_embeddings": 2048},
    "RefinedWebModel": {"rope_theta": 1e4, "max_position_embeddings": 2048},
    "bailing_moe": _BAILING, "bailing_moe_v2": {**_BAILING, "partial_rotary_factor": 0.5},
    "qwen": {"rope_theta": 1e4, "hidden_act": "silu"},
    "stablelm_epoch": {"rope_theta": 1e4, "partial_rotary_factor": 0.25, "hidden_act": "silu"},
    "longcat_flash": {"rope_theta": 1e7, **_LATENT, "rms_norm_eps": 1e-5, "n_routed_experts": 512, "zero_expert_num": 256,
                      "moe_topk": 12, "expert_ffn_hidden_size": 2048, "ffn_hidden_size": 12288, "routed_scaling_factor": 6.0},
    "apertus": {"rope_theta": 1.2e7, "rms_norm_eps": 1e-5, "hidden_act": "xielu"},
    "afmoe": {"rope_theta": 1e4, "head_dim": 128, "rms_norm_eps": 1e-5, "sliding_window": 1024, "num_dense_layers": 1,
              "num_experts": 64, "num_experts_per_tok": 6, "num_shared_experts": 2, "global_attn_every_n_layers": 4},
    "cwm": {"rope_theta": 1e6, "head_dim": 128, "rms_norm_eps": 1e-5, "sliding_window": 8192,
            "rope_scaling": {"rope_type": "llama3", "factor": 16.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                             "original_max_position_embeddings": 8192}},
    "deci": {"rope_theta": 1e4}, "nemotron-nas": {"rope_theta": 1e4}, "solar": {"rope_theta": 1e4},
    "deepseek": {"rope_theta": 1e4, "hidden_act": "silu", "first_k_dense_replace": 0, "n_shared_experts": None},
    "dots1": {"rope_theta": 1e4, "sliding_window": 4096, "max_window_layers": 62, "norm_topk_prob": False,
              "first_k_dense_replace": 0, "n_shared_experts": None},
    "exaone_moe": {"rope_theta": 1e4, "sliding_window": 4096, "sliding_window_pattern": 4, "rms_norm_eps": 1e-5,
                   "first_k_dense_replace": 1, "num_experts": 64, "num_shared_experts": 1, "routed_scaling_factor": 2.5},
    "flex_olmo": {"rope_theta": 5e5, "rms_norm_eps": 1e-6, "norm_topk_prob": False},
    "gemma3n_text": {"rope_theta": 1e6, "rope_local_base_freq": 1e4, **_GEMMA_SHAPE, "sliding_window": 512,
                     "num_kv_shared_layers": 15, "final_logit_softcapping": 30.0, "hidden_size_per_layer_input": 256,
                     "vocab_size_per_layer_input": 262144, "num_attention_heads": 8, "num_key_value_heads": 2,
                     "max_position_embeddings": 32768, "vocab_size": 262400},
    "gemma4_text": {**_GEMMA4, "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262144},
    "gemma4_unified_text": {**_GEMMA4, "sliding_window": 1024, "max_position_embeddings": 262144},
    "hyperclovax": {"rope_theta": 1e4},
    "jais2": {"rope_theta": 1e4, "attention_bias": True, "mlp_bias": True, "hidden_act": "relu2"},
    "mimo": {"rope_theta": 1e4, "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28},
    "mimo_v2_flash": {"head_dim": 192, "v_head_dim": 128, "sliding_window": 129, "attention_value_scale": 0.707,
                      "num_attention_heads": 64, "num_key_value_heads": 4, "rms_norm_eps": 1e-5, "n_shared_experts": None,
                      "rope_parameters": {
                          "full_attention": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.334},
                          "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.334}}},
    "ministral": {"rope_theta": 1e4, "sliding_window": 4096},
    "ministral3": {"rope_theta": 1e6, "head_dim": 128, "rms_norm_eps": 1e-5,
                   "rope_scaling": {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 16384,
                                    "beta_fast": 32.0, "beta_slow": 1.0, "mscale_all_dim": 1.0, "mscale": 1.0,
                                    "llama_4_scaling_beta": 0.1}},
    "solar_open": {"rope_theta": 1e6, "head_dim": 128, "rms_norm_eps": 1e-5, "first_k_dense_replace": 0},
    "vaultgemma": {"rope_theta": 1e4, **_GEMMA_SHAPE, "sliding_window": 4096, "sliding_window_pattern": 2,
                   "query_pre_attn_scalar": 256, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
}  # fmt: skip
# what a config nested in another one may leave out besides: sizes that equal its class's
_SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
              "num_attention_heads": 32, "max_position_embeddings": 2048},
    "mistral": {"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
                "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072},
    "qwen2": {"vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32,
              "num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 32768},
    "qwen3": {"vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32,
              "num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 32768},
    "gemma": {"vocab_size": 256000, "hidden_size": 3072, "intermediate_size": 24576, "num_hidden_layers": 28,
              "num_attention_heads": 16, "num_key_value_heads": 16, "max_position_embeddings": 8192},
    "gemma2": {"vocab_size": 256000, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
               "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 8192},
    "gemma3_text": {"hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26},
    "gemma3n_text": {"hidden_size": 2048, "intermediate_size": 16384, "num_hidden_layers": 35},
    "gemma4_text": {"hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30},
    "gemma4_unified_text": {"hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30},
}  # fmt: skip
# model_type -> that of its nested text model, where that is silent
_TEXT_TYPES = {
    "llava": "llama", "llava_next": "llama", "llava_next_video": "llama", "llava_onevision": "qwen2", "vipllava": "llama",
    "video_llava": "llama", "mistral3": "mistral", "internvl": "qwen2", "paligemma": "gemma", "gemma3": "gemma3_text",
    "gemma3n": "gemma3n_text", "gemma4": "gemma4_text", "gemma4_unified": "gemma4_unified_text",
    "got_ocr2": "qwen2", "idefics2": "mistral", "idefics3": "llama", "smolvlm": "llama", "qwen2_vl": "qwen2_vl_text",
    "qwen2_5_vl": "qwen2_5_vl_text", "qwen3_vl": "qwen3_vl_text", "qwen3_vl_moe": "qwen3_vl_moe_text", "qwen2_audio": "qwen2",
    "voxtral": "llama", "llama4": "llama4_text", "lighton_ocr": "qwen3", "deepseek_vl": "llama",
    "qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text",
}  # fmt: skip
# rope types whose parameters name the length they were stretched from
_STRETCHED = ("llama3", "yarn", "longrope")
# other names of the same; "mrope" turns by three positions, which are one where there is only text
_ROPE_NAMES = {"su": "longrope", "mrope": "default"}
_FLOATS = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}
_NULL_IS_SILENT = frozenset({"rope_parameters", "rope_scaling", "rope_theta", "rope_local_base_freq", "partial_rotary_factor"})
_SHARED_WITH_OUTER = ("dtype", "torch_dtype", "eos_token_id", "bos_token_id", "pad_token_id", "tie_word_embeddings",
                      "quantization_config", "compression_config")  # fmt: skip


def read_json(path: Path, *, required: bool = True) -> dict[str, Any]:
    found = read_object(path, _untag)
    if found is None and required:
        raise ModelError(f"{path}: the checkpoint has no {path.name}")
    return found or {}


def _untag(value: dict[str, Any]) -> Any:
    """JSON has no infinities; transformers writes them as {"__float__": "Infinity"}."""
    tagged = value.get("__float__") if len(value) == 1 else None
    return _FLOATS.get(tagged, value) if isinstance(tagged, str) else value


def explicit_config(raw: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The text model's config with overrides (merged into nested objects), defaults and `rope_parameters`."""
    merged = _merge(raw, overrides)
    text, shapes = merged.get("text_config"), dict[str, Any]()
    if isinstance(text, dict):
        outer = {key: merged[key] for key in (*_SHARED_WITH_OUTER, "architectures") if key in merged}
        silent = {"model_type": _TEXT_TYPES.get(str(merged.get("model_type")), "")}
        merged = {**silent, **outer, **{key: value for key, value in text.items() if key != "architectures"}}
        shapes = {"hidden_act": "silu", **_SHAPES.get(str(merged["model_type"]), {})}
    spoken = {key: value for key, value in merged.items() if value is not None or key not in _NULL_IS_SILENT}
    config = {**shapes, **FAMILY_DEFAULTS.get(str(spoken.get("model_type")), {}), **spoken}
    if spoken.get("rope_parameters") and "rope_scaling" not in spoken:
        config.pop("rope_scaling", None)  # the file says it another way
    for wrong in too_many(config):
        raise ModelError(f"{wrong.field} {wrong.where} must be {wrong.right}, got {shown(wrong.value)}")
    config |= common_words(config)
    if isinstance(config.get("rope_parameters"), dict) and config.get("model_type") in FAMILY_DEFAULTS:
        config["rope_parameters"] = _complete(config["rope_parameters"], config)
    if "_sliding_window_pattern" in config:
        config["sliding_window_pattern"] = config["_sliding_window_pattern"]
    if not config.get("use_sliding_window", True):
        config["sliding_window"] = None
    stated = {key for key in ("rope_theta", "rope_scaling") if key in overrides}
    if not config.get("rope_parameters") or (stated and "rope_parameters" not in overrides):
        config.update(_rope_parameters(config, stated))
    rope = config.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        raise ModelError(f"config.json: rope_parameters must be an object or null, got {shown(rope)}")
    rope_full = rope.get("full_attention", rope)
    if isinstance(rope_full, dict) and "rope_theta" in rope_full:
        config["rope_theta"] = rope_full["rope_theta"]  # the family's default is not this model's
    return config


def _complete(rope: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """`rope_parameters` of a file: null is silence, and what a layer type is silent about is the family's."""
    spoken = {key: _complete(value, {}) if isinstance(value, Mapping) else value for key, value in rope.items()}
    spoken = {key: value for key, value in spoken.items() if value is not None}
    if isinstance(kind := rope.get("rope_type"), str):
        spoken["rope_type"] = _ROPE_NAMES.get(kind, kind)
    local = config.get("rope_local_base_freq")
    if local is not None and not {"full_attention", "sliding_attention"}.isdisjoint(rope):
        for layers, theta in (("full_attention", config.get("rope_theta")), ("sliding_attention", local)):
            spoken[layers] = {"rope_type": "default", "rope_theta": theta} | spoken.get(layers, {})
    return spoken


def _merge(base: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in overrides.items():
        old = merged.get(key)
        merged[key] = _merge(old, value) if isinstance(old, dict) and isinstance(value, Mapping) else value
    return merged


def _rope_parameters(config: dict[str, Any], stated: set[str]) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling` in today's form; nothing for a model without them."""
    if config.get("rope_theta") is None:
        return {}
    old = config.get("rope_parameters")
    if isinstance(old, dict) and "rope_type" in old:  # an override of one of the two keeps the other
        theta = config["rope_theta"] if "rope_theta" in stated else old.get("rope_theta", config["rope_theta"])
        scaling = config.get("rope_scaling") if "rope_scaling" in stated else old
    else:
        theta, scaling = config["rope_theta"], config.get("rope_scaling")
    if scaling is not None and not isinstance(scaling, dict):
        raise ModelError(f"config.json: rope_scaling must be an object or null, got {shown(scaling)}")
    rope = {"rope_theta": theta, **{key: value for key, value in (scaling or {}).items() if key not in ("type", "rope_theta")}}
    kind = (scaling or {}).get("rope_type") or (scaling or {}).get("type") or "default"
    rope["rope_type"] = _ROPE_NAMES.get(kind, kind) if isinstance(kind, str) else kind
    if rope["rope_type"] in _STRETCHED:
        outside = config.get("original_max_position_embeddings")
        rope.setdefault("original_max_position_embeddings", outside or config.get("max_position_embeddings"))
    if config.get("partial_rotary_factor") is not None:
        rope.setdefault("partial_rotary_factor", config["partial_rotary_factor"])
    if config.get("rope_local_base_freq") is None:
        return {"rope_parameters": rope}
    local = {"rope_type": "default", "rope_theta": config["rope_local_base_freq"]}
    return {"rope_parameters": {"full_attention": rope, "sliding_attention": local}}
