"""Test entries of model families: each is compared with transformers and runs in the columns of the matrix (see oracle.py)."""

from typing import Any

import other_names
from family import Family
from latent_families import LATENT

PLAIN: dict[str, Any] = {"num_key_value_heads": None, "intermediate_size": None}
BY_TYPE: dict[str, Any] = {
    "full_attention": {
        "rope_type": "yarn",
        "factor": 4.0,
        "rope_theta": 1e4,
        "original_max_position_embeddings": 32,
        "attention_factor": 1.2,
    },
    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LOCAL: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
GRANITE: dict[str, Any] = {
    "attention_multiplier": 0.3,
    "logits_scaling": 3.0,
    "residual_multiplier": 0.5,
    "embedding_multiplier": 2.0,
}
GLM_MOE: dict[str, Any] = {
    "head_dim": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "routed_scaling_factor": 1.5,
}
NAMES = ("hidden_size", "num_attention_heads", "num_hidden_layers", "max_position_embeddings")
MPT: dict[str, Any] = {**PLAIN, **dict.fromkeys(NAMES), "d_model": 48, "n_heads": 6, "n_layers": 3, "max_seq_len": 128}

LLAMA4: dict[str, Any] = {
    "head_dim": 8,
    "num_hidden_layers": 4,
    "no_rope_layers": [1, 1, 0, 1],
    "attention_chunk_size": 8,
    "floor_scale": 4,
    "intermediate_size_mlp": 56,
    "interleave_moe_layer_step": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
}

GEMMA4: dict[str, Any] = {
    "head_dim": 8,
    "global_head_dim": 16,
    "sliding_window": 6,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 199,
    "num_hidden_layers": 5,
    "layer_types": [*("sliding_attention", "full_attention") * 2, "full_attention"],
    "initializer_range": 0.1,
}

MORE: dict[str, Family] = {
    "afmoe": Family(
        "AfmoeConfig",
        "AfmoeForCausalLM",
        {
            **EXPERTS,
            "head_dim": 16,
            "sliding_window": 6,
            "global_attn_every_n_layers": 2,
            "mup_enabled": True,
            "route_scale": 1.5,
            "initializer_range": 0.1,
        },
        settle=other_names.random_routers,
    ),
    "apertus": Family("ApertusConfig", "ApertusForCausalLM"),
    "arcee": Family("ArceeConfig", "ArceeForCausalLM", {"mlp_bias": True}),
    "cwm": Family("CwmConfig", "CwmForCausalLM", {"head_dim": 8, "sliding_window": 7, "num_hidden_layers": 5}),
    "cohere": Family("CohereConfig", "CohereForCausalLM", {"logit_scale": 0.5}),
    "cohere-head-norms": Family("CohereConfig", "CohereForCausalLM", {"use_qk_norm": True, "attention_bias": True}),
    "cohere2": Family(
        "Cohere2Config", "Cohere2ForCausalLM", {"sliding_window": 7, "num_hidden_layers": 4, "sliding_window_pattern": 2}
    ),
    "ernie4_5": Family("Ernie4_5Config", "Ernie4_5ForCausalLM", {"head_dim": 16}),
    "ernie4_5-biases": Family("Ernie4_5Config", "Ernie4_5ForCausalLM", {"head_dim": 8, "use_bias": True}),
    "exaone4": Family(
        "Exaone4Config", "Exaone4ForCausalLM", {"sliding_window": 6, "num_hidden_layers": 4, "sliding_window_pattern": 4}
    ),
    "exaone4-no-windows": Family(
        "Exaone4Config", "Exaone4ForCausalLM", {"sliding_window": None, "layer_types": ["full_attention"] * 3}
    ),
    "falcon": Family("FalconConfig", "FalconForCausalLM", PLAIN),
    "falcon-new": Family("FalconConfig", "FalconForCausalLM", {**PLAIN, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon-new-one-norm": Family(
        "FalconConfig",
        "FalconForCausalLM",
        {**PLAIN, "new_decoder_architecture": True, "num_kv_heads": 3, "num_ln_in_parallel_attn": 1, "ffn_hidden_size": 80},
    ),
    "falcon-in-turn": Family(
        "FalconConfig", "FalconForCausalLM", {**PLAIN, "parallel_attn": False, "multi_query": False, "bias": True}
    ),
    "gemma3n": Family(
        "Gemma3nTextConfig",
        "Gemma3nForCausalLM",
        {
            "head_dim": 8,
            "sliding_window": 6,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 180,  # larger ids have the first one's input
            "num_hidden_layers": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention", "sliding_attention"],
            "num_kv_shared_layers": 2,
            "altup_num_inputs": 3,
            "laurel_rank": 6,
            "intermediate_size": [80, 80, 64, 80, 80],
            "activation_sparsity_pattern": [0.9, 0.5, 0.0, 0.0, 0.8],
            "initializer_range": 0.1,
        },
    ),
    "gemma4": Family(
        "Gemma4TextConfig",
        "Gemma4ForCausalLM",
        {**GEMMA4, "num_kv_shared_layers": 2, "use_double_wide_mlp": True, "final_logit_softcapping": 20.0},
    ),
    "gemma4-unified": Family(
        "Gemma4UnifiedTextConfig",
        "Gemma4UnifiedForCausalLM",
        {
            **{name: value for name, value in GEMMA4.items() if "per_layer" not in name},
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "num_kv_shared_layers": 1,
        },
    ),
    "gemma4-experts": Family(
        "Gemma4TextConfig",
        "Gemma4ForCausalLM",
        {
            **GEMMA4,
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 24,
        },
    ),
    "glm": Family("GlmConfig", "GlmForCausalLM", {"head_dim": 16}),
    "glm4": Family("Glm4Config", "Glm4ForCausalLM", {"head_dim": 16}),
    "gpt-bigcode": Family("GPTBigCodeConfig", "GPTBigCodeForCausalLM", PLAIN),
    "gpt-bigcode-many-keys": Family("GPTBigCodeConfig", "GPTBigCodeForCausalLM", {**PLAIN, "multi_query": False}),
    "gpt-neox": Family("GPTNeoXConfig", "GPTNeoXForCausalLM", {"num_key_value_heads": None, "rotary_pct": 0.5}),
    "gpt-neox-in-turn": Family(
        "GPTNeoXConfig",
        "GPTNeoXForCausalLM",
        {"num_key_value_heads": None, "use_parallel_residual": False, "attention_bias": False, "tie_word_embeddings": True},
    ),
    "codegen": Family("CodeGenConfig", "CodeGenForCausalLM", {**PLAIN, "rotary_dim": 4, "num_attention_heads": 8}),
    "gptj": Family("GPTJConfig", "GPTJForCausalLM", {**PLAIN, "rotary_dim": 4}),
    "granite": Family("GraniteConfig", "GraniteForCausalLM", GRANITE),
    "helium": Family("HeliumConfig", "HeliumForCausalLM", {"head_dim": 8}),
    "hunyuan": Family(
        "HunYuanDenseV1Config",
        "HunYuanDenseV1ForCausalLM",
        {"head_dim": 8, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 50.0, "factor": 1.0}},
    ),
    "hyperclovax": Family("HyperCLOVAXConfig", "HyperCLOVAXForCausalLM", GRANITE),
    "jais2": Family("Jais2Config", "Jais2ForCausalLM"),
    "ministral": Family(
        "MinistralConfig",
        "MinistralForCausalLM",
        {"head_dim": 8, "sliding_window": 7, "layer_types": ["full_attention", "sliding_attention", "sliding_attention"]},
    ),
    "ministral3": Family(
        "Ministral3Config",
        "Ministral3ForCausalLM",
        {
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.4,
            },
        },
    ),
    "nemotron": Family("NemotronConfig", "NemotronForCausalLM"),
    "olmo": Family("OlmoConfig", "OlmoForCausalLM", {"clip_qkv": 1.0}),
    "olmo2": Family("Olmo2Config", "Olmo2ForCausalLM"),
    "olmo3": Family(
        "Olmo3Config", "Olmo3ForCausalLM", {"sliding_window": 7, "num_hidden_layers": 4, "rope_parameters": BY_TYPE}
    ),
    "phi": Family("PhiConfig", "PhiForCausalLM", {"hidden_size": 96}),
    "phi-head-norms": Family("PhiConfig", "PhiForCausalLM", {"qk_layernorm": True}),
    "seed-oss": Family("SeedOssConfig", "SeedOssForCausalLM", {"head_dim": 16}),
    "smollm3": Family("SmolLM3Config", "SmolLM3ForCausalLM", {"no_rope_layer_interval": 2, "num_hidden_layers": 4}),
    "stablelm": Family("StableLmConfig", "StableLmForCausalLM", {"partial_rotary_factor": 0.5}),
    "stablelm-parallel-head-norms": Family(
        "StableLmConfig",
        "StableLmForCausalLM",
        {"use_parallel_residual": True, "qk_layernorm": True, "use_qkv_bias": True, "hidden_size": 96},
    ),
    "starcoder2": Family("Starcoder2Config", "Starcoder2ForCausalLM", {"sliding_window": 9}),
    "vaultgemma": Family("VaultGemmaConfig", "VaultGemmaForCausalLM", {"head_dim": 16, "sliding_window": 7}),
    # positions by a bias on attention
    "bloom": Family("BloomConfig", "BloomForCausalLM", {**PLAIN, "max_position_embeddings": None, "seq_length": 128}),
    "falcon-alibi": Family(
        "FalconConfig",
        "FalconForCausalLM",
        {**PLAIN, "alibi": True, "parallel_attn": False, "multi_query": False, "bias": True},
    ),
    "mpt": Family("MptConfig", "MptForCausalLM", {**MPT, "attn_config": {"clip_qkv": 0.5}}),
    "mpt-repository": Family("MptConfig", "MptForCausalLM", MPT, alias=other_names.MPT),
    # mixtures of experts
    "dbrx": Family(
        "DbrxConfig",
        "DbrxForCausalLM",
        {
            **dict.fromkeys(NAMES),
            **PLAIN,
            "d_model": 48,
            "n_heads": 6,
            "n_layers": 3,
            "max_seq_len": 128,
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 0.5, "rope_theta": 1e4},
            "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2},
        },
    ),
    "ernie4_5-moe": Family(
        "Ernie4_5_MoeConfig",
        "Ernie4_5_MoeForCausalLM",
        {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 24, "moe_num_shared_experts": 2},
    ),
    "glm4-moe": Family("Glm4MoeConfig", "Glm4MoeForCausalLM", {**GLM_MOE, "use_qk_norm": True}),
    "glm4-moe-groups": Family(
        "Glm4MoeConfig",
        "Glm4MoeForCausalLM",
        {**GLM_MOE, "n_group": 4, "topk_group": 2, "n_shared_experts": 2, "attention_bias": True},
    ),
    "granite-moe": Family("GraniteMoeConfig", "GraniteMoeForCausalLM", {**GRANITE, **LOCAL}),
    "granite-moe-shared": Family(
        "GraniteMoeSharedConfig", "GraniteMoeSharedForCausalLM", {**GRANITE, **LOCAL, "shared_intermediate_size": 32}
    ),
    "hunyuan-moe": Family("HunYuanMoEV1Config", "HunYuanMoEV1ForCausalLM", {"num_experts": 4, "moe_topk": 2, "head_dim": 16}),
    "llama4": Family("Llama4TextConfig", "Llama4ForCausalLM", LLAMA4),
    "llama4-two-experts": Family(
        "Llama4TextConfig",
        "Llama4ForCausalLM",
        {**LLAMA4, "use_qk_norm": False, "num_experts_per_tok": 2, "no_rope_layers": [0, 1, 1, 0]},
    ),
    "mimo-v2-flash": Family(
        "MiMoV2FlashConfig",
        "MiMoV2FlashForCausalLM",
        {
            "head_dim": 16,
            "v_head_dim": 10,
            "num_key_value_heads": 1,
            "sliding_window": 6,
            "num_hidden_layers": 4,
            "layer_types": ["full_attention", "sliding_attention", "full_attention", "sliding_attention"],
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
            },
        },
    ),
    "minimax-m2": Family("MiniMaxM2Config", "MiniMaxM2ForCausalLM", {**LOCAL, "head_dim": 16, "partial_rotary_factor": 0.5}),
    "olmoe": Family("OlmoeConfig", "OlmoeForCausalLM", {"num_experts": 4, "num_experts_per_tok": 2, "clip_qkv": 1.0}),
    "phi-moe": Family("PhimoeConfig", "PhimoeForCausalLM", {**LOCAL, "attention_bias": True, "lm_head_bias": True}),
    "qwen2-moe": Family(
        "Qwen2MoeConfig",
        "Qwen2MoeForCausalLM",
        {**EXPERTS, "shared_expert_intermediate_size": 32, "num_hidden_layers": 4, "mlp_only_layers": [1]},
    ),
    "dots1": Family("Dots1Config", "Dots1ForCausalLM", {**GLM_MOE, "n_shared_experts": 1, "first_k_dense_replace": 1}),
    "exaone-moe": Family(
        "ExaoneMoeConfig",
        "ExaoneMoeForCausalLM",
        {**EXPERTS, "num_experts": 8, "sliding_window": 6, "num_hidden_layers": 4, "sliding_window_pattern": 2},
    ),
    "flex-olmo": Family("FlexOlmoConfig", "FlexOlmoForCausalLM", {"num_experts": 4, "num_experts_per_tok": 2}),
    "solar-open": Family("SolarOpenConfig", "SolarOpenForCausalLM", {**GLM_MOE, "intermediate_size": None}),
    "exaone-moe-other-spelling": Family(
        "ExaoneMoeConfig",
        "ExaoneMoeForCausalLM",
        {**EXPERTS, "sliding_window": 6, "num_hidden_layers": 4},
        alias=other_names.EXAONE_MOE,
    ),
    # code of which is in model repositories
    "aquila": Family("LlamaConfig", "LlamaForCausalLM", alias=other_names.AQUILA),
    "aquila-older-spelling": Family("LlamaConfig", "LlamaForCausalLM", alias=other_names.AQUILA_OLDER),
    "bailing": Family(
        "Glm4MoeConfig",
        "Glm4MoeForCausalLM",
        {**GLM_MOE, "n_group": 4, "topk_group": 2, "n_shared_experts": 2, "use_qk_norm": True},
        alias=other_names.BAILING,
    ),
    "bailing-older": Family(
        "Qwen2MoeConfig",
        "Qwen2MoeForCausalLM",
        {**EXPERTS, "shared_expert_intermediate_size": 48, "mlp_only_layers": [0], "norm_topk_prob": True},
        alias=other_names.BAILING_OLDER,
        settle=other_names.half_open,
    ),
    "falcon-older-spelling": Family(
        "FalconConfig",
        "FalconForCausalLM",
        {**PLAIN, "new_decoder_architecture": True, "num_kv_heads": 2},
        alias=other_names.FALCON_OLDER,
    ),
    "internlm": Family("LlamaConfig", "LlamaForCausalLM", {"attention_bias": True}, alias=other_names.INTERNLM),
    "iquestcoder": Family("LlamaConfig", "LlamaForCausalLM", {"head_dim": 16}, alias=other_names.IQUEST),
    "llama-older-spelling": Family("LlamaConfig", "LlamaForCausalLM", alias=other_names.LLAMA_OLDER),
    "orion": Family("StableLmConfig", "StableLmForCausalLM", {"partial_rotary_factor": 1.0}, alias=other_names.ORION),
    "pangu": Family("LlamaConfig", "LlamaForCausalLM", {"attention_bias": True}, alias=other_names.PANGU),
    "qwen": Family("Qwen2Config", "Qwen2ForCausalLM", {"num_key_value_heads": 6}, alias=other_names.QWEN),
    "stablelm-older-spelling": Family(
        "StableLmConfig", "StableLmForCausalLM", {"partial_rotary_factor": 0.5}, alias=other_names.STABLELM_OLDER
    ),
    "xverse": Family("LlamaConfig", "LlamaForCausalLM", alias=other_names.XVERSE),
    "baichuan": Family("LlamaConfig", "LlamaForCausalLM", {"num_key_value_heads": 6}, alias=other_names.BAICHUAN),
    "baichuan-older-spelling": Family(
        "LlamaConfig", "LlamaForCausalLM", {"num_key_value_heads": 6}, alias=other_names.BAICHUAN_OLDER
    ),
    "baichuan-13b": Family("LlamaConfig", "AlibiLlama", {"num_key_value_heads": 6}, alias=other_names.BAICHUAN_13B),
    "chatglm": Family("GlmConfig", "GlmForCausalLM", {"head_dim": 8}, alias=other_names.CHATGLM),
    "chatglm-older": Family("GlmConfig", "GlmForCausalLM", {"head_dim": 8}, alias=other_names.CHATGLM_OLDER),
    "decilm": Family(
        "LlamaConfig",
        "PartialLlama",
        {
            "num_key_value_heads": 6,
            "num_hidden_layers": 5,
            "intermediate_size": 256,
            "block_configs": other_names.BLOCKS,
            "initializer_range": 0.1,
        },
        alias=other_names.DECILM,
        settle=other_names.settle_blocks,
    ),
    "deepseek": Family(
        "Qwen2MoeConfig",
        "Qwen2MoeForCausalLM",
        {**EXPERTS, "shared_expert_intermediate_size": 48, "mlp_only_layers": [0], "qkv_bias": False},
        alias=other_names.DEEPSEEK,
        settle=other_names.half_open,
    ),
    "exaone": Family("LlamaConfig", "LlamaForCausalLM", alias=other_names.EXAONE),
    "internlm2": Family("LlamaConfig", "LlamaForCausalLM", alias=other_names.INTERNLM2),
    "internlm3": Family(
        "LlamaConfig", "LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}, alias=other_names.INTERNLM3
    ),
    "mimo": Family("Qwen2Config", "Qwen2ForCausalLM", alias=other_names.MIMO),
    "minicpm": Family(
        "GraniteConfig",
        "GraniteForCausalLM",
        {**GRANITE, "attention_multiplier": 8**-0.5, "tie_word_embeddings": True},
        alias=other_names.MINICPM,
    ),
    "solar": Family(
        "LlamaConfig",
        "MixingLlama",
        {
            "num_hidden_layers": 5,
            "bskcn_1": [0, 2],
            "bskcn_2": [1],
            "bskcn_3": [1, 3],
            "bskcn_4": [3, 4],
            "bskcn_tv": [0.9, 0.7],
        },
        alias=other_names.SOLAR,
    ),
    **LATENT,
    "phi-moe-other-spelling": Family("PhimoeConfig", "PhimoeForCausalLM", LOCAL, alias=other_names.PHIMOE),
}
