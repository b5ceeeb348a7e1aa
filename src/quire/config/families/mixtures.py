"""Mixtures of experts with plain attention."""

from collections.abc import Mapping
from typing import Any

from quire.config.families.card import FIELDS, GGUF, ROPE, SILU, Card, Config
from quire.config.gguf_values import experts_of
from quire.files.gguf import GGUFHeader
from quire.types.errors import ModelError

_BAILING, _PHIMOE = "Ling, Ring (Bailing)", {"rope_theta": 1e6, "rms_norm_eps": 1e-5}
_BAILING_NAMES = {"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts"}
_BAILING_DEFAULTS = {**ROPE, **SILU, "first_k_dense_replace": 0, "num_shared_experts": 0}
_NO_SHARED = {"first_k_dense_replace": 0, "n_shared_experts": None}
_GPT_OSS = {"attention_bias": True, "swiglu_alpha": 1.702, "swiglu_limit": 7.0}
_GPT_OSS_ROPE = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
                 "original_max_position_embeddings": 4096}  # fmt: skip
QK_NORM_FLAGS = {"use_qk_norm": "attn_q_norm.weight", "attention_bias": "attn_q.bias"}
SPARSE_FIELDS = FIELDS | {
    "leading_dense_block_count": "first_k_dense_replace",
    "expert_count": "n_routed_experts",
    "expert_shared_count": "n_shared_experts",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
}
_W = tuple(f"block_sparse_moe.experts.w{index}" for index in (1, 2, 3))


def _finish_experts(header: GGUFHeader, config: dict[str, Any]) -> None:
    config["num_experts"] = config["num_local_experts"] = experts_of(header)


def finish_normalized(header: GGUFHeader, config: dict[str, Any]) -> None:
    config["norm_topk_prob"] = bool(header.get("expert_weights_norm", True))


def _finish_gpt_oss(header: GGUFHeader, config: dict[str, Any]) -> None:
    """Every other layer, from the first on, has a sliding window, unless the file lists them."""
    slides = header.get("attention.sliding_window_pattern")
    if not isinstance(slides, list):
        slides = [layer % 2 == 0 for layer in range(config["num_hidden_layers"])]
    config["layer_types"] = ["sliding_attention" if yes else "full_attention" for yes in slides]
    config["rope_parameters"] |= {"truncate": False} if config["rope_parameters"]["rope_type"] == "yarn" else {}
    config["num_local_experts"] = experts_of(header)
    config["intermediate_size"] = config.pop("moe_intermediate_size", config.get("intermediate_size"))


def _finish_minimax(header: GGUFHeader, config: dict[str, Any]) -> None:
    if header.get("expert_gating_func", 2) != 2:
        raise ModelError(f"{header.path}: experts must be chosen by sigmoids (expert_gating_func 2)")
    config["num_local_experts"] = experts_of(header)
    config["intermediate_size"] = config.pop("moe_intermediate_size", config.get("intermediate_size"))


def _rotary_share(config: Config) -> Config:
    rotary, size = config.get("rotary_dim"), config.get("head_dim")
    if not isinstance(rotary, int) or not isinstance(size, int) or not size:
        return {}
    return {"partial_rotary_factor": rotary / size}


def _bailing(config: Config) -> Config:
    rotary, size = config.get("rotary_dim"), config.get("head_dim")
    plausible = isinstance(rotary, int) and isinstance(size, int) and 0 < rotary <= size
    return _rotary_share(config) if plausible else {}


def _dbrx(config: Config) -> Config:
    attention = config.get("attn_config")
    if not isinstance(attention, Mapping):
        return {}
    names = {"kv_n_heads": "num_key_value_heads", "rope_theta": "rope_theta"}
    return {common: attention[own] for own, common in names.items() if attention.get(own) is not None}


def _mimo_v2_flash(config: Config) -> Config:
    """The first layer and every sixth have full attention; the others have twice as many key heads. The first is dense."""
    count, keys, size = (config.get(name) for name in ("num_hidden_layers", "num_key_value_heads", "head_dim"))
    if not isinstance(count, int) or not isinstance(keys, int):
        return {}
    types, feeds = config.get("layer_types"), config.get("mlp_layer_types")
    if not types:
        types = ["sliding_attention" if index and (index + 1) % 6 else "full_attention" for index in range(count)]
    if not isinstance(types, list):
        return {}
    before = config.get("sliding_window_size")  # keys before the query's own
    return {
        "layer_types": types,
        "layer_shapes": [(keys if kind == "full_attention" else 2 * keys, size) for kind in types],
        "mlp_layer_types": feeds or ["dense", *["sparse"] * (count - 1)],
        "sliding_window": before + 1 if isinstance(before, int) else config.get("sliding_window"),
    }


CARDS = (
    Card(
        "AFMoE (Arcee Trinity)", "MoE", "afmoe:AFMoE", ("AfmoeForCausalLM",),
        {"afmoe": {**ROPE, "head_dim": 128, "rms_norm_eps": 1e-5, "sliding_window": 1024, "num_dense_layers": 1,
                   "num_experts": 64, "num_experts_per_tok": 6, "num_shared_experts": 2, "global_attn_every_n_layers": 4}},
        names={"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts",
               "route_scale": "routed_scaling_factor", "num_dense_layers": "first_k_dense_replace",
               "global_attn_every_n_layers": "sliding_window_pattern"},
    ),
    Card(_BAILING, "MoE", "mixtures:OlderBailing", ("BailingMoeForCausalLM",), {"bailing_moe": _BAILING_DEFAULTS},
         names=_BAILING_NAMES, derive=_bailing),
    Card(
        _BAILING, "MoE", "mixtures:Bailing", ("BailingMoeV2ForCausalLM",),
        {"bailing_moe_v2": {**_BAILING_DEFAULTS, "partial_rotary_factor": 0.5}}, names=_BAILING_NAMES, derive=_bailing,
    ),
    Card("DBRX", "MoE", "dbrx:DBRX", ("DbrxForCausalLM",), {"dbrx": ROPE}, derive=_dbrx),
    Card("DeepSeek-MoE", "MoE", "mixtures:Deepseek", ("DeepseekForCausalLM",),
         {"deepseek": {**ROPE, **SILU, **_NO_SHARED}}),
    Card(
        "dots.llm1", "MoE", "mixtures:Dots1", ("Dots1ForCausalLM",),
        {"dots1": {**ROPE, **_NO_SHARED, "sliding_window": 4096, "max_window_layers": 62, "norm_topk_prob": False}},
        first_layers_full=True, gguf=(GGUF("dots1", SILU, SPARSE_FIELDS, finish_normalized, flags=QK_NORM_FLAGS),),
    ),
    Card("Ernie 4.5", "dense", "llama:Ernie45", ("Ernie4_5ForCausalLM",),
         {"ernie4_5": {"rope_theta": 5e5, "head_dim": 128, "rms_norm_eps": 1e-5}},
         gguf=(GGUF("ernie4_5", {**SILU, "use_bias": False}),)),
    Card("Ernie 4.5", "MoE", "mixtures:Ernie45MoE", ("Ernie4_5_MoeForCausalLM",),
         {"ernie4_5_moe": {"rope_theta": 5e5, "rms_norm_eps": 1e-5}}),
    Card("FlexOlmo", "MoE", "mixtures:FlexOlmo", ("FlexOlmoForCausalLM",),
         {"flex_olmo": {"rope_theta": 5e5, "rms_norm_eps": 1e-6, "norm_topk_prob": False}}),
    Card(
        "gpt-oss", "MoE", "gpt_oss:GptOss", ("GptOssForCausalLM",),
        {"gpt_oss": {"rope_theta": 1.5e5, "head_dim": 64, "sliding_window": 128, "sliding_window_pattern": 2,
                     "rms_norm_eps": 1e-5, "num_local_experts": 128, "num_experts_per_tok": 4, **_GPT_OSS,
                     "rope_scaling": _GPT_OSS_ROPE}},
        gguf=(
            GGUF("gpt-oss", {**SILU, **_GPT_OSS}, finish=_finish_gpt_oss, names=("mlp.router",),
                 exact={"attn_sinks.weight": "self_attn.sinks"}),
        ),
    ),
    Card(
        "MiMo V2 Flash", "MoE", "mimo:MiMoV2Flash", ("MiMoV2FlashForCausalLM",),
        {"mimo_v2_flash": {
            "head_dim": 192, "v_head_dim": 128, "sliding_window": 129, "attention_value_scale": 0.707,
            "num_attention_heads": 64, "num_key_value_heads": 4, "rms_norm_eps": 1e-5, "n_shared_experts": None,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.334},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.334}}}},
        derive=_mimo_v2_flash,
    ),
    Card(
        "MiniMax M2", "MoE", "mixtures:MiniMaxM2", ("MiniMaxM2ForCausalLM",),
        {"minimax_m2": {"rope_theta": 5e6, "head_dim": 128}}, derive=_rotary_share,
        gguf=(
            GGUF("minimax-m2", SILU, finish=_finish_minimax, names=("block_sparse_moe.gate", *_W),
                 exact={"exp_probs_b.bias": "block_sparse_moe.e_score_correction_bias"}),
        ),
    ),
    Card(
        "OLMoE", "MoE", "mixtures:OlmoE", ("OlmoeForCausalLM",),
        {"olmoe": {**ROPE, "rms_norm_eps": 1e-5, "norm_topk_prob": False}},
        gguf=(GGUF("olmoe", {**SILU, "norm_topk_prob": False, "attention_bias": False}, finish=_finish_experts),),
    ),
    Card("Phi-MoE", "MoE", "mixtures:PhiMoE", ("PhiMoEForCausalLM", "PhimoeForCausalLM"), {"phimoe": _PHIMOE}),
    Card("Solar Open", "MoE", "mixtures:SolarOpen", ("SolarOpenForCausalLM",),
         {"solar_open": {"rope_theta": 1e6, "head_dim": 128, "rms_norm_eps": 1e-5, "first_k_dense_replace": 0}}),
)  # fmt: skip
