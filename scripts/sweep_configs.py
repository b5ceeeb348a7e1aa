"""A tiny configuration of any causal type of transformers: its own defaults with small numbers in them."""

from collections.abc import Mapping
from typing import Any

HIDDEN, HEADS, KEYS, HEAD, LAYERS, VOCABULARY, LENGTH = 64, 4, 2, 16, 4, 199, 128
_SIZES = tuple((size, tuple(names.split())) for size, names in (
    (HIDDEN, "hidden_size n_embd d_model embed_dim dim word_embed_proj_dim embedding_size encoder_hidden_size "
     "decoder_hidden_size hidden_dim attention_hidden_size width embedding_dim input_embedding_size dim_model"),
    (96, "intermediate_size n_inner ffn_dim encoder_ffn_dim decoder_ffn_dim ffn_hidden_size dim_ff dff mlp_hidden_size "
     "shared_intermediate_size intermediate_size_mlp feed_forward_size block_ff_dim d_ff d_inner"),
    (48, "moe_intermediate_size expert_ffn_hidden_size moe_shared_expert_intermediate_size shared_expert_intermediate_size "
     "expert_intermediate_size moe_ffn_hidden_size"),
    (HEADS, "num_attention_heads n_head n_heads encoder_attention_heads decoder_attention_heads num_heads "
     "num_encoder_attention_heads num_decoder_attention_heads linear_num_value_heads index_n_heads"),
    (KEYS, "num_key_value_heads num_kv_heads n_head_kv kv_n_heads num_global_key_value_heads swa_num_key_value_heads "
     "linear_num_key_heads num_kv_shared_layers"),
    (HEAD, "head_dim qk_rope_head_dim attention_head_dim kv_channels d_kv dim_head swa_head_dim qk_nope_head_dim v_head_dim "
     "swa_v_head_dim attention_head_size mamba_d_head mamba_d_state state_size ssm_state_size linear_key_head_dim "
     "linear_value_head_dim d_head mamba_head_dim index_head_dim"),
    (8, "rotary_dim mamba_n_heads laurel_rank sliding_window attention_chunk_size local_attention_window_size "
     "window_size"),
    (LAYERS, "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_encoder_layers "
     "num_decoder_layers"),
    (VOCABULARY, "vocab_size vocab_size_per_layer_input decoder_vocab_size"),
    (LENGTH, "max_position_embeddings n_positions n_ctx max_seq_len max_sequence_length seq_length max_target_positions "
     "max_source_positions max_seq_length"),
    (4, "num_experts num_local_experts n_routed_experts moe_num_experts"),
    (2, "num_experts_per_tok top_k_experts moe_k moe_topk num_experts_per_token moe_top_k"),
    (1, "n_shared_experts num_shared_experts moe_num_shared_experts first_k_dense_replace n_group topk_group num_dense_layers "
     "num_layers_per_stack"),
    (24, "kv_lora_rank q_lora_rank"),
    (32, "hidden_size_per_layer_input"),
    (64, "index_topk"),  # all keys: what is chosen of equally bad ones is arbitrary, in transformers too
))  # fmt: skip
SMALL = {name: size for size, names in _SIZES for name in names}
_HEADS, _KEYS, _LAYERS = (next(names for _, names in _SIZES if word in names) for word in
                           ("num_attention_heads", "num_key_value_heads", "num_hidden_layers"))  # fmt: skip
ENDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "decoder_start_token_id": 1, "sep_token_id": 2}
SPREAD = ("initializer_range", "init_std", "init_method_std")
MISSING = (
    "head_dim",
    "num_key_value_heads",
    "num_experts_per_tok",
    "n_routed_experts",
    "n_shared_experts",
)  # where they are null
ASIDE = (
    "model_type",
    "transformers_version",
    "architectures",
    "_name_or_path",
    "id2label",
    "label2id",
    "dtype",
    "problem_type",
)
_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_MIXED = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]
_GEMMA4 = {"layer_types": _MIXED, "per_layer_config": {"03": {"head_dim": 32}}}
# what cannot be had from the names alone
OWN: Mapping[str, Mapping[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "cohere_compass_text": {"rope_parameters": dict.fromkeys(("full_attention", "sliding_attention"), _ROPE)},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
             "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 64}},
    "dots3_note_text": {"per_layer_config": {}, "shared_experts_intermediate_size": 48, "head_dim": 32},
    "qwen4_exp_text": {"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 64,
                       "indexer_compress_ratio": 2, "ngram_vocab_size_base": 128, "hc_lowrank": 8, "ple_embed_dim": 16},
    "bailing_hybrid": {"num_expert_group": 1, "topk_group": 1},
    "falcon_h1": {"mamba_d_ssm": 64},
    "falcon_mamba": {"intermediate_size": 128},
    "gemma3n_text": {"num_kv_shared_layers": 1, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "gemma4_text": _GEMMA4,
    "gemma4_unified_text": _GEMMA4,
    "hrm_text": {"num_hidden_layers": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "longcat_flash": {"qk_head_dim": 32, "num_layers": 2, "zero_expert_num": 2},
    "mimo_v2_flash": {"head_dim": 48},  # of which an even number turns
    "mamba": {"intermediate_size": 128},
    "mamba2": {"num_heads": 8, "n_groups": 2},
    "nemotron_h": {"layers_block_type": ["mamba", "mlp", "attention", "moe"]},
    "reformer": {"axial_pos_embds_dim": [16, 48], "axial_pos_shape": [8, 16], "attn_layers": ["local", "lsh"] * 2,
                 "hash_seed": 1},
    "xlnet": {"attn_type": "uni"},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"] * 2, "num_mem_blocks": 1, "n_mamba_heads": 8, "mamba_headdim": 16,
               "attention_head_dim": 32, "head_dim": 32, "attention_hidden_size": 128, "hybrid_layer_ids": [1, 3]},
    "zamba": {"attention_hidden_size": 128, "attention_head_dim": 32, "mamba_dt_rank": 4, "attn_layer_period": 2,
              "attn_layer_offset": 1},
    "xmod": {"default_language": "en_XX"},
}  # fmt: skip


def make_config(kind: str) -> Any:
    """Of the class that transformers has for the type, or of the part of it that its language model is made of."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    with_defaults = transformers.CONFIG_MAPPING[kind]
    model = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind])
    found = with_defaults()
    if not isinstance(found, model.config_class):
        found = next((part for part in vars(found).values() if isinstance(part, model.config_class)), found)
    kind_of = type(found)
    settings = shrink(found.to_dict(), OWN.get(found.model_type, OWN.get(kind, {})))
    if "is_decoder" in settings:
        settings["is_decoder"] = True
    return kind_of(**settings)


def shrink(config: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in config.items():
        if name in own or name in ASIDE:
            continue
        if isinstance(value, dict) and name.endswith("_config") and value:
            found[name] = shrink(value, OWN.get(value.get("model_type", ""), {})) | {"model_type": value.get("model_type", "")}
        elif isinstance(value, list) and value and len(value) == depth(config):
            found[name] = [SMALL.get(name, item) if type(item) is int else item for item in sample(value, LAYERS)]
        elif name in ENDS and value is not None:
            found[name] = ENDS[name]
        elif type(value) is int and name in SMALL and value > 0:
            found[name] = min(value, SMALL[name])
        elif isinstance(value, float) and "dropout" in name:
            found[name] = 0.0
        elif name in SPREAD:
            found[name] = 0.2
        elif value is None and name in MISSING:
            found[name] = SMALL[name]
        elif value is not None:
            found[name] = value
    heads = next((config[name] for name in _HEADS if isinstance(config.get(name), int)), None)
    for name in _KEYS:
        if name in found and isinstance(config.get(name), int) and config[name] == heads:
            found[name] = HEADS
    return found | dict(own)


def depth(config: Mapping[str, Any]) -> int:
    return next((config[name] for name in _LAYERS if isinstance(config.get(name), int)), -1)


def sample(values: list[Any], count: int) -> list[Any]:
    """So many, with each kind that there is among them."""
    kinds = list(dict.fromkeys(map(repr, values)))
    first = [next(value for value in values if repr(value) == kind) for kind in kinds][:count]
    return (first * count)[:count]
