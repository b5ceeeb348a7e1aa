"""GLM, OLMo, Exaone and Hunyuan."""

from typing import Any

from quire.config.families.card import BIASES, GGUF, ROPE, SILU, Card, Config
from quire.config.families.mixtures import QK_NORM_FLAGS, SPARSE_FIELDS, finish_normalized
from quire.config.gguf_values import experts_of
from quire.files.gguf import GGUFHeader

_GLM, _OLMO, _EXAONE, _HUNYUAN = "ChatGLM, GLM 4", "OLMo 1 to 3", "Exaone 3 and 4, Exaone MoE", "Hunyuan"
_GLM_DEFAULTS = {**ROPE, "partial_rotary_factor": 0.5, "head_dim": 128, "num_key_value_heads": 2, "rms_norm_eps": 1.5625e-7}
_WINDOWS = {"sliding_window": 4096, "sliding_window_pattern": 4, "rms_norm_eps": 1e-5}
_HUNYUAN_FLAGS = {"attention_bias": "attn_q.bias"}
_HUNYUAN_NORMS = ("self_attn.query_layernorm", "self_attn.key_layernorm")


def _chatglm(config: Config) -> Config:
    groups = config.get("multi_query_group_num") if config.get("multi_query_attention") else None
    ratio = config.get("rope_ratio") or 1.0
    return {"num_key_value_heads": groups, "rope_theta": 1e4 * ratio, "partial_rotary_factor": 0.5}


def _olmo3(config: Config) -> Config:
    """Rope is scaled in layers with full attention only."""
    return {"rope_local_base_freq": config["rope_theta"]}


def _exaone_moe(config: Config) -> Config:
    """`sliding_window_pattern` may be a string of L (sliding) and G (full); the last layer is always full."""
    common = {"n_routed_experts": config["num_experts"], "n_shared_experts": config["num_shared_experts"]}
    pattern, count = config.get("sliding_window_pattern"), config.get("num_hidden_layers")
    if isinstance(pattern, str) and pattern and isinstance(count, int):
        kinds = ["sliding_attention" if pattern[index % len(pattern)] == "L" else "full_attention" for index in range(count)]
        kinds[-1:] = ["full_attention"]
        common["layer_types"] = config.get("layer_types") or kinds
    return common


def _window_types(header: GGUFHeader, count: int) -> list[str]:
    slides = header.get("attention.sliding_window_pattern")
    if not isinstance(slides, list):
        every = slides if isinstance(slides, int) and not isinstance(slides, bool) and slides > 0 else 4
        slides = [(layer + 1) % every != 0 for layer in range(count)]
    return ["sliding_attention" if yes else "full_attention" for yes in slides]


def _finish_exaone4(header: GGUFHeader, config: dict[str, Any]) -> None:
    """Where there are sliding windows, every fourth layer has none, unless the file lists them."""
    config |= {"attention_bias": False, "sliding_window": config.get("sliding_window")}
    if config["sliding_window"]:
        config["layer_types"] = _window_types(header, config["num_hidden_layers"])


def _finish_exaone(header: GGUFHeader, config: dict[str, Any]) -> None:  # noqa: ARG001
    config["num_layers"] = config["num_hidden_layers"]
    config["layer_norm_epsilon"] = config["rms_norm_eps"]


def _finish_olmo2(header: GGUFHeader, config: dict[str, Any]) -> None:
    """With sliding windows it is OLMo 3, whose rope is scaled in layers with full attention only."""
    if not config.get("sliding_window"):
        return
    config |= {"architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3"}
    config["layer_types"], full = _window_types(header, config["num_hidden_layers"]), config["rope_parameters"]
    local = {"rope_type": "default", "rope_theta": full["rope_theta"]}
    config["rope_parameters"] = {"full_attention": full, "sliding_attention": local}


def _finish_hunyuan(header: GGUFHeader, config: dict[str, Any]) -> None:
    if config["model_type"] == "hunyuan_v1_moe":
        config |= {"num_experts": experts_of(header), "moe_topk": config.pop("num_experts_per_tok", None)}
    config["intermediate_size"] = config.pop("moe_intermediate_size", config.get("intermediate_size"))


CARDS = (
    Card(
        _GLM, "dense", "glm:ChatGLM", ("ChatGLMModel", "ChatGLMForConditionalGeneration"), {"chatglm": {}}, derive=_chatglm,
        names={"padded_vocab_size": "vocab_size", "kv_channels": "head_dim", "seq_length": "max_position_embeddings"},
    ),
    Card(_GLM, "dense", "glm:Glm", ("GlmForCausalLM",), {"glm": _GLM_DEFAULTS}),
    Card(
        _GLM, "dense", "glm:Glm4", ("Glm4ForCausalLM",), {"glm4": _GLM_DEFAULTS},
        gguf=(
            GGUF("glm4", SILU, flags=BIASES,
                 names=("post_self_attn_layernorm", "mlp.gate_up_proj", "post_mlp_layernorm")),
        ),
    ),
    Card(
        "GLM 4.5", "MoE", "mixtures:Glm4MoE", ("Glm4MoeForCausalLM",),
        {"glm4_moe": {**ROPE, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5, "first_k_dense_replace": 1}},
        gguf=(GGUF("glm4moe", SILU, SPARSE_FIELDS, finish_normalized, flags=QK_NORM_FLAGS),),
    ),
    Card(_OLMO, "dense", "olmo:Olmo", ("OlmoForCausalLM",), {"olmo": ROPE}),
    Card(
        _OLMO, "dense", "olmo:Olmo2", ("Olmo2ForCausalLM",), {"olmo2": {**ROPE, "rms_norm_eps": 1e-5}},
        gguf=(GGUF("olmo2", {**SILU, "attention_bias": False, "mlp_bias": False}, finish=_finish_olmo2),),
    ),
    Card(_OLMO, "dense", "olmo:Olmo3", ("Olmo3ForCausalLM",), {"olmo3": {"rope_theta": 5e5, **_WINDOWS}}, derive=_olmo3),
    Card(
        _EXAONE, "dense", "exaone:Exaone", ("ExaoneForCausalLM",), {"exaone": ROPE},
        gguf=(
            GGUF(
                "exaone", {"activation_function": "silu"}, finish=_finish_exaone, layers="transformer.h",
                names=("wte", "ln_f", "ln_1", "ln_2", *(f"attn.attention.{part}_proj" for part in ("q", "k", "v", "out")),
                       "mlp.c_fc_0", "mlp.c_fc_1", "mlp.c_proj"),
            ),
        ),
    ),
    Card(
        _EXAONE, "dense", "exaone:Exaone4", ("Exaone4ForCausalLM",), {"exaone4": {**ROPE, **_WINDOWS}},
        gguf=(GGUF("exaone4", SILU, finish=_finish_exaone4),),
    ),
    Card(
        _EXAONE, "MoE", "mixtures:ExaoneMoE", ("ExaoneMoEForCausalLM", "ExaoneMoeForCausalLM"),
        {"exaone_moe": {**ROPE, "sliding_window": 4096, "sliding_window_pattern": 4, "rms_norm_eps": 1e-5,
                        "first_k_dense_replace": 1, "num_experts": 64, "num_shared_experts": 1, "routed_scaling_factor": 2.5}},
        derive=_exaone_moe,
    ),
    Card(
        _HUNYUAN, "dense", "hunyuan:HunYuan", ("HunYuanDenseV1ForCausalLM",),
        {"hunyuan_v1_dense": {**ROPE, "rms_norm_eps": 1e-5}},
        gguf=(GGUF("hunyuan-dense", SILU, finish=_finish_hunyuan, flags=_HUNYUAN_FLAGS, names=_HUNYUAN_NORMS),),
    ),
    Card(
        _HUNYUAN, "MoE", "hunyuan:HunYuanMoE", ("HunYuanMoEV1ForCausalLM",),
        {"hunyuan_v1_moe": {**ROPE, "rms_norm_eps": 1e-5}},
        gguf=(
            GGUF(
                "hunyuan-moe", SILU, finish=_finish_hunyuan, flags=_HUNYUAN_FLAGS,
                names=(*_HUNYUAN_NORMS, "mlp.gate.wg", *(f"mlp.shared_mlp.{part}_proj" for part in ("gate", "up", "down"))),
            ),
        ),
    ),
)  # fmt: skip
