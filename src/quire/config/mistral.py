"""Translate Mistral's params.json to the fields of Hugging Face's config.json."""

from collections.abc import Mapping
from typing import Any

from quire.files.resolve import PARAMS
from quire.types.errors import ModelError

_NAMES = {
    "dim": "hidden_size", "n_layers": "num_hidden_layers", "hidden_dim": "intermediate_size", "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads", "head_dim": "head_dim", "norm_eps": "rms_norm_eps", "vocab_size": "vocab_size",
    "rope_theta": "rope_theta", "sliding_window": "sliding_window", "tied_embeddings": "tie_word_embeddings",
}  # fmt: skip
_LENGTHS = ("max_position_embeddings", "max_seq_len", "model_max_length")
_DEFAULT_LENGTH = 128_000
_NEEDED = ("dim", "n_layers", "hidden_dim", "n_heads", "vocab_size")
_NOT_BUILT = {
    "vision_encoder": "media are not supported", "multimodal": "media are not supported",
    "whisper_model_args": "audio is not supported", "q_lora_rank": "its attention is latent",
    "kv_lora_rank": "its attention is latent", "yarn": "its positions are scaled (yarn)",
    "quantization": "its weights are quantized", "llama_4_scaling": "its attention is scaled by position",
}  # fmt: skip


def translate_params(params: Mapping[str, Any]) -> dict[str, Any]:
    for name, why in _NOT_BUILT.items():
        if params.get(name):
            raise ModelError(
                f"{PARAMS} has {name}: {why}, which is read from the Hugging Face format only (config_format='hf')"
            )
    missing = [name for name in _NEEDED if not isinstance(params.get(name), int)]
    if missing:
        raise ModelError(f"{PARAMS} must have the integer {missing[0]}")
    config: dict[str, Any] = {ours: params[name] for name, ours in _NAMES.items() if params.get(name) is not None}
    config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "hidden_act": "silu", "bos_token_id": 1}
    config |= {"eos_token_id": 2, "torch_dtype": "bfloat16"}
    config["max_position_embeddings"] = next((params[name] for name in _LENGTHS if params.get(name)), _DEFAULT_LENGTH)
    config.setdefault("num_key_value_heads", params["n_heads"])
    config.setdefault("sliding_window", None)
    config.setdefault("rope_theta", 10000.0)
    config.setdefault("rms_norm_eps", 1e-5)
    config.setdefault("tie_word_embeddings", False)
    experts = params.get("moe")
    if experts:
        config |= {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
        config |= {"num_local_experts": experts["num_experts"], "num_experts_per_tok": experts["num_experts_per_tok"]}
    return config
