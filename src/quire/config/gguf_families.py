"""GGUF architectures and the Hugging Face ones they are: one row of `ARCHITECTURES` each. What GGUF does not record (activation
functions, softmax scales of some sizes) is what the family always has."""

from typing import Any

from quire.config.gguf_hybrids import HYBRIDS
from quire.config.gguf_values import FIELDS, Architecture, experts_of, neat, number
from quire.files.gguf import GGUFHeader
from quire.types.errors import ModelError

_GPT2_FIELDS = {
    "block_count": "n_layer",
    "context_length": "n_positions",
    "embedding_length": "n_embd",
    "feed_forward_length": "n_inner",
    "attention.head_count": "n_head",
    "attention.layer_norm_epsilon": "layer_norm_epsilon",
}


def _finish_llama(header: GGUFHeader, config: dict[str, Any]) -> None:
    config["attention_bias"] = "blk.0.attn_q.bias" in header.tensors
    config["mlp_bias"] = "blk.0.ffn_up.bias" in header.tensors


def _finish_experts(header: GGUFHeader, config: dict[str, Any]) -> None:
    config["num_experts"] = config["num_local_experts"] = experts_of(header)
    if config["model_type"] == "mixtral":
        config["intermediate_size"] = config.pop("moe_intermediate_size", config.get("intermediate_size"))


def _finish_gemma(header: GGUFHeader, config: dict[str, Any]) -> None:
    """The largest sizes scale queries by the width per head, the others by the head's own size."""
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


def _finish_deepseek(header: GGUFHeader, config: dict[str, Any]) -> None:
    """V2's and V3's are one architecture: experts are chosen by a softmax in the one, and by sigmoids in the other."""
    rotary, key, value = (
        header.get(name) for name in ("rope.dimension_count", "attention.key_length", "attention.value_length")
    )
    key, value = header.get("attention.key_length_mla", key), header.get("attention.value_length_mla", value)
    if not all(isinstance(size, int) for size in (rotary, key, value)) or key <= rotary:
        raise ModelError(f"{header.path}: key_length, value_length and rope.dimension_count must tell the sizes of its heads")
    config |= {"qk_rope_head_dim": rotary, "qk_nope_head_dim": key - rotary, "v_head_dim": value}
    config["q_lora_rank"] = header.get("attention.q_lora_rank")
    config["norm_topk_prob"] = bool(header.get("expert_weights_norm"))
    if header.get("expert_gating_func", 1) == 2:
        corrected = any(name.endswith(".exp_probs_b.bias") for name in header.tensors)
        config |= {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
        config |= {"topk_method": "noaux_tc" if corrected else "greedy", "n_group": config.get("n_group", 1)}
        config["topk_group"] = config.get("topk_group", 1)
    else:
        config["topk_method"] = "group_limited_greedy" if config.get("n_group", 1) > 1 else "greedy"
    stretched, weight = config["rope_parameters"], number(header, "rope.scaling.yarn_log_multiplier", 0)
    if weight and stretched["rope_type"] == "yarn":
        stretched |= {"mscale": neat(10 * weight), "mscale_all_dim": neat(10 * weight)}


def _finish_gpt_oss(header: GGUFHeader, config: dict[str, Any]) -> None:
    """Every other layer has a window, the first one, too, unless the file says which."""
    slides = header.get("attention.sliding_window_pattern")
    if not isinstance(slides, list):
        slides = [layer % 2 == 0 for layer in range(config["num_hidden_layers"])]
    config["layer_types"] = ["sliding_attention" if yes else "full_attention" for yes in slides]
    config["rope_parameters"] |= {"truncate": False} if config["rope_parameters"]["rope_type"] == "yarn" else {}
    config["num_local_experts"] = experts_of(header)
    config["intermediate_size"] = config.pop("moe_intermediate_size", config.get("intermediate_size"))


def _finish_windows(header: GGUFHeader, config: dict[str, Any]) -> None:
    """Exaone 4: every fourth layer has no window, if there is one and the file does not say otherwise."""
    config |= {"attention_bias": False, "sliding_window": config.get("sliding_window")}
    if config["sliding_window"]:
        config["layer_types"] = _types(header, config["num_hidden_layers"])


def _types(header: GGUFHeader, count: int) -> list[str]:
    slides = header.get("attention.sliding_window_pattern")
    if not isinstance(slides, list):
        every = slides if isinstance(slides, int) and not isinstance(slides, bool) and slides > 0 else 4
        slides = [(layer + 1) % every != 0 for layer in range(count)]
    return ["sliding_attention" if yes else "full_attention" for yes in slides]


def _finish_olmo2(header: GGUFHeader, config: dict[str, Any]) -> None:
    """With windows it is the third; only layers without one are stretched."""
    if not config.get("sliding_window"):
        return
    config |= {"architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3"}
    config["layer_types"], full = _types(header, config["num_hidden_layers"]), config["rope_parameters"]
    local = {"rope_type": "default", "rope_theta": full["rope_theta"]}
    config["rope_parameters"] = {"full_attention": full, "sliding_attention": local}


def _finish_corrected(header: GGUFHeader, config: dict[str, Any]) -> None:
    """GLM 4.5 and dots.llm1."""
    config["use_qk_norm"] = "blk.0.attn_q_norm.weight" in header.tensors
    config["attention_bias"] = "blk.0.attn_q.bias" in header.tensors
    config["norm_topk_prob"] = bool(header.get("expert_weights_norm", True))


def _finish_minimax(header: GGUFHeader, config: dict[str, Any]) -> None:
    if header.get("expert_gating_func", 2) != 2:
        raise ModelError(f"{header.path}: experts must be chosen by sigmoids (expert_gating_func 2)")
    config["num_local_experts"] = experts_of(header)
    config["intermediate_size"] = config.pop("moe_intermediate_size", config.get("intermediate_size"))


def _finish_hunyuan(header: GGUFHeader, config: dict[str, Any]) -> None:
    config["attention_bias"] = "blk.0.attn_q.bias" in header.tensors
    if config["model_type"] == "hunyuan_v1_moe":
        config |= {"num_experts": experts_of(header), "moe_topk": config.pop("num_experts_per_tok", None)}
    config["intermediate_size"] = config.pop("moe_intermediate_size", config.get("intermediate_size"))


def _finish_seed(header: GGUFHeader, config: dict[str, Any]) -> None:
    config["attention_bias"] = "blk.0.attn_q.bias" in header.tensors
    config["attention_out_bias"] = "blk.0.attn_output.bias" in header.tensors


def _finish_cohere(header: GGUFHeader, config: dict[str, Any]) -> None:
    config["logit_scale"] = number(header, "logit_scale", 1.0)
    config["use_qk_norm"] = "blk.0.attn_q_norm.weight" in header.tensors
    config["attention_bias"] = "blk.0.attn_q.bias" in header.tensors


def _finish_starcoder2(header: GGUFHeader, config: dict[str, Any]) -> None:
    config["use_bias"] = "blk.0.attn_q.bias" in header.tensors


def _finish_falcon(header: GGUFHeader, config: dict[str, Any]) -> None:
    config["new_decoder_architecture"] = "blk.0.attn_norm_2.weight" in header.tensors
    config["num_kv_heads"] = config.pop("num_key_value_heads", 1)
    if not config["new_decoder_architecture"] and config["num_kv_heads"] != 1:
        raise ModelError(f"{header.path}: a Falcon of several key heads has norms of its own for attention (attn_norm_2)")


def _finish_shared(header: GGUFHeader, config: dict[str, Any]) -> None:
    _finish_experts(header, config)
    config["shared_expert_intermediate_size"] = header.get("expert_shared_feed_forward_length")


def _finish_exaone(header: GGUFHeader, config: dict[str, Any]) -> None:  # noqa: ARG001
    config["num_layers"] = config["num_hidden_layers"]
    config["layer_norm_epsilon"] = config["rms_norm_eps"]


_SPARSE = {
    "leading_dense_block_count": "first_k_dense_replace",
    "expert_count": "n_routed_experts",
    "expert_shared_count": "n_shared_experts",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
}
_LAYER_NORM = FIELDS | {"attention.layer_norm_epsilon": "layer_norm_eps"}
_STARCODER2 = FIELDS | {"attention.layer_norm_epsilon": "norm_epsilon"}
_FALCON = FIELDS | {"attention.layer_norm_epsilon": "layer_norm_epsilon", "feed_forward_length": "ffn_hidden_size"}
_NO_BIAS = {"attention_bias": False, "mlp_bias": False}
_GELU = {"hidden_activation": "gelu_pytorch_tanh", "hidden_act": "gelu_pytorch_tanh", "attention_bias": False}
_SILU = {"hidden_act": "silu"}
ARCHITECTURES: dict[str, Architecture] = {
    **HYBRIDS,
    "llama": Architecture("LlamaForCausalLM", "llama", _SILU, finish=_finish_llama),
    "llama with experts": Architecture("MixtralForCausalLM", "mixtral", _SILU, finish=_finish_experts),
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2", {**_SILU, "use_sliding_window": False}),
    "qwen3": Architecture("Qwen3ForCausalLM", "qwen3", {**_SILU, "use_sliding_window": False, "attention_bias": False}),
    "qwen3moe": Architecture(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        {**_SILU, "use_sliding_window": False, "attention_bias": False, "norm_topk_prob": True, "decoder_sparse_step": 1,
         "mlp_only_layers": []},
        finish=_finish_experts,
    ),
    "gemma": Architecture("GemmaForCausalLM", "gemma", _GELU),
    "gemma2": Architecture("Gemma2ForCausalLM", "gemma2", {**_GELU, "sliding_window_pattern": 2}, finish=_finish_gemma),
    "gemma3": Architecture("Gemma3ForCausalLM", "gemma3_text", {**_GELU, "sliding_window_pattern": 6}, finish=_finish_gemma),
    "phi3": Architecture("Phi3ForCausalLM", "phi3", _SILU),
    "deepseek2": Architecture(
        "DeepseekV2ForCausalLM",
        "deepseek_v2",
        _SILU,
        {**FIELDS, **_SPARSE, "attention.kv_lora_rank": "kv_lora_rank"},
        finish=_finish_deepseek,
    ),
    "glm4moe": Architecture("Glm4MoeForCausalLM", "glm4_moe", _SILU, FIELDS | _SPARSE, _finish_corrected),
    "dots1": Architecture("Dots1ForCausalLM", "dots1", _SILU, FIELDS | _SPARSE, _finish_corrected),
    "minimax-m2": Architecture("MiniMaxM2ForCausalLM", "minimax_m2", _SILU, finish=_finish_minimax),
    "hunyuan-dense": Architecture("HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense", _SILU, finish=_finish_hunyuan),
    "hunyuan-moe": Architecture("HunYuanMoEV1ForCausalLM", "hunyuan_v1_moe", _SILU, finish=_finish_hunyuan),
    "exaone4": Architecture("Exaone4ForCausalLM", "exaone4", _SILU, finish=_finish_windows),
    "glm4": Architecture("Glm4ForCausalLM", "glm4", _SILU, finish=_finish_llama),
    "seed_oss": Architecture("SeedOssForCausalLM", "seed_oss", _SILU, finish=_finish_seed),
    "gpt-oss": Architecture(
        "GptOssForCausalLM", "gpt_oss", {**_SILU, "attention_bias": True, "swiglu_alpha": 1.702, "swiglu_limit": 7.0},
        finish=_finish_gpt_oss,
    ),
    "internlm2": Architecture("LlamaForCausalLM", "llama", _SILU, finish=_finish_llama),  # as its conversion leaves it
    "arcee": Architecture("ArceeForCausalLM", "arcee", {"hidden_act": "relu2"}, finish=_finish_llama),
    "smollm3": Architecture("SmolLM3ForCausalLM", "smollm3", {**_SILU, **_NO_BIAS, "no_rope_layer_interval": 4}),
    "ernie4_5": Architecture("Ernie4_5ForCausalLM", "ernie4_5", {**_SILU, "use_bias": False}),
    "olmo2": Architecture("Olmo2ForCausalLM", "olmo2", {**_SILU, **_NO_BIAS}, finish=_finish_olmo2),
    "exaone": Architecture("ExaoneForCausalLM", "exaone", {"activation_function": "silu"}, finish=_finish_exaone),
    "command-r": Architecture("CohereForCausalLM", "cohere", _SILU, _LAYER_NORM, finish=_finish_cohere),
    "cohere2": Architecture(
        "Cohere2ForCausalLM", "cohere2", {**_SILU, "sliding_window_pattern": 4}, _LAYER_NORM, finish=_finish_cohere
    ),
    "starcoder2": Architecture(
        "Starcoder2ForCausalLM", "starcoder2", {"hidden_act": "gelu_pytorch_tanh"}, _STARCODER2, finish=_finish_starcoder2
    ),
    "falcon": Architecture(
        "FalconForCausalLM", "falcon", {"parallel_attn": True, "bias": False, "alibi": False, "multi_query": True}, _FALCON,
        finish=_finish_falcon,
    ),
    "qwen2moe": Architecture(
        "Qwen2MoeForCausalLM", "qwen2_moe",
        {**_SILU, "use_sliding_window": False, "norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": []},
        finish=_finish_shared,
    ),
    "olmoe": Architecture("OlmoeForCausalLM", "olmoe", {**_SILU, "norm_topk_prob": False, "attention_bias": False},
                          finish=_finish_experts),
    "gpt2": Architecture("GPT2LMHeadModel", "gpt2", {"activation_function": "gelu_new", "without": ("rope",)}, _GPT2_FIELDS),
}  # fmt: skip
