"""Families with latent attention (see oracle.py)."""

from typing import Any

from family import Family

RANKS: dict[str, Any] = {
    "initializer_range": 0.12,  # sums in another order differ a little, and three layers make more of it
    "num_key_value_heads": 6,
    "kv_lora_rank": 32,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}
EXPERTS: dict[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 4.0,
    "rope_theta": 1e4,
    "original_max_position_embeddings": 32,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.707,
    "mscale_all_dim": 1.2,
}
LONG: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "original_max_position_embeddings": 32,
    "factor": 4.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.0, 2.0, 3.0, 4.0],
}

LATENT: dict[str, Family] = {
    "deepseek-v2": Family(  # V2-Lite's way
        "DeepseekV2Config", "DeepseekV2ForCausalLM", {**RANKS, **EXPERTS, "q_lora_rank": ..., "rope_parameters": YARN}
    ),
    "deepseek-v2-groups": Family(
        "DeepseekV2Config",
        "DeepseekV2ForCausalLM",
        {**RANKS, **EXPERTS, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "attention_bias": True},
    ),
    "deepseek-v3": Family(
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        {**RANKS, **EXPERTS, "n_group": 4, "topk_group": 2, "rope_parameters": YARN},
    ),
    "deepseek-v3-halves": Family(
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        {**RANKS, **EXPERTS, "n_group": 1, "topk_group": 1, "rope_interleave": False, "q_lora_rank": ...},
    ),
    "axk1": Family(
        "AXK1Config",
        "AXK1ForCausalLM",
        {**RANKS, **EXPERTS, "n_group": 4, "topk_group": 2, "first_k_dense_replace": None},
    ),
    "glm4-moe-lite": Family("Glm4MoeLiteConfig", "Glm4MoeLiteForCausalLM", {**RANKS, **EXPERTS, "first_k_dense_replace": None}),
    "longcat": Family(
        "LongcatFlashConfig",
        "LongcatFlashForCausalLM",
        {
            **RANKS,
            "num_hidden_layers": None,
            "intermediate_size": None,
            "num_layers": 2,
            "head_dim": 8,
            "ffn_hidden_size": 40,
            "expert_ffn_hidden_size": 24,
            "n_routed_experts": 6,
            "zero_expert_num": 3,
            "moe_topk": 3,
            "routed_scaling_factor": 1.5,
        },
    ),
    "minicpm3": Family(
        "MiniCPM3Config", "MiniCPM3ForCausalLM", {**RANKS, "dim_model_base": 24, "v_head_dim": None, "rope_parameters": LONG}
    ),
    "youtu": Family("YoutuConfig", "YoutuForCausalLM", RANKS),
}
