"""Families some of whose layers are recurrent (see oracle.py)."""

from importlib.metadata import version
from typing import Any

from family import Family

# older ones norm all groups of Mamba 2 together, unlike the models' own code
GROUPS = 2 if tuple(map(int, version("transformers").split(".")[:2])) >= (5, 23) else 1
MAMBA2: dict[str, Any] = {
    "mamba_n_heads": 6,
    "mamba_d_head": 16,
    "mamba_n_groups": GROUPS,
    "mamba_d_state": 8,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
}

ALONE: dict[str, Any] = dict.fromkeys(
    ("num_attention_heads", "num_key_value_heads", "intermediate_size", "max_position_embeddings")
)
GRANITE: dict[str, Any] = {
    **MAMBA2,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "shared_intermediate_size": 32,
    "attention_multiplier": 0.3,
    "logits_scaling": 3.0,
    "residual_multiplier": 0.5,
    "embedding_multiplier": 2.0,
}

EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 32,
}
DELTA: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
}

NEMOTRON: dict[str, Any] = {
    "num_hidden_layers": None,
    "head_dim": 16,
    "mamba_num_heads": 6,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 8,
    "chunk_size": 8,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 32,
}
ZAMBA: dict[str, Any] = {
    "mamba_ngroups": 2,
    "n_mamba_heads": 6,
    "mamba_d_state": 8,
    "chunk_size": 8,
    "adapter_rank": 5,
    "num_key_value_heads": 6,
}
THIRDS: dict[str, Any] = {"linear_key_head_dim": 12, "linear_value_head_dim": 6}  # transformers saves convolutions in thirds

RECURRENT: dict[str, Family] = {
    "bamba": Family("BambaConfig", "BambaForCausalLM", {**MAMBA2, "attn_layer_indices": [1]}),
    "lfm2": Family(
        "Lfm2Config",
        "Lfm2ForCausalLM",
        {"block_multiple_of": 16, "layer_types": ["conv", "full_attention", "conv"], "conv_bias": True},
    ),
    "granite-hybrid": Family(
        "GraniteMoeHybridConfig", "GraniteMoeHybridForCausalLM", {**GRANITE, "num_local_experts": 4, "num_experts_per_tok": 2}
    ),
    "granite-hybrid-dense": Family(
        "GraniteMoeHybridConfig",
        "GraniteMoeHybridForCausalLM",
        {**GRANITE, "num_local_experts": 0, "position_embedding_type": "rope"},
    ),
    "falcon-h1": Family(
        "FalconH1Config",
        "FalconH1ForCausalLM",
        {
            **MAMBA2,
            "num_hidden_layers": 2,
            "mamba_d_ssm": 96,
            "mamba_rms_norm": True,
            "ssm_multipliers": [0.5, 0.9, 1.1, 0.8, 1.2],
            "mlp_multipliers": [0.7, 1.3],
            "key_multiplier": 0.6,
            "attention_in_multiplier": 0.8,
            "attention_out_multiplier": 0.9,
            "ssm_in_multiplier": 1.2,
            "ssm_out_multiplier": 0.7,
            "embedding_multiplier": 1.5,
            "lm_head_multiplier": 0.5,
        },
    ),
    "falcon-h1-no-norm": Family(
        "FalconH1Config", "FalconH1ForCausalLM", {**MAMBA2, "num_hidden_layers": 2, "mamba_d_ssm": 96, "mamba_rms_norm": False}
    ),
    "nemotron-h": Family(
        "NemotronHConfig", "NemotronHForCausalLM", {**NEMOTRON, "layers_block_type": ["mamba", "mlp", "attention", "mamba"]}
    ),
    "nemotron-h-moe": Family(
        "NemotronHConfig", "NemotronHForCausalLM", {**NEMOTRON, "layers_block_type": ["mamba", "moe", "attention", "mlp"]}
    ),
    "nemotron-h-narrow-moe": Family(
        "NemotronHConfig",
        "NemotronHForCausalLM",
        {
            **NEMOTRON,
            "layers_block_type": ["mamba", "moe", "attention"],
            "moe_latent_size": 20,
            "n_group": 2,
            "topk_group": 1,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.7,
        },
    ),
    "jamba": Family(
        "JambaConfig",
        "JambaForCausalLM",
        {"attn_layer_period": 3, "attn_layer_offset": 1, "num_experts": 4, "mamba_d_state": 8, "mamba_dt_rank": 5},
    ),
    "mamba": Family("MambaConfig", "MambaForCausalLM", {**ALONE, "state_size": 8, "use_bias": True}),
    "falcon-mamba": Family("FalconMambaConfig", "FalconMambaForCausalLM", {**ALONE, "state_size": 8}),
    "mamba2": Family(
        "Mamba2Config",
        "Mamba2ForCausalLM",
        {**ALONE, "num_heads": 6, "head_dim": 16, "state_size": 8, "n_groups": GROUPS, "chunk_size": 8},
    ),
    "qwen3-next": Family("Qwen3NextConfig", "Qwen3NextForCausalLM", {**DELTA, **EXPERTS, "mlp_only_layers": [2]}),
    "qwen3.5": Family("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", DELTA),
    "qwen3.5-moe": Family("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", {**DELTA, **EXPERTS}),
    "olmo-hybrid": Family(
        "OlmoHybridConfig",
        "OlmoHybridForCausalLM",
        {**DELTA, **THIRDS, "head_dim": None, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    ),
    "olmo-hybrid-still": Family(
        "OlmoHybridConfig",
        "OlmoHybridForCausalLM",
        {"num_key_value_heads": None, "linear_value_head_dim": 6, "linear_allow_neg_eigval": False},
    ),
    "kimi-linear": Family(
        "KimiLinearConfig",
        "KimiLinearForCausalLM",
        {
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "linear_head_dim": 8,
            "linear_num_heads": 4,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 12,
            "num_key_value_heads": 6,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "n_group": 2,
        },
    ),
    "zamba2": Family(
        "Zamba2Config",
        "Zamba2ForCausalLM",
        {
            **ZAMBA,
            "layers_block_type": ["hybrid", "mamba", "hybrid", "hybrid"],
            "num_hidden_layers": 4,
            "num_mem_blocks": 2,
            "use_shared_attention_adapter": True,
            "use_mem_rope": True,
        },
    ),
    "zamba2-one-block": Family(
        "Zamba2Config",
        "Zamba2ForCausalLM",
        {**ZAMBA, "layers_block_type": ["mamba", "hybrid", "hybrid"], "add_bias_linear": True},
    ),
    "lfm2-moe": Family(
        "Lfm2MoeConfig",
        "Lfm2MoeForCausalLM",
        {
            "layer_types": ["conv", "full_attention", "conv"],
            "num_dense_layers": 1,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
        },
    ),
    "minimax": Family(
        "MiniMaxConfig",
        "MiniMaxForCausalLM",
        {
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "block_size": 8,
            "linear_attn_alpha_factor": 0.7,
            "linear_attn_beta_factor": 1.2,
            "full_attn_alpha_factor": 0.9,
            "mlp_beta_factor": 1.1,
        },
    ),
}
