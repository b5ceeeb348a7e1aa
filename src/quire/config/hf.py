"""Read a Hugging Face config.json as a plain dict with all fields: the text model only, family defaults, rope in one form.

Checkpoints leave out what equals the default of their config class, and older ones spell rope as `rope_theta` and
`rope_scaling`. The result has every field that Quire reads, and `rope_parameters`.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.config.families import card_of
from quire.config.families.composites import TEXT_TYPES
from quire.config.sanity_checks import oversized_counts
from quire.files.reading import read_object, shown
from quire.files.resolve import PARAMS
from quire.types.errors import ModelError

# rope types that need the context length of the unscaled model
_SCALED = ("llama3", "yarn", "longrope")
# aliases; the three positions of "mrope" are one in a text without images
_ROPE_NAMES = {"su": "longrope", "mrope": "default"}
_FLOATS = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}
_NULL_IS_ABSENT = frozenset({"rope_parameters", "rope_scaling", "rope_theta", "rope_local_base_freq", "partial_rotary_factor"})
_SHARED_WITH_OUTER = ("dtype", "torch_dtype", "eos_token_id", "bos_token_id", "pad_token_id", "tie_word_embeddings",
                      "quantization_config", "compression_config")  # fmt: skip


def read_json(path: Path, *, required: bool = True) -> dict[str, Any]:
    found = read_object(path, _untag)
    if found is None and required:
        raise ModelError(f"{path}: the checkpoint has no {path.name}")
    return found or {}


def whole_config(path: Path, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json of a checkpoint's directory with all its parts, and overrides merged into nested objects."""
    return _merge(read_json(path / "config.json"), overrides)


def _untag(value: dict[str, Any]) -> Any:
    """JSON has no infinities; transformers writes them as {"__float__": "Infinity"}."""
    tagged = value.get("__float__") if len(value) == 1 else None
    return _FLOATS.get(tagged, value) if isinstance(tagged, str) else value


def explicit_config(raw: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the text model's config with overrides (merged into nested objects), defaults and `rope_parameters`."""
    merged, sizes = _merge(raw, overrides), dict[str, Any]()
    text = merged.get("text_config")
    if isinstance(text, dict):
        outer = {key: merged[key] for key in (*_SHARED_WITH_OUTER, "architectures") if key in merged}
        default = {"model_type": TEXT_TYPES.get(str(merged.get("model_type")), "")}
        merged = {**default, **outer, **{key: value for key, value in text.items() if key != "architectures"}}
        sizes = {"hidden_act": "silu"}
    kind, card = str(merged.get("model_type")), card_of(merged)
    if sizes and card is not None and kind == next(iter(card.types)):
        sizes |= card.sizes
    stated = {key: value for key, value in merged.items() if value is not None or key not in _NULL_IS_ABSENT}
    config = {**sizes, **(card.types[kind] if card is not None else {}), **stated}
    if stated.get("rope_parameters") and "rope_scaling" not in stated:
        config.pop("rope_scaling", None)  # rope_parameters replace the family's default
    for wrong in oversized_counts(config):
        raise ModelError(f"{wrong.field} {wrong.where} must be {wrong.right}, got {shown(wrong.value)}")
    if card is not None:
        config |= card.common_fields(config)
        if isinstance(config.get("rope_parameters"), dict):
            config["rope_parameters"] = _complete(config["rope_parameters"], config)
    if "_sliding_window_pattern" in config:
        config["sliding_window_pattern"] = config["_sliding_window_pattern"]
    if not config.get("use_sliding_window", True):
        config["sliding_window"] = None
    _settle_rope(config, overrides)
    return config


def _settle_rope(config: dict[str, Any], overrides: Mapping[str, Any]) -> None:
    """Set `rope_parameters` from `rope_theta` and `rope_scaling`, and `rope_theta` from `rope_parameters`."""
    overridden = {key for key in ("rope_theta", "rope_scaling") if key in overrides}
    if not config.get("rope_parameters") or (overridden and "rope_parameters" not in overrides):
        config.update(_rope_parameters(config, overridden))
    rope = config.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        raise ModelError(f"config.json: rope_parameters must be an object or null, got {shown(rope)}")
    rope_full = rope.get("full_attention", rope)
    if isinstance(rope_full, dict) and "rope_theta" in rope_full:
        config["rope_theta"] = rope_full["rope_theta"]


def _complete(rope: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Remove nulls from a file's `rope_parameters`, and add the family's defaults for each layer type."""
    stated = {key: _complete(value, {}) if isinstance(value, Mapping) else value for key, value in rope.items()}
    stated = {key: value for key, value in stated.items() if value is not None}
    if isinstance(kind := rope.get("rope_type"), str):
        stated["rope_type"] = _ROPE_NAMES.get(kind, kind)
    local = config.get("rope_local_base_freq")
    if local is not None and not {"full_attention", "sliding_attention"}.isdisjoint(rope):
        for layers, theta in (("full_attention", config.get("rope_theta")), ("sliding_attention", local)):
            stated[layers] = {"rope_type": "default", "rope_theta": theta} | stated.get(layers, {})
    return stated


def _merge(base: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in overrides.items():
        old = merged.get(key)
        merged[key] = _merge(old, value) if isinstance(old, dict) and isinstance(value, Mapping) else value
    return merged


def _rope_parameters(config: dict[str, Any], overridden: set[str]) -> dict[str, Any]:
    """Return `rope_theta` and `rope_scaling` as `rope_parameters`; nothing for a model without them."""
    if config.get("rope_theta") is None:
        return {}
    old = config.get("rope_parameters")
    if isinstance(old, dict) and "rope_type" in old:  # an override of one of the two keeps the other
        theta = config["rope_theta"] if "rope_theta" in overridden else old.get("rope_theta", config["rope_theta"])
        scaling = config.get("rope_scaling") if "rope_scaling" in overridden else old
    else:
        theta, scaling = config["rope_theta"], config.get("rope_scaling")
    if scaling is not None and not isinstance(scaling, dict):
        raise ModelError(f"config.json: rope_scaling must be an object or null, got {shown(scaling)}")
    rope = {"rope_theta": theta, **{key: value for key, value in (scaling or {}).items() if key not in ("type", "rope_theta")}}
    kind = (scaling or {}).get("rope_type") or (scaling or {}).get("type") or "default"
    rope["rope_type"] = _ROPE_NAMES.get(kind, kind) if isinstance(kind, str) else kind
    if rope["rope_type"] in _SCALED:
        outside = config.get("original_max_position_embeddings")
        rope.setdefault("original_max_position_embeddings", outside or config.get("max_position_embeddings"))
    if config.get("partial_rotary_factor") is not None:
        rope.setdefault("partial_rotary_factor", config["partial_rotary_factor"])
    if config.get("rope_local_base_freq") is None:
        return {"rope_parameters": rope}
    local = {"rope_type": "default", "rope_theta": config["rope_local_base_freq"]}
    return {"rope_parameters": {"full_attention": rope, "sliding_attention": local}}


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
