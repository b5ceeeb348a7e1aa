"""What families call by names of their own, or leave unsaid, in the words of most: beside their own, not instead of them."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from quire.config.uneven import decilm, gemma3n, gemma4, mimo_v2_flash

Config = Mapping[str, Any]


def _falcon(config: Config) -> Config:
    """num_kv_heads is said even where it is not meant."""
    if config.get("new_decoder_architecture"):
        return {"num_key_value_heads": config.get("num_kv_heads")}
    return {"num_key_value_heads": 1 if config.get("multi_query", True) else None, "num_kv_heads": None}


def _refined_web(config: Config) -> Config:
    """Falcon's first name: the larger kind is what is called new since."""
    keys, new = config.get("n_head_kv"), config.get("model_type") == "RefinedWeb"
    named = {ours: config[own] for own, ours in (("n_head", "num_attention_heads"), ("n_layer", "num_hidden_layers"))
             if config.get(own) is not None}  # fmt: skip
    more = {"new_decoder_architecture": config.get("new_decoder_architecture", new), "num_kv_heads": keys}
    return {**named, **more, **_falcon({**config, **more})}


def _qwen(config: Config) -> Config:
    """It is not known what it does beyond the length it was trained with; a gate and its up are counted together."""
    names = {"seq_length": "max_position_embeddings", "rotary_emb_base": "rope_theta", "rotary_pct": "partial_rotary_factor",
             "layer_norm_epsilon": "rms_norm_eps", "kv_channels": "head_dim"}  # fmt: skip
    common = {ours: config[own] for own, ours in names.items() if config.get(own) is not None}
    both = config.get("intermediate_size")
    return common | ({"intermediate_size": both // 2} if isinstance(both, int) else {})


def _stablelm_epoch(config: Config) -> Config:
    names = {"rope_pct": "partial_rotary_factor", "norm_eps": "layer_norm_eps", "rotary_emb_base": "rope_theta"}
    return {ours: config[own] for own, ours in names.items() if config.get(own) is not None}


def _bailing(config: Config) -> Config:
    names = {"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts"}
    common = {ours: config[own] for own, ours in names.items() if config.get(own) is not None}
    turned, size = config.get("rotary_dim"), config.get("head_dim")
    if isinstance(turned, int) and isinstance(size, int) and 0 < turned <= size:
        common["partial_rotary_factor"] = turned / size
    return common


def _gpt_bigcode(config: Config) -> Config:
    """num_key_value_heads is that of another number of heads in some files."""
    return {"num_key_value_heads": 1 if config.get("multi_query", True) else None}


def _gpt_neox(config: Config) -> Config:
    names = {"rotary_emb_base": "rope_theta", "rotary_pct": "partial_rotary_factor"}
    return {common: config[own] for own, common in names.items() if config.get(own) is not None}


def _gptj(config: Config) -> Config:
    turned, width, heads = (config.get(name) for name in ("rotary_dim", "n_embd", "n_head"))
    if not (isinstance(turned, int) and isinstance(width, int) and isinstance(heads, int) and width and heads):
        return {}
    return {"partial_rotary_factor": turned * heads / width}


def _chatglm(config: Config) -> Config:
    groups = config.get("multi_query_group_num") if config.get("multi_query_attention") else None
    names = {"padded_vocab_size": "vocab_size", "kv_channels": "head_dim", "seq_length": "max_position_embeddings"}
    common = {ours: config[own] for own, ours in names.items() if config.get(own) is not None}
    ratio = config.get("rope_ratio") or 1.0
    return {**common, "num_key_value_heads": groups, "rope_theta": 1e4 * ratio, "partial_rotary_factor": 0.5}


def _dbrx(config: Config) -> Config:
    attention = config.get("attn_config")
    if not isinstance(attention, Mapping):
        return {}
    names = {"kv_n_heads": "num_key_value_heads", "rope_theta": "rope_theta"}
    return {common: attention[own] for own, common in names.items() if attention.get(own) is not None}


def _afmoe(config: Config) -> Config:
    names = {"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts",
             "route_scale": "routed_scaling_factor", "num_dense_layers": "first_k_dense_replace",
             "global_attn_every_n_layers": "sliding_window_pattern"}  # fmt: skip
    return {ours: config[own] for own, ours in names.items() if config.get(own) is not None}


def _cwm(config: Config) -> Config:
    """Every fourth layer sees everything, from the first on."""
    count = config.get("num_hidden_layers")
    if config.get("layer_types") or not isinstance(count, int):
        return {}
    return {"layer_types": ["sliding_attention" if index % 4 else "full_attention" for index in range(count)]}


def _exaone_moe(config: Config) -> Config:
    """A pattern may be spelled: L for a window, G for none, which the last layer has in any case."""
    common = {"n_routed_experts": config["num_experts"], "n_shared_experts": config["num_shared_experts"]}
    pattern, count = config.get("sliding_window_pattern"), config.get("num_hidden_layers")
    if isinstance(pattern, str) and pattern and isinstance(count, int):
        kinds = ["sliding_attention" if pattern[index % len(pattern)] == "L" else "full_attention" for index in range(count)]
        kinds[-1:] = ["full_attention"]
        common["layer_types"] = config.get("layer_types") or kinds
    return common


def _llama4(config: Config) -> Config:
    """What is not said of each layer follows from how often it comes."""
    count = config.get("num_hidden_layers")
    if not isinstance(count, int):
        return {}
    turned, every, step = (config.get(n) for n in ("no_rope_layers", "no_rope_layer_interval", "interleave_moe_layer_step"))
    turned = turned or [int((index + 1) % (every or 4) != 0) for index in range(count)]
    kinds = ["chunked_attention" if turns else "full_attention" for turns in turned]
    if config.get("attention_chunk_size") is None:
        kinds = ["full_attention"] * count
    moe = config.get("moe_layers")
    return {
        "no_rope_layers": turned,
        "layer_types": config.get("layer_types") or kinds,
        "moe_layers": list(range((step or 1) - 1, count, step or 1)) if moe is None else moe,
    }


def _longcat(config: Config) -> Config:
    """A layer has two attentions."""
    names = {"moe_topk": "num_experts_per_tok", "ffn_hidden_size": "intermediate_size",
             "expert_ffn_hidden_size": "moe_intermediate_size"}  # fmt: skip
    count = config.get("num_layers")
    layers = {"num_hidden_layers": 2 * count} if isinstance(count, int) else {}
    return layers | {ours: config[own] for own, ours in names.items() if config.get(own) is not None}


def _minicpm(config: Config) -> Config:
    """Granite's multipliers, said differently."""
    scale = {"embedding_multiplier": config.get("scale_emb", 1.0)}
    depth, layers, width, base = (config.get(n) for n in ("scale_depth", "num_hidden_layers", "hidden_size", "dim_model_base"))
    if isinstance(depth, int | float) and isinstance(layers, int) and layers > 0:
        scale["residual_multiplier"] = depth / layers**0.5
    if isinstance(width, int) and isinstance(base, int) and base > 0:
        scale["logits_scaling"] = width / base
    heads = config.get("num_attention_heads")
    if isinstance(width, int) and isinstance(heads, int) and width >= heads > 0:
        scale["attention_multiplier"] = (width // heads) ** -0.5
    return scale


def _minimax_m2(config: Config) -> Config:
    turned, size = config.get("rotary_dim"), config.get("head_dim")
    if not isinstance(turned, int) or not isinstance(size, int) or not size:
        return {}
    return {"partial_rotary_factor": turned / size}


def _olmo3(config: Config) -> Config:
    """Only layers without a window are stretched."""
    return {"rope_local_base_freq": config["rope_theta"]}


def _kimi_linear(config: Config) -> Config:
    """DeepSeek's words, and `layer_types` of what it numbers from 1."""
    names = {"num_experts": "n_routed_experts", "num_experts_per_token": "num_experts_per_tok", "num_expert_group": "n_group",
             "num_shared_experts": "n_shared_experts", "moe_renormalize": "norm_topk_prob",
             "model_max_length": "max_position_embeddings"}  # fmt: skip
    common = {ours: config[own] for own, ours in names.items() if config.get(own) is not None}
    linear, count = config.get("linear_attn_config"), config.get("num_hidden_layers")
    if not isinstance(count, int):
        return common
    kinds = ["full_attention" if index and index % 4 == 0 else "linear_attention" for index in range(count)]
    if isinstance(linear, Mapping):
        sizes = {"head_dim": "linear_head_dim", "num_heads": "linear_num_heads",
                 "short_conv_kernel_size": "linear_conv_kernel_dim"}  # fmt: skip
        common |= {ours: linear[own] for own, ours in sizes.items() if linear.get(own) is not None}
        attends = linear.get("full_attn_layers")
        if isinstance(attends, list):
            kinds = ["full_attention" if index + 1 in attends else "linear_attention" for index in range(count)]
    return {**common, "layer_types": config.get("layer_types") or kinds}


def _olmo_hybrid(config: Config) -> Config:
    """Recurrent heads are as many as attention's, if it does not say otherwise."""
    heads, width = config.get("num_attention_heads"), config.get("hidden_size")
    keys = config.get("linear_num_key_heads") or heads
    if not isinstance(keys, int) or not isinstance(width, int) or keys <= 0:
        return {}
    size = config.get("linear_key_head_dim") or int(0.75 * width / keys)
    return {
        "linear_num_key_heads": keys,
        "linear_num_value_heads": config.get("linear_num_value_heads") or heads,
        "linear_key_head_dim": size,
        "linear_value_head_dim": config.get("linear_value_head_dim") or (2 * size if isinstance(size, int) else None),
    }


def _zamba2(config: Config) -> Config:
    """Sizes follow from others, whatever a file says of heads; a block sees twice the hidden size."""
    hidden, heads, mixers = (config.get(name) for name in ("hidden_size", "num_attention_heads", "n_mamba_heads"))
    expand, kinds = config.get("mamba_expand") or 2, config.get("layers_block_type") or config.get("layer_types")
    if not all(isinstance(value, int) and value > 0 for value in (hidden, heads, mixers, expand)):
        return {}
    assert isinstance(hidden, int) and isinstance(heads, int) and isinstance(mixers, int)
    rows = [5] * 7 + [4, 3]
    default = ["mamba", *(kind for count in rows for kind in ["mamba"] * count + ["hybrid"]), "mamba", "mamba"]
    return {
        "head_dim": 2 * hidden // heads,
        "num_key_value_heads": config.get("num_key_value_heads") or heads,
        "mamba_headdim": expand * hidden // mixers,
        "intermediate_size": config.get("intermediate_size") or 4 * hidden,
        "layers_block_type": kinds or default,
    }


def _solar(config: Config) -> Config:  # noqa: ARG001
    """Its code says a window and has none."""
    return {"sliding_window": None}


_DIALECTS: Mapping[str, Callable[[Config], Config]] = MappingProxyType(
    {
        "afmoe": _afmoe,
        "RefinedWeb": _refined_web,
        "RefinedWebModel": _refined_web,
        "bailing_moe": _bailing,
        "bailing_moe_v2": _bailing,
        "chatglm": _chatglm,
        "codegen": _gptj,
        "cwm": _cwm,
        "dbrx": _dbrx,
        "deci": decilm,
        "exaone_moe": _exaone_moe,
        "falcon": _falcon,
        "gemma3n_text": gemma3n,
        "gemma4_text": gemma4,
        "gemma4_unified_text": gemma4,
        "gpt_bigcode": _gpt_bigcode,
        "gpt_neox": _gpt_neox,
        "gptj": _gptj,
        "kimi_linear": _kimi_linear,
        "llama4": _llama4,
        "llama4_text": _llama4,
        "longcat_flash": _longcat,
        "mimo_v2_flash": mimo_v2_flash,
        "minicpm": _minicpm,
        "minicpm3": _minicpm,
        "minimax_m2": _minimax_m2,
        "nemotron-nas": decilm,
        "olmo3": _olmo3,
        "olmo_hybrid": _olmo_hybrid,
        "qwen": _qwen,
        "stablelm_epoch": _stablelm_epoch,
        "zamba2": _zamba2,
        "solar": _solar,
    }
)


def common_words(config: Config) -> Config:
    """By the model_type of a configuration, what it says in words of its own."""
    translate = _DIALECTS.get(str(config.get("model_type")))
    return {} if translate is None else translate(config)
