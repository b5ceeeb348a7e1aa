"""Latent attention (MLA): DeepSeek V2 and V3, and the families that took it over."""

from typing import Any

from quire.config.families.card import GGUF, ROPE, SILU, Card, Config
from quire.config.families.granite import granite_multipliers
from quire.config.families.mixtures import SPARSE_FIELDS
from quire.config.gguf_values import neat, number
from quire.files.gguf import GGUFHeader
from quire.types.errors import ModelError

_DEEPSEEK = "DeepSeek V2, V3, R1; Kimi K2"
LATENT = {"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
          "hidden_act": "silu", "rms_norm_eps": 1e-6}  # fmt: skip
_DEEPSEEK_V3 = {**ROPE, **LATENT, "first_k_dense_replace": 3, "n_routed_experts": 256, "n_shared_experts": 1,
                "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "n_group": 8, "topk_group": 4,
                "routed_scaling_factor": 2.5, "norm_topk_prob": True}  # fmt: skip


def _finish_deepseek(header: GGUFHeader, config: dict[str, Any]) -> None:
    """V2 and V3 have one GGUF architecture: V2 routes by a softmax, V3 by sigmoids."""
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
    rope, multiplier = config["rope_parameters"], number(header, "rope.scaling.yarn_log_multiplier", 0)
    if multiplier and rope["rope_type"] == "yarn":
        rope |= {"mscale": neat(10 * multiplier), "mscale_all_dim": neat(10 * multiplier)}


def _longcat(config: Config) -> Config:
    """A layer has two attentions."""
    count = config.get("num_layers")
    return {"num_hidden_layers": 2 * count} if isinstance(count, int) else {}


CARDS = (
    Card(
        _DEEPSEEK, "MLA, MoE", "deepseek:DeepseekV2", ("DeepseekV2ForCausalLM",),
        {"deepseek_v2": {**ROPE, **LATENT, "first_k_dense_replace": 0, "n_routed_experts": 64, "n_shared_experts": 2,
                         "moe_intermediate_size": 1407}},
        gguf=(
            GGUF("deepseek2", SILU, {**SPARSE_FIELDS, "attention.kv_lora_rank": "kv_lora_rank"}, _finish_deepseek),
        ),
    ),
    Card(_DEEPSEEK, "MLA, MoE", "deepseek:DeepseekV3", ("DeepseekV3ForCausalLM",),
         {"deepseek_v3": _DEEPSEEK_V3, "kimi_k2": _DEEPSEEK_V3}),
    Card("A.X K1", "MLA, MoE", "deepseek:AXK1", ("AXK1ForCausalLM",),
         {"axk1": {**_DEEPSEEK_V3, "first_k_dense_replace": 1, "n_routed_experts": 192}}),
    Card(
        "GLM 4.7 Flash", "MLA, MoE", "deepseek:Glm4MoELite", ("Glm4MoeLiteForCausalLM",),
        {"glm4_moe_lite": {**ROPE, **LATENT, "q_lora_rank": 768, "qk_nope_head_dim": 192, "v_head_dim": 256,
                           "rms_norm_eps": 1e-5, "n_routed_experts": 64, "n_shared_experts": 1, "routed_scaling_factor": 1.8,
                           "num_experts_per_tok": 4, "moe_intermediate_size": 1536, "first_k_dense_replace": 1}},
    ),
    Card(
        "LongCat-Flash", "MLA, MoE", "longcat:LongCat", ("LongcatFlashForCausalLM",),
        {"longcat_flash": {"rope_theta": 1e7, **LATENT, "rms_norm_eps": 1e-5, "n_routed_experts": 512, "zero_expert_num": 256,
                           "moe_topk": 12, "expert_ffn_hidden_size": 2048, "ffn_hidden_size": 12288,
                           "routed_scaling_factor": 6.0}},
        names={"moe_topk": "num_experts_per_tok", "ffn_hidden_size": "intermediate_size",
               "expert_ffn_hidden_size": "moe_intermediate_size"},
        derive=_longcat,
    ),
    Card(
        "MiniCPM3", "MLA", "deepseek:MiniCPM3", ("MiniCPM3ForCausalLM",),
        {"minicpm3": {**ROPE, **LATENT, "q_lora_rank": 768, "kv_lora_rank": 256, "qk_nope_head_dim": 64,
                      "qk_rope_head_dim": 32, "v_head_dim": None, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
                      "scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256}},
        derive=granite_multipliers,
    ),
    Card("Youtu", "MLA", "deepseek:Youtu", ("YoutuForCausalLM",), {"youtu": {**ROPE, **LATENT, "tie_word_embeddings": True}}),
)  # fmt: skip
