"""GGUF metadata told as a Hugging Face config, so that everyone else knows one kind of model description.

One row of `ARCHITECTURES` per GGUF architecture. What GGUF does not record (activation functions, softmax scales of
some sizes) is what the family always has.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from quire.files.gguf import GGUFHeader, GGUFTensor
from quire.types.errors import ModelError

_FIELDS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
_REQUIRED = ("block_count", "context_length", "embedding_length", "attention.head_count")
_GPT2_FIELDS = {
    "block_count": "n_layer",
    "context_length": "n_positions",
    "embedding_length": "n_embd",
    "feed_forward_length": "n_inner",
    "attention.head_count": "n_head",
    "attention.layer_norm_epsilon": "layer_norm_epsilon",
}
# Tokens that end a turn or a text in some family; a model that has one as a control token stops there.
_END_TOKENS = frozenset({
    "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|im_end|>", "<|endoftext|>", "<|end|>", "<end_of_turn>",
    "<|eot|>", "<EOT>",
})  # fmt: skip
_CONTROL, _USER_DEFINED = 3, 4
# names of a config -> what a file says it with, for messages
GGUF_NAMES = {name: key for key, name in _FIELDS.items()} | {
    "rope_theta": "rope.freq_base", "partial_rotary_factor": "rope.dimension_count, as a share of attention.key_length",
    "factor": "rope.scaling.factor", "original_max_position_embeddings": "rope.scaling.original_context_length",
    "attention_factor": "rope.scaling.attn_factor", "query_pre_attn_scalar": "attention.scale",
    "attention_multiplier": "attention.scale", "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale", "logits_scaling": "logit_scale",
}  # fmt: skip
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@dataclass(frozen=True)
class Architecture:
    hf_class: str
    model_type: str
    fixed: Mapping[str, Any] = field(default_factory=dict)
    fields: Mapping[str, str] = field(default_factory=lambda: _FIELDS)
    finish: Callable[[GGUFHeader, dict[str, Any]], None] | None = None


def translate(headers: list[GGUFHeader]) -> dict[str, Any]:
    """The HF config of the model in these shards."""
    tensors = {name: tensor for shard in headers for name, tensor in shard.tensors.items()}
    header = GGUFHeader(headers[0].path, headers[0].metadata, tensors)
    architecture = _architecture(header)
    config: dict[str, Any] = {"architectures": [architecture.hf_class], "model_type": architecture.model_type}
    for key in _REQUIRED:
        if not isinstance(header.get(key), int | list) or header.get(key) == 0:
            raise ModelError(f"{header.path}: {header.architecture}.{key} must be a positive integer, got {header.get(key)!r}")
    for key, name in architecture.fields.items():
        value = header.get(key)
        if value is not None:
            config[name] = _neat(_one_value(header, key, value))
    config.update(architecture.fixed)
    config["vocab_size"] = _vocabulary(header)
    config["tie_word_embeddings"] = "output.weight" not in tensors
    config["bos_token_id"] = header.metadata.get("tokenizer.ggml.bos_token_id")
    config["eos_token_id"] = _end_ids(header.metadata)
    config["dtype"] = _dtype(tensors)
    if "rope" not in config.pop("without", ()):
        factors = {name: _floats(shard, name) for shard in headers for name in shard.tensors if name.startswith("rope_f")}
        config["rope_parameters"] = _rope(header, factors, config)
    if architecture.finish is not None:
        architecture.finish(header, config)
    return config


def _floats(header: GGUFHeader, name: str) -> list[float]:
    """The values of a small F32 tensor of this very file."""
    import numpy as np

    tensor = header.tensors[name]
    if tensor.type != 0:
        raise ModelError(f"{header.path}: tensor {name!r} must be F32")
    with header.path.open("rb") as file:
        file.seek(tensor.offset)
        return [float(value) for value in np.frombuffer(file.read(tensor.nbytes), dtype="<f4")]


def _architecture(header: GGUFHeader) -> Architecture:
    name = header.architecture
    if name == "llama" and header.get("expert_count", 0):
        name = "llama with experts"
    if name not in ARCHITECTURES:
        raise ModelError(
            f"{header.path}: GGUF architecture {name!r} is not supported; these are: "
            f"{', '.join(sorted(set(ARCHITECTURES) - {'llama with experts'}))}"
        )
    return ARCHITECTURES[name]


def _one_value(header: GGUFHeader, key: str, value: Any) -> Any:
    if isinstance(value, list):
        if not value or any(item != value[0] for item in value):
            raise ModelError(f"{header.path}: {key} differs from layer to layer, which is not supported")
        value = value[0]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ModelError(f"{header.path}: {header.architecture}.{key} must be a number, got {value!r}")
    return value


def _number(header: GGUFHeader, key: str, default: float) -> float:
    value = header.get(key)
    return default if value is None else _neat(_one_value(header, key, value))


def _neat(value: float) -> float:
    """GGUF floats have 32 bits: 9.99999974e-06 was written as 1e-05."""
    return value if isinstance(value, int) else float(f"{value:.7g}")


def _vocabulary(header: GGUFHeader) -> int:
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelError(f"{header.path}: has no token_embd.weight matrix; it is not a language model, or shards are missing")
    return embedding.shape[0]


def _dtype(tensors: Mapping[str, GGUFTensor]) -> str:
    """The type most elements have, if it is a plain one; quantized blocks dequantize to float32."""
    sizes: dict[int, int] = {}
    for tensor in tensors.values():
        sizes[tensor.type] = sizes.get(tensor.type, 0) + tensor.elements
    return {1: "float16", 30: "bfloat16"}.get(max(sizes, key=lambda type_: sizes[type_]), "float32")


def _end_ids(metadata: Mapping[str, Any]) -> list[int]:
    ids = [metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    tokens, kinds = metadata.get("tokenizer.ggml.tokens") or [], metadata.get("tokenizer.ggml.token_type") or []
    special = [i for i, kind in enumerate(kinds) if kind in (_CONTROL, _USER_DEFINED)]
    ids += [i for i in special if i < len(tokens) and tokens[i] in _END_TOKENS]
    return list(dict.fromkeys(i for i in ids if isinstance(i, int)))


def _rope(header: GGUFHeader, factors: Mapping[str, list[float]], config: dict[str, Any]) -> dict[str, Any]:
    head_dim = config.get("head_dim") or max(1, config["hidden_size"] // config["num_attention_heads"])
    config["head_dim"] = head_dim
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": _number(header, "rope.freq_base", 1e4)}
    rotated = _number(header, "rope.dimension_count", head_dim)
    if rotated != head_dim:
        rope["partial_rotary_factor"] = rotated / head_dim
    original = header.get("rope.scaling.original_context_length")
    kind = header.get("rope.scaling.type", "none")
    if "rope_factors_long.weight" in factors:
        rope |= _longrope(header, factors, original or config["max_position_embeddings"])
    elif max(factors.get("rope_freqs.weight", ()), default=1.0) != 1.0:
        rope |= _llama3(header, factors["rope_freqs.weight"], rope["rope_theta"], int(rotated))
    elif kind in ("linear", "yarn"):
        rope |= {"rope_type": kind, "factor": _number(header, "rope.scaling.factor", 1.0)}
        if original:
            rope["original_max_position_embeddings"] = original
    elif kind not in ("none", "longrope"):
        raise ModelError(f"{header.path}: rope scaling of type {kind!r} is not supported")
    return rope


def _longrope(header: GGUFHeader, factors: Mapping[str, list[float]], original: int) -> dict[str, Any]:
    rope = {
        "rope_type": "longrope",
        "long_factor": [_neat(value) for value in factors.get("rope_factors_long.weight", ())],
        "short_factor": [_neat(value) for value in factors.get("rope_factors_short.weight", ())],
        "original_max_position_embeddings": original,
    }
    if header.get("rope.scaling.attn_factor") is not None:
        rope["attention_factor"] = _number(header, "rope.scaling.attn_factor", 1.0)
    return rope


def _llama3(header: GGUFHeader, found: list[float], theta: float, rotated: int) -> dict[str, Any]:
    """Llama 3.1's frequency stretching arrives as a tensor of divisors. Its largest is the factor; the rest must agree."""
    factor = _neat(max(found))
    wanted = llama3_divisors(theta, rotated, factor)
    if len(found) != len(wanted) or any(abs(a - b) > 1e-3 * b for a, b in zip(found, wanted, strict=True)):
        raise ModelError(
            f"{header.path}: rope_freqs.weight is not the frequency stretching of Llama 3.1, which alone is supported"
        )
    return {"rope_type": "llama3", "factor": factor, **LLAMA3}


def llama3_divisors(theta: float, rotated: int, factor: float) -> list[float]:
    """What each rotary frequency is divided by: 1 for short waves, `factor` for long ones, a blend between."""
    low, high, original = (
        float(LLAMA3[key]) for key in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    )
    divisors = []
    for index in range(0, rotated, 2):
        turns = original / (2 * math.pi * theta ** (index / rotated))  # over the original context
        blend = min(1.0, max(0.0, (turns - low) / (high - low)))
        divisors.append(1 / ((1 - blend) / factor + blend))
    return divisors


def _finish_llama(header: GGUFHeader, config: dict[str, Any]) -> None:
    config["attention_bias"] = "blk.0.attn_q.bias" in header.tensors
    config["mlp_bias"] = "blk.0.ffn_up.bias" in header.tensors


def _finish_experts(header: GGUFHeader, config: dict[str, Any]) -> None:
    config["num_experts"] = config["num_local_experts"] = header.get("expert_count")
    if config["model_type"] == "mixtral":
        config["intermediate_size"] = config.pop("moe_intermediate_size", config.get("intermediate_size"))


def _finish_gemma(header: GGUFHeader, config: dict[str, Any]) -> None:
    """The largest sizes scale queries by the width per head, the others by the head's own size."""
    large = {"gemma2": 46, "gemma3_text": 62}[config["model_type"]] == config["num_hidden_layers"]
    per_head = config["hidden_size"] // config["num_attention_heads"]
    scale = _number(header, "attention.scale", 0)
    config["query_pre_attn_scalar"] = round(scale**-2) if scale else per_head if large else config["head_dim"]
    pattern = header.get("attention.sliding_window_pattern", config["sliding_window_pattern"])
    if isinstance(pattern, list):
        config["layer_types"] = ["sliding_attention" if slides else "full_attention" for slides in pattern]
    else:
        config["sliding_window_pattern"] = pattern
    if config["model_type"] == "gemma3_text":
        local = {"rope_type": "default", "rope_theta": _number(header, "rope.freq_base_swa", 1e4)}
        config["rope_parameters"] = {"full_attention": config["rope_parameters"], "sliding_attention": local}


def _finish_deepseek(header: GGUFHeader, config: dict[str, Any]) -> None:
    """V2's and V3's are one architecture: experts are chosen by a softmax in the one, and by sigmoids in the other."""
    rotary, key, value = (
        header.get(name) for name in ("rope.dimension_count", "attention.key_length", "attention.value_length")
    )
    key, value = header.get("attention.key_length_mla", key), header.get("attention.value_length_mla", value)
    if not all(isinstance(size, int) for size in (rotary, key, value)) or key <= rotary:
        raise ModelError(f"{header.path}: key_length, value_length and rope.dimension_count must tell the sizes of its heads")
    config |= {"qk_rope_head_dim": rotary, "qk_nope_head_dim": key - rotary, "v_head_dim": value}
    config["q_lora_rank"] = header.get("attention.q_lora_rank")
    config["norm_topk_prob"] = bool(header.get("expert_weights_norm"))
    if header.get("expert_gating_func", 1) == 2:
        corrected = any(name.endswith(".exp_probs_b.bias") for name in header.tensors)
        config |= {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
        config |= {"topk_method": "noaux_tc" if corrected else "greedy", "n_group": config.get("n_group", 1)}
        config["topk_group"] = config.get("topk_group", 1)
    else:
        config["topk_method"] = "group_limited_greedy" if config.get("n_group", 1) > 1 else "greedy"
    stretched, weight = config["rope_parameters"], _number(header, "rope.scaling.yarn_log_multiplier", 0)
    if weight and stretched["rope_type"] == "yarn":
        stretched |= {"mscale": _neat(10 * weight), "mscale_all_dim": _neat(10 * weight)}


def _finish_granite(header: GGUFHeader, config: dict[str, Any]) -> None:
    """Also MiniCPM, whose multipliers are the same by other names; only Granite's say how queries are scaled."""
    config["embedding_multiplier"] = _number(header, "embedding_scale", 1.0)
    config["residual_multiplier"] = _number(header, "residual_scale", 1.0)
    config["logits_scaling"] = _number(header, "logit_scale", 1.0)
    config["attention_multiplier"] = _number(header, "attention.scale", config["head_dim"] ** -0.5)
    _finish_llama(header, config)


def _finish_cohere(header: GGUFHeader, config: dict[str, Any]) -> None:
    config["logit_scale"] = _number(header, "logit_scale", 1.0)
    config["use_qk_norm"] = "blk.0.attn_q_norm.weight" in header.tensors
    config["attention_bias"] = "blk.0.attn_q.bias" in header.tensors


def _finish_starcoder2(header: GGUFHeader, config: dict[str, Any]) -> None:
    config["use_bias"] = "blk.0.attn_q.bias" in header.tensors


def _finish_falcon(header: GGUFHeader, config: dict[str, Any]) -> None:
    config["new_decoder_architecture"] = "blk.0.attn_norm_2.weight" in header.tensors
    config["num_kv_heads"] = config.pop("num_key_value_heads", 1)
    if not config["new_decoder_architecture"] and config["num_kv_heads"] != 1:
        raise ModelError(f"{header.path}: a Falcon of several key heads has norms of its own for attention (attn_norm_2)")


def _finish_shared(header: GGUFHeader, config: dict[str, Any]) -> None:
    _finish_experts(header, config)
    config["shared_expert_intermediate_size"] = header.get("expert_shared_feed_forward_length")


def _finish_exaone(header: GGUFHeader, config: dict[str, Any]) -> None:  # noqa: ARG001
    config["num_layers"] = config["num_hidden_layers"]
    config["layer_norm_epsilon"] = config["rms_norm_eps"]


_LAYER_NORM = _FIELDS | {"attention.layer_norm_epsilon": "layer_norm_eps"}
_STARCODER2 = _FIELDS | {"attention.layer_norm_epsilon": "norm_epsilon"}
_FALCON = _FIELDS | {"attention.layer_norm_epsilon": "layer_norm_epsilon", "feed_forward_length": "ffn_hidden_size"}
_NO_BIAS = {"attention_bias": False, "mlp_bias": False}
_GELU = {"hidden_activation": "gelu_pytorch_tanh", "hidden_act": "gelu_pytorch_tanh", "attention_bias": False}
_SILU = {"hidden_act": "silu"}
ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("LlamaForCausalLM", "llama", _SILU, finish=_finish_llama),
    "llama with experts": Architecture("MixtralForCausalLM", "mixtral", _SILU, finish=_finish_experts),
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2", {**_SILU, "use_sliding_window": False}),
    "qwen3": Architecture("Qwen3ForCausalLM", "qwen3", {**_SILU, "use_sliding_window": False, "attention_bias": False}),
    "qwen3moe": Architecture(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        {**_SILU, "use_sliding_window": False, "attention_bias": False, "norm_topk_prob": True, "decoder_sparse_step": 1,
         "mlp_only_layers": []},
        finish=_finish_experts,
    ),
    "gemma": Architecture("GemmaForCausalLM", "gemma", _GELU),
    "gemma2": Architecture("Gemma2ForCausalLM", "gemma2", {**_GELU, "sliding_window_pattern": 2}, finish=_finish_gemma),
    "gemma3": Architecture("Gemma3ForCausalLM", "gemma3_text", {**_GELU, "sliding_window_pattern": 6}, finish=_finish_gemma),
    "phi3": Architecture("Phi3ForCausalLM", "phi3", _SILU),
    "deepseek2": Architecture(
        "DeepseekV2ForCausalLM",
        "deepseek_v2",
        _SILU,
        {
            **_FIELDS,
            "attention.kv_lora_rank": "kv_lora_rank",
            "leading_dense_block_count": "first_k_dense_replace",
            "expert_count": "n_routed_experts",
            "expert_shared_count": "n_shared_experts",
            "expert_weights_scale": "routed_scaling_factor",
            "expert_group_count": "n_group",
            "expert_group_used_count": "topk_group",
        },
        finish=_finish_deepseek,
    ),
    "granite": Architecture("GraniteForCausalLM", "granite", _SILU, finish=_finish_granite),
    "minicpm": Architecture("GraniteForCausalLM", "granite", _SILU, finish=_finish_granite),
    "internlm2": Architecture("LlamaForCausalLM", "llama", _SILU, finish=_finish_llama),  # as its conversion leaves it
    "arcee": Architecture("ArceeForCausalLM", "arcee", {"hidden_act": "relu2"}, finish=_finish_llama),
    "smollm3": Architecture("SmolLM3ForCausalLM", "smollm3", {**_SILU, **_NO_BIAS, "no_rope_layer_interval": 4}),
    "ernie4_5": Architecture("Ernie4_5ForCausalLM", "ernie4_5", {**_SILU, "use_bias": False}),
    "olmo2": Architecture("Olmo2ForCausalLM", "olmo2", {**_SILU, **_NO_BIAS}),
    "exaone": Architecture("ExaoneForCausalLM", "exaone", {"activation_function": "silu"}, finish=_finish_exaone),
    "command-r": Architecture("CohereForCausalLM", "cohere", _SILU, _LAYER_NORM, finish=_finish_cohere),
    "cohere2": Architecture(
        "Cohere2ForCausalLM", "cohere2", {**_SILU, "sliding_window_pattern": 4}, _LAYER_NORM, finish=_finish_cohere
    ),
    "starcoder2": Architecture(
        "Starcoder2ForCausalLM", "starcoder2", {"hidden_act": "gelu_pytorch_tanh"}, _STARCODER2, finish=_finish_starcoder2
    ),
    "falcon": Architecture(
        "FalconForCausalLM", "falcon", {"parallel_attn": True, "bias": False, "alibi": False, "multi_query": True}, _FALCON,
        finish=_finish_falcon,
    ),
    "qwen2moe": Architecture(
        "Qwen2MoeForCausalLM", "qwen2_moe",
        {**_SILU, "use_sliding_window": False, "norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": []},
        finish=_finish_shared,
    ),
    "olmoe": Architecture("OlmoeForCausalLM", "olmoe", {**_SILU, "norm_topk_prob": False, "attention_bias": False},
                          finish=_finish_experts),
    "gpt2": Architecture("GPT2LMHeadModel", "gpt2", {"activation_function": "gelu_new", "without": ("rope",)}, _GPT2_FIELDS),
}  # fmt: skip
