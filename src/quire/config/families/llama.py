"""Llama and the families that have its shape."""

from typing import Any

from quire.config.families.card import BIASES, GGUF, ROPE, SILU, Card, Config
from quire.config.gguf_values import experts_of
from quire.config.layer_patterns import block_half
from quire.files.gguf import GGUFHeader
from quire.files.reading import shown
from quire.types.errors import ModelError

_LLAMA = "llama:Llama"
_MISTRAL = "Mistral, Ministral"
_INTERNLM = "InternLM 1 to 3"
_SEED_BIASES = {"attention_bias": "attn_q.bias", "attention_out_bias": "attn_output.bias"}
_NO_BIAS = {"attention_bias": False, "mlp_bias": False}
_WINDOWS = {**ROPE, "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
_YARN_MINISTRAL = {
    "rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 16384, "beta_fast": 32.0, "beta_slow": 1.0,
    "mscale_all_dim": 1.0, "mscale": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip
_LLAMA3_ROPE = {"rope_type": "llama3", "factor": 16.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192}  # fmt: skip
_LLAMA4 = {"rope_theta": 5e5, "head_dim": 128, "rms_norm_eps": 1e-5, "attention_chunk_size": 8192, "num_experts_per_tok": 1,
           "num_local_experts": 16, "hidden_act": "silu", "intermediate_size": 8192, "intermediate_size_mlp": 16384,
           "num_attention_heads": 40, "num_key_value_heads": 8}  # fmt: skip


def _finish_mixtral(header: GGUFHeader, config: dict[str, Any]) -> None:
    config["num_experts"] = config["num_local_experts"] = experts_of(header)
    config["intermediate_size"] = config.pop("moe_intermediate_size", config.get("intermediate_size"))


def _cwm(config: Config) -> Config:
    """Every fourth layer, from the first on, has full attention."""
    count = config.get("num_hidden_layers")
    if config.get("layer_types") or not isinstance(count, int):
        return {}
    return {"layer_types": ["sliding_attention" if index % 4 else "full_attention" for index in range(count)]}


def _solar(config: Config) -> Config:  # noqa: ARG001
    """Its code names a sliding window and does not apply it."""
    return {"sliding_window": None}


def _llama4(config: Config) -> Config:
    """Derive the layer lists that a config leaves out from their intervals."""
    count = config.get("num_hidden_layers")
    if not isinstance(count, int):
        return {}
    rotary, every, step = (config.get(n) for n in ("no_rope_layers", "no_rope_layer_interval", "interleave_moe_layer_step"))
    rotary = rotary or [int((index + 1) % (every or 4) != 0) for index in range(count)]
    kinds = ["chunked_attention" if rotates else "full_attention" for rotates in rotary]
    if config.get("attention_chunk_size") is None:
        kinds = ["full_attention"] * count
    moe = config.get("moe_layers")
    return {
        "no_rope_layers": rotary,
        "layer_types": config.get("layer_types") or kinds,
        "moe_layers": list(range((step or 1) - 1, count, step or 1)) if moe is None else moe,
    }


def decilm(config: Config) -> Config:
    """Read the key heads of each layer, from either of two fields; some layers have no attention."""
    count, heads, width = (config.get(name) for name in ("num_hidden_layers", "num_attention_heads", "hidden_size"))
    if not (isinstance(count, int) and isinstance(heads, int) and isinstance(width, int) and heads > 0):
        return {}
    size, each = config.get("head_dim") or width // heads, config.get("num_key_value_heads_per_layer")
    if isinstance(each, list) and len(each) == count:
        return {"layer_shapes": [(keys, size) for keys in each]}
    shapes: list[tuple[Any, Any] | None] = []
    for index in range(count):
        attention = block_half(config, index, "attention")
        if attention.get("no_op") or attention.get("replace_with_linear"):
            shapes.append(None)
            continue
        group = attention.get("n_heads_in_group") or 1
        if not isinstance(group, int) or group < 1 or heads % group:
            raise ModelError(f"block_configs: n_heads_in_group of layer {index} must divide {heads} heads, got {shown(group)}")
        shapes.append((heads // group, size))
    return {"layer_shapes": shapes}


CARDS = (
    Card(
        "Llama 1 to 3", "dense", _LLAMA, ("LlamaForCausalLM", "LLaMAForCausalLM"), {"llama": ROPE}, text=("llama",),
        sizes={"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
               "num_attention_heads": 32, "max_position_embeddings": 2048},
        gguf=(
            GGUF("llama", SILU, flags=BIASES, rotary_pairs=True),
            GGUF("internlm2", SILU, flags=BIASES, rotary_pairs=True),
        ),
    ),
    Card(
        "Llama 4 (text)", "MoE", "llama4:Llama4", ("Llama4ForCausalLM",), {"llama4_text": _LLAMA4, "llama4": _LLAMA4},
        derive=_llama4, text=("llama4_text",), chunked_attention=True,
    ),
    Card(
        _MISTRAL, "dense", _LLAMA, ("MistralForCausalLM",), {"mistral": {**ROPE, "sliding_window": 4096}}, text=("mistral",),
        sizes={"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
               "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072},
    ),
    Card(_MISTRAL, "dense", _LLAMA, ("MinistralForCausalLM",), {"ministral": {**ROPE, "sliding_window": 4096}}),
    Card(
        _MISTRAL, "dense", "llama:Ministral3", ("Ministral3ForCausalLM",),
        {"ministral3": {"rope_theta": 1e6, "head_dim": 128, "rms_norm_eps": 1e-5, "rope_scaling": _YARN_MINISTRAL}},
        text=("ministral3",),
    ),
    Card(
        "Mixtral", "MoE", "llama:Mixtral", ("MixtralForCausalLM",),
        {"mixtral": {"rope_theta": 1e6, "sliding_window": None, "num_local_experts": 8, "num_experts_per_tok": 2}},
        text=("mixtral",),
        gguf=(
            GGUF(
                "llama", SILU, finish=_finish_mixtral, rotary_pairs=True,
                when=lambda header: bool(header.get("expert_count", 0)),
                names=("block_sparse_moe.gate", *(f"block_sparse_moe.experts.w{i}" for i in (1, 2, 3))),
            ),
        ),
    ),
    Card("Aquila", "dense", _LLAMA, ("AquilaForCausalLM", "AquilaModel"), {"aquila": ROPE}),
    Card(
        "Arcee", "dense", "llama:Arcee", ("ArceeForCausalLM",), {"arcee": {**ROPE, "rms_norm_eps": 1e-5}},
        gguf=(GGUF("arcee", {"hidden_act": "relu2"}, flags=BIASES, rotary_pairs=True),),
    ),
    Card("Apertus", "dense", "apertus:Apertus", ("ApertusForCausalLM",),
         {"apertus": {"rope_theta": 1.2e7, "rms_norm_eps": 1e-5, "hidden_act": "xielu"}}),
    Card("Baichuan", "dense", "other_names:Baichuan", ("BaichuanForCausalLM", "BaiChuanForCausalLM"), {"baichuan": ROPE}),
    Card(
        "CWM", "dense", _LLAMA, ("CwmForCausalLM",),
        {"cwm": {"rope_theta": 1e6, "head_dim": 128, "rms_norm_eps": 1e-5, "sliding_window": 8192,
                 "rope_scaling": _LLAMA3_ROPE}},
        derive=_cwm,
    ),
    Card("DeciLM (Nemotron NAS)", "dense", "decilm:DeciLM", ("DeciLMForCausalLM",), {"deci": ROPE, "nemotron-nas": ROPE},
         derive=decilm),
    Card("Helium", "dense", "llama:Helium", ("HeliumForCausalLM",),
         {"helium": {"rope_theta": 1e5, "head_dim": 128, "rms_norm_eps": 1e-8}}),
    Card(_INTERNLM, "dense", "other_names:InternLM", ("InternLMForCausalLM",), {"internlm": ROPE}),
    Card(_INTERNLM, "dense", "other_names:InternLM2", ("InternLM2ForCausalLM",), {"internlm2": ROPE}),
    Card(_INTERNLM, "dense", "other_names:InternLM3", ("InternLM3ForCausalLM",), {"internlm3": ROPE}),
    Card("IQuest Coder", "dense", _LLAMA, ("IQuestCoderForCausalLM",), {"iquestcoder": ROPE}),
    Card("Jais 2", "dense", "llama:Jais2", ("Jais2ForCausalLM",),
         {"jais2": {**ROPE, "attention_bias": True, "mlp_bias": True, "hidden_act": "relu2"}}),
    Card("MiMo", "dense", "llama:MiMo", ("MiMoForCausalLM",), {"mimo": _WINDOWS}, first_layers_full=True),
    Card("openPangu", "dense", "other_names:InternLM", ("PanguEmbeddedForCausalLM",), {"PanguEmbedded": ROPE}),
    Card("Orion", "dense", "other_names:Orion", ("OrionForCausalLM",), {"orion": ROPE}),
    Card(
        "Phi 1 to 3", "dense", "llama:Phi3", ("Phi3ForCausalLM",), {"phi3": {**ROPE, "sliding_window": None}}, text=("phi3",),
        gguf=(GGUF("phi3", SILU, names=("self_attn.qkv_proj", "mlp.gate_up_proj")),),
    ),
    Card(
        "Seed-OSS", "dense", "llama:SeedOss", ("SeedOssForCausalLM",), {"seed_oss": {**ROPE, "head_dim": 128}},
        gguf=(GGUF("seed_oss", SILU, flags=_SEED_BIASES),),
    ),
    Card(
        "SmolLM3", "dense", "llama:SmolLM3", ("SmolLM3ForCausalLM",),
        {"smollm3": {"rope_theta": 2e6, "use_sliding_window": False}},
        gguf=(GGUF("smollm3", {**SILU, **_NO_BIAS, "no_rope_layer_interval": 4}, rotary_pairs=True),),
    ),
    Card("Solar Pro", "dense", "llama:Solar", ("SolarForCausalLM",), {"solar": ROPE}, derive=_solar),
    Card("XVERSE", "dense", _LLAMA, ("XverseForCausalLM",), {"xverse": ROPE}),
)  # fmt: skip
