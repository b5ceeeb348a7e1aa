"""Which Hugging Face tensor each of llama.cpp's is: one row of `FAMILIES` per GGUF architecture."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Family:
    """`parts` maps what follows `blk.N.` to what follows `{layers}.N.`; `experts` those with one matrix per expert; `bare`
    those that are a weight or a bias by name in one of the two only."""

    parts: Mapping[str, str]
    whole: Mapping[str, str]
    layers: str = "model.layers"
    experts: Mapping[str, str] = field(default_factory=dict)
    bare: Mapping[str, str] = field(default_factory=dict)
    rotary_pairs: bool = False  # q and k rows were reordered so that the two halves of a rotary pair are neighbours
    norm_plus_one: bool = False  # norm weights were stored with their 1 added
    by_key_head: bool = False  # q, k and v in one matrix lie one behind the other, and Hugging Face has them for each key head
    transposed: frozenset[str] = frozenset()  # parts whose matrices Hugging Face stores [in, out]


def _without(parts: Mapping[str, str], *names: str) -> dict[str, str]:
    return {part: path for part, path in parts.items() if part not in names}


_WHOLE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_SANDWICH = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
MIXTRAL = Family(
    {**_ATTENTION, "ffn_gate_inp": "block_sparse_moe.gate"},
    _WHOLE,
    experts={
        "ffn_gate": "block_sparse_moe.experts.{}.w1",
        "ffn_down": "block_sparse_moe.experts.{}.w2",
        "ffn_up": "block_sparse_moe.experts.{}.w3",
    },
    rotary_pairs=True,
)
_EXPERTS = {
    "ffn_gate": "mlp.experts.{}.gate_proj",
    "ffn_up": "mlp.experts.{}.up_proj",
    "ffn_down": "mlp.experts.{}.down_proj",
}
_SHARED_EXPERT = {f"ffn_{part}_shexp": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")}


def _ssm(path: str) -> dict[str, str]:
    return {f"ssm_{part}": f"{path}.{ours}" for part, ours in (("in", "in_proj"), ("conv1d", "conv1d"), ("out", "out_proj"))}


def _mamba(path: str) -> dict[str, str]:
    return {**_ssm(path), "ssm_x": f"{path}.x_proj", "ssm_dt": f"{path}.dt_proj"}


def _mamba_bare(path: str) -> dict[str, str]:
    return {"ssm_a": f"{path}.A_log", "ssm_d": f"{path}.D"}


def _mamba2_bare(path: str) -> dict[str, str]:
    return {**_mamba_bare(path), "ssm_dt.bias": f"{path}.dt_bias"}


_BACKBONE = {
    "token_embd.weight": "backbone.embeddings.weight",
    "output_norm.weight": "backbone.norm_f.weight",
    "output.weight": "lm_head.weight",
}
_POST_NORM = {"post_attention_norm": "post_attention_layernorm"}
_HUNYUAN_NORMS = {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}
_SHARED_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "exp_probs_b": "mlp.gate.e_score_correction",
    **{f"ffn_{part}_shexp": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")},
}
_NORM_BIAS = {"output_norm.bias": "model.norm.bias"}
_FALCON = {
    "token_embd.weight": "transformer.word_embeddings.weight",
    "output_norm.weight": "transformer.ln_f.weight",
    "output_norm.bias": "transformer.ln_f.bias",
    "output.weight": "lm_head.weight",
}
FAMILIES: dict[str, Family] = {
    "llama": Family({**_ATTENTION, **_MLP}, _WHOLE, rotary_pairs=True),
    "qwen2": Family({**_ATTENTION, **_MLP}, _WHOLE),
    "qwen3": Family({**_ATTENTION, **_MLP, **_QK_NORMS}, _WHOLE),
    "qwen3moe": Family(
        {**_ATTENTION, **_QK_NORMS, "ffn_gate_inp": "mlp.gate"},
        _WHOLE,
        experts=_EXPERTS,
    ),
    "deepseek2": Family(
        {
            **_ATTENTION,
            **_MLP,
            "attn_q_a": "self_attn.q_a_proj",
            "attn_q_a_norm": "self_attn.q_a_layernorm",
            "attn_q_b": "self_attn.q_b_proj",
            "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
            "attn_kv_a_norm": "self_attn.kv_a_layernorm",
            "attn_kv_b": "self_attn.kv_b_proj",
            "attn_k_b": "self_attn.k_b_proj",
            "attn_v_b": "self_attn.v_b_proj",
            **_SHARED_EXPERTS,
        },
        _WHOLE,
        experts=_EXPERTS,
    ),
    "gemma": Family({**_ATTENTION, **_MLP}, _WHOLE, norm_plus_one=True),
    "gemma2": Family({**_ATTENTION, **_MLP, **_SANDWICH}, _WHOLE, norm_plus_one=True),
    "gemma3": Family({**_ATTENTION, **_MLP, **_SANDWICH, **_QK_NORMS}, _WHOLE, norm_plus_one=True),
    "phi3": Family(
        {**_ATTENTION, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj"}, _WHOLE
    ),
    "granite": Family({**_ATTENTION, **_MLP}, _WHOLE, rotary_pairs=True),
    "granitemoe": Family(
        {**_ATTENTION, **_SHARED_EXPERT, "ffn_gate_inp": "mlp.gate"}, _WHOLE, experts=_EXPERTS, rotary_pairs=True
    ),
    "granitehybrid": Family(
        {**_ATTENTION, **_MLP, **_SHARED_EXPERT, **_ssm("mamba"), "ssm_norm": "mamba.norm", "ffn_gate_inp": "mlp.gate"},
        _WHOLE,
        experts=_EXPERTS,
        bare=_mamba2_bare("mamba"),
        rotary_pairs=True,
    ),
    "falcon-h1": Family(
        {
            **_without(_ATTENTION, "ffn_norm"),
            **{f"ffn_{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")},
            **_ssm("mamba"),
            "ssm_norm": "mamba.norm",
        },
        {**_WHOLE, "output_norm.weight": "model.final_layernorm.weight"},
        bare={**_mamba2_bare("mamba"), **dict.fromkeys(("ffn_norm", "ffn_norm.weight"), "pre_ff_layernorm.weight")},
    ),
    "jamba": Family(
        {
            **_ATTENTION,
            **{f"ffn_{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")},
            **_mamba("mamba"),
            **{f"ssm_{part}_norm": f"mamba.{part}_layernorm" for part in ("dt", "b", "c")},
            "ffn_norm": "pre_ff_layernorm",
            "ffn_gate_inp": "feed_forward.router",
        },
        {**_WHOLE, "output_norm.weight": "model.final_layernorm.weight"},
        experts={f"ffn_{part}": f"feed_forward.experts.{{}}.{part}_proj" for part in ("gate", "up", "down")},
        bare=_mamba_bare("mamba"),
    ),
    "mamba": Family({"attn_norm": "norm", **_mamba("mixer")}, _BACKBONE, "backbone.layers", bare=_mamba_bare("mixer")),
    "mamba2": Family(
        {"attn_norm": "norm", **_ssm("mixer"), "ssm_norm": "mixer.norm"},
        _BACKBONE,
        "backbone.layers",
        bare=_mamba2_bare("mixer"),
    ),
    "gpt-oss": Family(
        {**_without(_ATTENTION, "ffn_norm"), "post_attention_norm": "post_attention_layernorm", "ffn_gate_inp": "mlp.router"},
        _WHOLE,
        experts=_EXPERTS,
        bare={"attn_sinks.weight": "self_attn.sinks"},
    ),
    "seed_oss": Family({**_without(_ATTENTION, "ffn_norm"), **_MLP, **_POST_NORM}, _WHOLE),
    "glm4": Family(
        {
            **_ATTENTION,
            "post_attention_norm": "post_self_attn_layernorm",
            "ffn_up": "mlp.gate_up_proj",
            "ffn_down": "mlp.down_proj",
            "post_ffw_norm": "post_mlp_layernorm",
        },
        _WHOLE,
    ),
    "glm4moe": Family(
        {**_without(_ATTENTION, "ffn_norm"), **_POST_NORM, **_MLP, **_QK_NORMS, **_SHARED_EXPERTS}, _WHOLE, experts=_EXPERTS
    ),
    "dots1": Family({**_ATTENTION, **_MLP, **_QK_NORMS, **_SHARED_EXPERTS}, _WHOLE, experts=_EXPERTS),
    "minimax-m2": Family(
        {**_ATTENTION, **_QK_NORMS, "ffn_gate_inp": "block_sparse_moe.gate"},
        _WHOLE,
        experts=MIXTRAL.experts,
        bare={"exp_probs_b.bias": "block_sparse_moe.e_score_correction_bias"},
    ),
    "exaone4": Family(_without({**_ATTENTION, **_MLP, **_QK_NORMS, **_SANDWICH}, "attn_norm", "ffn_norm"), _WHOLE),
    "hunyuan-dense": Family({**_ATTENTION, **_MLP, **_HUNYUAN_NORMS}, _WHOLE),
    "hunyuan-moe": Family(
        {
            **_ATTENTION,
            **_HUNYUAN_NORMS,
            "ffn_gate_inp": "mlp.gate.wg",
            **{f"ffn_{part}_shexp": f"mlp.shared_mlp.{part}_proj" for part in ("gate", "up", "down")},
        },
        _WHOLE,
        experts=_EXPERTS,
    ),
    "lfm2": Family(
        {
            **_ATTENTION,
            "attn_norm": "operator_norm",
            "attn_output": "self_attn.out_proj",
            "attn_q_norm": "self_attn.q_layernorm",
            "attn_k_norm": "self_attn.k_layernorm",
            "ffn_norm": "ffn_norm",
            **{f"shortconv.{part}": f"conv.{part}" for part in ("conv", "in_proj", "out_proj")},
            "ffn_gate": "feed_forward.w1",
            "ffn_down": "feed_forward.w2",
            "ffn_up": "feed_forward.w3",
        },
        {**_without(_WHOLE, "output_norm.weight"), "token_embd_norm.weight": "model.embedding_norm.weight"},
    ),
    "minicpm": Family({**_ATTENTION, **_MLP}, _WHOLE, rotary_pairs=True),
    "internlm2": Family({**_ATTENTION, **_MLP}, _WHOLE, rotary_pairs=True),
    "arcee": Family({**_ATTENTION, "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}, _WHOLE, rotary_pairs=True),
    "smollm3": Family({**_ATTENTION, **_MLP}, _WHOLE, rotary_pairs=True),
    "ernie4_5": Family({**_ATTENTION, **_MLP}, _WHOLE),
    "olmo2": Family(_without({**_ATTENTION, **_MLP, **_QK_NORMS, **_SANDWICH}, "attn_norm", "ffn_norm"), _WHOLE),
    "command-r": Family(_without({**_ATTENTION, **_MLP, **_QK_NORMS}, "ffn_norm"), _WHOLE),
    "cohere2": Family(_without({**_ATTENTION, **_MLP}, "ffn_norm"), _WHOLE),
    "starcoder2": Family({**_ATTENTION, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}, {**_WHOLE, **_NORM_BIAS}),
    "olmoe": Family({**_ATTENTION, **_QK_NORMS, "ffn_gate_inp": "mlp.gate"}, _WHOLE, experts=_EXPERTS),
    "qwen2moe": Family(
        {
            **_ATTENTION,
            "ffn_gate_inp": "mlp.gate",
            "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
            **_SHARED_EXPERT,
        },
        _WHOLE,
        experts=_EXPERTS,
    ),
    "exaone": Family(
        {
            "attn_norm": "ln_1",
            "attn_q": "attn.attention.q_proj",
            "attn_k": "attn.attention.k_proj",
            "attn_v": "attn.attention.v_proj",
            "attn_output": "attn.attention.out_proj",
            "ffn_norm": "ln_2",
            "ffn_gate": "mlp.c_fc_0",
            "ffn_up": "mlp.c_fc_1",
            "ffn_down": "mlp.c_proj",
        },
        {
            "token_embd.weight": "transformer.wte.weight",
            "output_norm.weight": "transformer.ln_f.weight",
            "output.weight": "lm_head.weight",
        },
        layers="transformer.h",
    ),
    "falcon": Family(
        {
            "attn_norm": "input_layernorm",
            "attn_qkv": "self_attention.query_key_value",
            "attn_output": "self_attention.dense",
            "ffn_up": "mlp.dense_h_to_4h",
            "ffn_down": "mlp.dense_4h_to_h",
        },
        _FALCON,
        layers="transformer.h",
        by_key_head=True,
    ),
    "gpt2": Family(
        {
            "attn_norm": "ln_1",
            "attn_qkv": "attn.c_attn",
            "attn_output": "attn.c_proj",
            "ffn_norm": "ln_2",
            "ffn_up": "mlp.c_fc",
            "ffn_down": "mlp.c_proj",
        },
        {
            "token_embd.weight": "transformer.wte.weight",
            "position_embd.weight": "transformer.wpe.weight",
            "output_norm.weight": "transformer.ln_f.weight",
            "output_norm.bias": "transformer.ln_f.bias",
            "output.weight": "lm_head.weight",
        },
        layers="transformer.h",
        transposed=frozenset({"attn_qkv", "attn_output", "ffn_up", "ffn_down"}),
    ),
}
