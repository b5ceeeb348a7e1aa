"""Families with recurrent layers: Mamba, short convolutions, linear attention; alone or mixed with attention."""

from collections.abc import Mapping
from typing import Any

from quire.config.families.card import BIASES, FIELDS, GGUF, ROPE, SILU, Card, Config
from quire.config.families.latent import LATENT
from quire.config.gguf_values import (
    MAMBA_BIASES,
    SOME_ATTEND,
    SSM_REQUIRED,
    SSM_SIZES,
    attending_layers,
    experts_of,
    mamba2_fields,
    positive_size,
)
from quire.config.layer_patterns import (
    Kind,
    Layers,
    all_of,
    gated_delta_layers,
    kimi_sizes,
    kinds_by_types,
    kinds_of,
    mamba2_state,
    mamba_state,
    nemotron_types,
    read_size,
)  # fmt: skip
from quire.files.gguf import GGUFHeader
from quire.files.reading import shown
from quire.types.cache import StateCache
from quire.types.errors import ModelError

_MAMBA, _LFM2 = "Mamba 1 and 2, Falcon-Mamba", "LFM2"
_LINEAR: dict[str, Kind] = {"full_attention": "attention", "linear_attention": "recurrent"}
# these models have no longest context, but arrays need a bound
_UNBOUNDED = {"max_position_embeddings": 131072}
_MAMBA_FIELDS = {
    "block_count": "num_hidden_layers", "embedding_length": "hidden_size",
    "attention.layer_norm_rms_epsilon": "layer_norm_epsilon", "ssm.conv_kernel": "conv_kernel", "ssm.state_size": "state_size",
}  # fmt: skip
_MAMBA_REQUIRED = tuple(key for key in SSM_REQUIRED if key not in ("context_length", "attention.head_count"))
_MAMBA_FLAGS = {"use_bias": "ssm_in.bias", "use_conv_bias": "ssm_conv1d.bias"}
_WITHOUT_ROPE = {**SILU, "without": ("rope",)}
_FEED_FORWARD = tuple(f"feed_forward.{part}_proj" for part in ("gate", "up", "down"))


def _finish_falcon_h1(header: GGUFHeader, config: dict[str, Any]) -> None:
    """The file's matrices already include the multipliers of config.json."""
    mamba2_fields(header, config, "mamba_n_heads", "mamba_d_head", "mamba_n_groups")


def _finish_jamba(header: GGUFHeader, config: dict[str, Any]) -> None:
    attends = attending_layers(header, config)
    config["attn_layer_period"], config["attn_layer_offset"] = _period(header, attends, "attend")
    sparse = [f"blk.{layer}.ffn_gate_inp.weight" in header.tensors for layer in range(config["num_hidden_layers"])]
    config["num_experts"] = experts_of(header) if any(sparse) else 1
    config["expert_layer_period"], config["expert_layer_offset"] = (
        _period(header, sparse, "have experts") if any(sparse) else (1, 0)
    )
    config |= {"mamba_expand": _expansion(header), "mamba_dt_rank": header.get("ssm.time_step_rank")}


def _finish_mamba(header: GGUFHeader, config: dict[str, Any]) -> None:
    config |= {"expand": _expansion(header), "time_step_rank": header.get("ssm.time_step_rank")}
    if header.get("ssm.dt_b_c_rms"):
        config |= {"architectures": ["FalconMambaForCausalLM"], "model_type": "falcon_mamba"}


def _finish_mamba2(header: GGUFHeader, config: dict[str, Any]) -> None:
    mamba2_fields(header, config, "num_heads", "head_dim", "n_groups")


def _finish_lfm2(header: GGUFHeader, config: dict[str, Any]) -> None:
    config["layer_types"] = ["full_attention" if yes else "conv" for yes in attending_layers(header, config)]


def _expansion(header: GGUFHeader) -> int:
    inner, hidden = positive_size(header, "ssm.inner_size"), positive_size(header, "embedding_length")
    if inner % hidden:
        raise ModelError(f"{header.path}: ssm.inner_size {inner} is no multiple of embedding_length {hidden}")
    return inner // hidden


def _period(header: GGUFHeader, which: list[bool], what: str) -> tuple[int, int]:
    """Return the distance between the layers, and the index of the first."""
    at = [index for index, yes in enumerate(which) if yes]
    period = at[1] - at[0] if len(at) > 1 else len(which)
    if not at or [index % period == at[0] for index in range(len(which))] != which:
        raise ModelError(f"{header.path}: layers {at} {what}, which is no regular distance")
    return period, at[0]


def _mamba_layers(config: Config) -> Layers:
    return Layers(all_of(config, "recurrent"), mamba_state(config))


def _mamba2_layers(config: Config) -> Layers:
    return Layers(all_of(config, "recurrent"), mamba2_state(config))


def _falcon_h1_layers(config: Config) -> Layers:
    return Layers(all_of(config, "both"), mamba2_state(config))


def _bamba_layers(config: Config) -> Layers:
    at = config.get("attn_layer_indices") or ()
    types = config.get("layers_block_type") or config.get("layer_types")
    if types and not at:
        at = [index for index, kind in enumerate(types) if kind in ("attention", "full_attention")]
    return Layers(kinds_of(config, lambda index: index in at), mamba2_state(config))


def _lfm2_layers(config: Config) -> Layers:
    state = StateCache((read_size(config, "hidden_size"), read_size(config, "conv_L_cache", default=3) - 1))
    if config.get("layer_types") is not None:
        return Layers(kinds_by_types(config, {"full_attention": "attention", "conv": "recurrent"}), state)
    at = config.get("full_attn_idxs")
    return Layers(kinds_of(config, lambda index: at is None or index in at), state)


def _jamba_layers(config: Config) -> Layers:
    period, offset = read_size(config, "attn_layer_period", default=8), config.get("attn_layer_offset", 4)
    return Layers(kinds_of(config, lambda index: index % period == offset), mamba_state(config))


def _nemotron_h_layers(config: Config) -> Layers:
    names: dict[str, Kind] = {
        "mamba": "recurrent", "linear_attention": "recurrent", "attention": "attention", "full_attention": "attention",
        "mlp": "neither", "moe": "neither", "M": "recurrent", "*": "attention", "-": "neither", "E": "neither",
    }  # fmt: skip
    types = nemotron_types(config)
    if not types or not all(kind in names for kind in types):
        raise ModelError(f"layers_block_type in the model's config must be a list of {', '.join(names)}, got {shown(types)}")
    return Layers(tuple(names[kind] for kind in types), mamba2_state(config))


def _olmo_hybrid_layers(config: Config) -> Layers:
    """Every fourth layer attends; of fewer layers, the last."""
    layers = gated_delta_layers(config)
    if config.get("layer_types") is None and not layers.attentions:
        return Layers((*layers.kinds[:-1], "attention"), layers.state)
    return layers


def _kimi_linear_layers(config: Config) -> Layers:
    heads, _, size, _, width = kimi_sizes(config)
    return Layers(
        kinds_by_types(config, _LINEAR), StateCache((3 * heads * size, width - 1), (heads, size, size), heads, 2 * size)
    )


def _minimax_layers(config: Config) -> Layers:
    heads = read_size(config, "num_attention_heads")
    size = read_size(config, "head_dim", default=max(1, read_size(config, "hidden_size") // heads))
    state = StateCache(state=(heads, size, size), keys=heads)
    if config.get("layer_types") is not None:
        return Layers(kinds_by_types(config, _LINEAR), state)
    return Layers(kinds_of(config, lambda index: index % 2 == 0), state)


def _zamba2_layers(config: Config) -> Layers:
    names: dict[str, Kind] = {"linear_attention": "recurrent", "mamba": "recurrent", "hybrid": "both"}
    return Layers(kinds_by_types(config, names, "layers_block_type"), mamba2_state(config))


def _kimi_linear(config: Config) -> Config:
    """Derive `layer_types` from `linear_attn_config`, which counts layers from 1."""
    linear, count, common = config.get("linear_attn_config"), config.get("num_hidden_layers"), dict[str, Any]()
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
    """Linear attention has as many heads as attention, unless the config has its own numbers."""
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
    """Head sizes follow from other fields, whatever a file has for them; the input of a block has twice the hidden size."""
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


CARDS = (
    Card(
        _MAMBA, "recurrent", "mamba:Mamba", ("MambaForCausalLM",), {"mamba": _UNBOUNDED}, layers=_mamba_layers,
        gguf=(
            GGUF("mamba", _WITHOUT_ROPE, _MAMBA_FIELDS, _finish_mamba, _MAMBA_REQUIRED, _MAMBA_FLAGS, layers="backbone.layers",
                 names=("embeddings", "norm_f", "mixer.dt_proj")),
        ),
    ),
    Card(
        _MAMBA, "recurrent", "mamba:Mamba2", ("Mamba2ForCausalLM",),
        {"mamba2": {**_UNBOUNDED, "n_groups": 8, "state_size": 128, "head_dim": 64}}, layers=_mamba2_layers,
        gguf=(
            GGUF("mamba2", _WITHOUT_ROPE, _MAMBA_FIELDS, _finish_mamba2, _MAMBA_REQUIRED, _MAMBA_FLAGS,
                 layers="backbone.layers", names=("embeddings", "norm_f"), exact={"ssm_dt.bias": "mixer.dt_bias"}),
        ),
    ),
    Card(_MAMBA, "recurrent", "mamba:FalconMamba", ("FalconMambaForCausalLM",), {"falcon_mamba": _UNBOUNDED},
         layers=_mamba_layers),
    Card(
        "Bamba", "hybrid", "hybrids:Bamba", ("BambaForCausalLM",),
        {"bamba": {**ROPE, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5, "mamba_d_state": 256}}, layers=_bamba_layers,
    ),
    Card(
        "Falcon-H1", "hybrid", "hybrids:FalconH1", ("FalconH1ForCausalLM",),
        {"falcon_h1": {"rope_theta": 1e5, "mamba_d_ssm": 1024, "mamba_d_state": 256, "rms_norm_eps": 1e-5}},
        layers=_falcon_h1_layers,
        gguf=(
            GGUF(
                "falcon-h1", {**SILU, "mamba_norm_before_gate": False}, FIELDS | SSM_SIZES, _finish_falcon_h1, SSM_REQUIRED,
                {**BIASES, **MAMBA_BIASES, "projectors_bias": "ssm_out.bias", "mamba_rms_norm": "ssm_norm.weight"},
                names=("final_layernorm", "pre_ff_layernorm.weight", *_FEED_FORWARD), exact={"ssm_dt.bias": "mamba.dt_bias"},
            ),
        ),
    ),
    Card(
        "Jamba", "hybrid, MoE", "hybrids:Jamba", ("JambaForCausalLM",), {"jamba": {"mamba_d_state": 16}},
        layers=_jamba_layers,
        gguf=(
            GGUF(
                "jamba", _WITHOUT_ROPE, SOME_ATTEND | SSM_SIZES, _finish_jamba, SSM_REQUIRED, MAMBA_BIASES,
                names=("final_layernorm", "pre_ff_layernorm", "mamba.b_layernorm", "mamba.c_layernorm",
                       "feed_forward.router", *_FEED_FORWARD,
                       *(f"feed_forward.experts.{part}_proj" for part in ("gate", "up", "down"))),
            ),
        ),
    ),
    Card(
        "Kimi Linear", "hybrid, MoE", "kimi_linear:KimiLinear", ("KimiLinearForCausalLM",),
        {"kimi_linear": {**LATENT, "q_lora_rank": None, "rms_norm_eps": 1e-5, "num_experts": 256, "num_experts_per_token": 8,
                         "num_shared_experts": 1, "moe_renormalize": True, "num_expert_group": 1, "topk_group": 1,
                         "routed_scaling_factor": 2.446, "first_k_dense_replace": 1, "moe_intermediate_size": 1024,
                         "num_attention_heads": 32}},
        names={"num_experts": "n_routed_experts", "num_experts_per_token": "num_experts_per_tok",
               "num_expert_group": "n_group", "num_shared_experts": "n_shared_experts", "moe_renormalize": "norm_topk_prob",
               "model_max_length": "max_position_embeddings"},
        derive=_kimi_linear, layers=_kimi_linear_layers,
    ),
    Card(
        _LFM2, "hybrid", "lfm2:LFM2", ("Lfm2ForCausalLM",), {"lfm2": {"rope_theta": 1e6, **SILU}}, layers=_lfm2_layers,
        gguf=(
            GGUF(
                "lfm2", {**SILU, "block_auto_adjust_ff_dim": False},
                SOME_ATTEND | {"attention.layer_norm_rms_epsilon": "norm_eps", "shortconv.l_cache": "conv_L_cache"},
                _finish_lfm2, flags={"conv_bias": "shortconv.conv.bias"},
                names=("operator_norm", "ffn_norm", "self_attn.out_proj", "self_attn.q_layernorm", "self_attn.k_layernorm",
                       "embedding_norm", *(f"feed_forward.w{index}" for index in (1, 2, 3))),
            ),
        ),
    ),
    Card(_LFM2, "MoE", "lfm2:LFM2MoE", ("Lfm2MoeForCausalLM",), {"lfm2_moe": {"rope_theta": 1e6, **SILU}},
         layers=_lfm2_layers),
    Card(
        "MiniMax 01", "hybrid, MoE", "minimax:MiniMax", ("MiniMaxForCausalLM",),
        {"minimax": {"rope_theta": 1e6, "rms_norm_eps": 1e-5, "num_local_experts": 8, "num_experts_per_tok": 2}},
        layers=_minimax_layers,
    ),
    Card(
        "Nemotron-H", "hybrid", "nemotron:NemotronH", ("NemotronHForCausalLM",),
        {"nemotron_h": {"head_dim": 128, "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128, "n_routed_experts": 8,
                        "num_experts_per_tok": 2, "moe_intermediate_size": 7688,
                        "moe_shared_expert_intermediate_size": 7688}},
        layers=_nemotron_h_layers,
    ),
    Card(
        "OLMo Hybrid", "hybrid", "olmo:OlmoHybrid", ("OlmoHybridForCausalLM",),
        {"olmo_hybrid": {"rms_norm_eps": 1e-6, **SILU}}, derive=_olmo_hybrid, layers=_olmo_hybrid_layers,
    ),
    Card(
        "Zamba 2", "hybrid", "zamba2:Zamba2", ("Zamba2ForCausalLM",),
        {"zamba2": {**ROPE, "hidden_act": "gelu", "rms_norm_eps": 1e-5, "mamba_d_state": 64, "n_mamba_heads": 8,
                    "num_attention_heads": 32, "tie_word_embeddings": True}},
        derive=_zamba2, layers=_zamba2_layers,
    ),
)  # fmt: skip
