"""Qwen."""

from typing import Any

from quire.config.families.card import GGUF, ROPE, SILU, Card, Config
from quire.config.gguf_values import experts_of
from quire.config.layer_patterns import gated_delta_layers
from quire.files.gguf import GGUFHeader

_DENSE, _MOE, _HYBRID = "Qwen 1 to 3", "Qwen2-MoE, Qwen3-MoE", "Qwen3-Next, Qwen3.5"
_WINDOWS = {**ROPE, "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
_MOE_WINDOWS = {**ROPE, "use_sliding_window": False, "sliding_window": 4096, "norm_topk_prob": False}
_QWEN2_VL = {"rope_theta": 1e6, "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 80,
             "rms_norm_eps": 1e-5}  # fmt: skip
_QWEN35 = {"rope_theta": 1e7, "partial_rotary_factor": 0.25, "head_dim": 256, "rms_norm_eps": 1e-6}
_SIZES = {"vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32,
          "num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 32768}  # fmt: skip
_FULL = {**SILU, "use_sliding_window": False}
_ALL_SPARSE = {"decoder_sparse_step": 1, "mlp_only_layers": []}
# without images the three positions of multimodal rope are one
_QWEN2_TYPES = {"qwen2": _WINDOWS, **dict.fromkeys(("qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text"), _QWEN2_VL)}


def _qwen(config: Config) -> Config:
    """`intermediate_size` counts the gate and up projections together."""
    both = config.get("intermediate_size")
    return {"intermediate_size": both // 2} if isinstance(both, int) else {}


def _finish_experts(header: GGUFHeader, config: dict[str, Any]) -> None:
    config["num_experts"] = config["num_local_experts"] = experts_of(header)


def _finish_shared(header: GGUFHeader, config: dict[str, Any]) -> None:
    _finish_experts(header, config)
    config["shared_expert_intermediate_size"] = header.get("expert_shared_feed_forward_length")


CARDS = (
    Card(
        _DENSE, "dense", "other_names:QWen", ("QWenLMHeadModel",), {"qwen": {**ROPE, **SILU}}, derive=_qwen,
        names={"seq_length": "max_position_embeddings", "rotary_emb_base": "rope_theta", "rotary_pct": "partial_rotary_factor",
               "layer_norm_epsilon": "rms_norm_eps", "kv_channels": "head_dim"},
    ),
    Card(
        _DENSE, "dense", "llama:Qwen2", ("Qwen2ForCausalLM",), _QWEN2_TYPES, text=tuple(_QWEN2_TYPES), sizes=_SIZES,
        first_layers_full=True,
        gguf=(GGUF("qwen2", _FULL),),
    ),
    Card(
        _DENSE, "dense", "llama:Qwen3", ("Qwen3ForCausalLM",),
        {"qwen3": {**_WINDOWS, "head_dim": 128},
         "qwen3_vl_text": {"rope_theta": 5e5, "head_dim": 128, "max_position_embeddings": 128000}},
        text=("qwen3", "qwen3_vl_text"), sizes=_SIZES, first_layers_full=True,
        gguf=(GGUF("qwen3", {**_FULL, "attention_bias": False}),),
    ),
    Card(
        _MOE, "MoE", "mixtures:Qwen2MoE", ("Qwen2MoeForCausalLM",), {"qwen2_moe": _MOE_WINDOWS},
        gguf=(
            GGUF(
                "qwen2moe", {**_FULL, **_ALL_SPARSE, "norm_topk_prob": False}, finish=_finish_shared,
                names=tuple(f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")),
            ),
        ),
    ),
    Card(
        _MOE, "MoE", "llama:Qwen3MoE", ("Qwen3MoeForCausalLM",),
        {"qwen3_moe": _MOE_WINDOWS,
         "qwen3_vl_moe_text": {"rope_theta": 5e5, "max_position_embeddings": 128000, "norm_topk_prob": True}},
        text=("qwen3_moe", "qwen3_vl_moe_text"),
        gguf=(
            GGUF("qwen3moe", {**_FULL, **_ALL_SPARSE, "attention_bias": False, "norm_topk_prob": True}, finish=_finish_experts),
        ),
    ),
    Card(
        _HYBRID, "hybrid, MoE", "qwen3_next:Qwen3Next", ("Qwen3NextForCausalLM",),
        {"qwen3_next": {**_QWEN35, "norm_topk_prob": True}}, layers=gated_delta_layers,
    ),
    Card(
        _HYBRID, "hybrid", "qwen3_next:Qwen35", ("Qwen3_5ForCausalLM",), {"qwen3_5_text": _QWEN35},
        layers=gated_delta_layers, text=("qwen3_5_text",),
    ),
    Card(
        _HYBRID, "hybrid, MoE", "qwen3_next:Qwen35MoE", ("Qwen3_5MoeForCausalLM",),
        {"qwen3_5_moe_text": {**_QWEN35, "norm_topk_prob": True}}, layers=gated_delta_layers, text=("qwen3_5_moe_text",),
    ),
)  # fmt: skip
