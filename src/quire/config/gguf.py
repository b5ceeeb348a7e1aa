"""Translate GGUF metadata to a Hugging Face config, by the card of the file's architecture (`config/families/`)."""

import math
import re
from collections.abc import Mapping
from typing import Any

from quire.config.families import find_gguf
from quire.config.families.card import FIELDS, Card
from quire.config.gguf_values import check_types, has_tensor, neat, number, one_value
from quire.config.sanity_checks import oversized_counts
from quire.files.gguf import GGUFHeader, GGUFTensor
from quire.files.reading import shown
from quire.types.errors import ModelError

# Tokens that end a turn or a text in some family; generation stops at each that is a control token of the model.
_END_TOKENS = frozenset({
    "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|im_end|>", "<|endoftext|>", "<|end|>", "<end_of_turn>",
    "<|eot|>", "<EOT>",
})  # fmt: skip
_CONTROL, _USER_DEFINED = 3, 4
_POOLINGS, _RANK = {0: "NONE", 1: "MEAN", 2: "CLS", 3: "LAST"}, 4  # pooling_type
# config field -> metadata key, for error messages
GGUF_NAMES = {name: key for key, name in FIELDS.items()} | {
    "rope_theta": "rope.freq_base", "partial_rotary_factor": "rope.dimension_count, as a share of attention.key_length",
    "factor": "rope.scaling.factor", "original_max_position_embeddings": "rope.scaling.original_context_length",
    "attention_factor": "rope.scaling.attn_factor", "query_pre_attn_scalar": "attention.scale",
    "attention_multiplier": "attention.scale", "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale", "logits_scaling": "logit_scale",
}  # fmt: skip
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def join_headers(headers: list[GGUFHeader]) -> GGUFHeader:
    """Return one header with the tensors of all shards and the metadata of the first."""
    tensors = {name: tensor for shard in headers for name, tensor in shard.tensors.items()}
    return GGUFHeader(headers[0].path, headers[0].metadata, tensors)


def translate(headers: list[GGUFHeader]) -> dict[str, Any]:
    """Return the Hugging Face config of the model in these shards."""
    header = join_headers(headers)
    tensors = header.tensors
    card, architecture = find_gguf(header)
    config: dict[str, Any] = {"architectures": [card.architectures[0]], "model_type": next(iter(card.types))}
    for key in architecture.required:
        if not isinstance(header.get(key), int | list) or header.get(key) == 0:
            raise ModelError(f"{header.path}: {header.architecture}.{key} must be a positive integer, got {header.get(key)!r}")
    check_types(header)
    for key, name in architecture.fields.items():
        value = header.get(key)
        if value is not None:
            config[name] = neat(one_value(header, key, value))
    config.update(architecture.fixed)
    if drafts := int(number(header, "nextn_predict_layers", 0)):  # block_count includes them
        config["num_nextn_predict_layers"] = drafts
        config["num_hidden_layers"] = max(1, config["num_hidden_layers"] - drafts)
    for wrong in oversized_counts(config):
        key = next(key for key, name in architecture.fields.items() if name == wrong.field)
        raise ModelError(f"{header.path}: {header.architecture}.{key} must be {wrong.right}, got {shown(wrong.value)}")
    config["vocab_size"] = _vocabulary(header)
    config["tie_word_embeddings"] = "output.weight" not in tensors
    config["bos_token_id"] = header.metadata.get("tokenizer.ggml.bos_token_id")
    config["eos_token_id"] = _end_ids(header.metadata)
    config["dtype"] = _dtype(tensors)
    if "rope" not in config.pop("without", ()):
        factors = {name: _floats(shard, name) for shard in headers for name in shard.tensors if name.startswith("rope_f")}
        config["rope_parameters"] = _rope(header, factors, config)
    config |= {name: has_tensor(header, tensor) for name, tensor in architecture.flags.items()}
    if architecture.finish is not None:
        architecture.finish(header, config)
    _read_pooling(header, card, config)
    return config


def _read_pooling(header: GGUFHeader, card: Card, config: dict[str, Any]) -> None:
    """Add how the model pools, if the file says so: `pooling_type`, or a class with a classification head for rank."""
    kind = int(number(header, "pooling_type", -1))
    if kind < 0:
        return
    if kind != _RANK:
        if kind not in _POOLINGS:
            known = ", ".join(map(str, (*_POOLINGS, _RANK)))
            raise ModelError(f"{header.path}: {header.architecture}.pooling_type must be one of {known}, got {kind}")
        config["pooling_type"] = _POOLINGS[kind]
        return
    head = header.tensors.get("cls.output.weight")
    if head is None:
        raise ModelError(f"{header.path}: pooling_type rank requires the tensor cls.output.weight, which is missing")
    name = re.sub(r"(Model|ForCausalLM)$", "", card.architectures[0])
    config["architectures"] = [f"{name}ForSequenceClassification"]
    config["num_labels"] = head.shape[0] if len(head.shape) == 2 else 1
    config["classifier_dense"] = "cls.weight" in header.tensors
    labels = header.get("classifier.output_labels")
    if isinstance(labels, list) and len(labels) == config["num_labels"]:
        config["id2label"] = {i: str(label) for i, label in enumerate(labels)}


def _floats(header: GGUFHeader, name: str) -> list[float]:
    """Return the values of a small F32 tensor of this file."""
    import numpy as np

    tensor = header.tensors[name]
    if tensor.type != 0:
        raise ModelError(f"{header.path}: tensor {name!r} must be F32")
    with header.path.open("rb") as file:
        file.seek(tensor.offset)
        return [float(value) for value in np.frombuffer(file.read(tensor.nbytes), dtype="<f4")]


def _vocabulary(header: GGUFHeader) -> int:
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelError(f"{header.path}: has no token_embd.weight matrix; it is not a language model, or shards are missing")
    return embedding.shape[0]


def _dtype(tensors: Mapping[str, GGUFTensor]) -> str:
    """Return the type of most elements if it is a 16-bit one; float32 for all others, quantized ones included."""
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
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": number(header, "rope.freq_base", 1e4)}
    rotated = number(header, "rope.dimension_count", head_dim)
    if rotated != head_dim:
        rope["partial_rotary_factor"] = rotated / head_dim
    original = header.get("rope.scaling.original_context_length")
    kind = header.get("rope.scaling.type", "none")
    if "rope_factors_long.weight" in factors:
        rope |= _longrope(header, factors, original or config["max_position_embeddings"])
    elif max(factors.get("rope_freqs.weight", ()), default=1.0) != 1.0:
        rope |= _llama3(header, factors["rope_freqs.weight"], rope["rope_theta"], int(rotated))
    elif kind in ("linear", "yarn"):
        rope |= {"rope_type": kind, "factor": number(header, "rope.scaling.factor", 1.0)}
        if original:
            rope["original_max_position_embeddings"] = original
    elif kind not in ("none", "longrope"):
        raise ModelError(f"{header.path}: rope scaling of type {kind!r} is not supported")
    return rope


def _longrope(header: GGUFHeader, factors: Mapping[str, list[float]], original: int) -> dict[str, Any]:
    rope = {
        "rope_type": "longrope",
        "long_factor": [neat(value) for value in factors.get("rope_factors_long.weight", ())],
        "short_factor": [neat(value) for value in factors.get("rope_factors_short.weight", ())],
        "original_max_position_embeddings": original,
    }
    if header.get("rope.scaling.attn_factor") is not None:
        rope["attention_factor"] = number(header, "rope.scaling.attn_factor", 1.0)
    return rope


def _llama3(header: GGUFHeader, found: list[float], theta: float, rotated: int) -> dict[str, Any]:
    """Return Llama 3.1's rope scaling from its tensor of divisors: the largest is the factor, all others must agree."""
    factor = neat(max(found))
    expected = llama3_divisors(theta, rotated, factor) if 2 * len(found) == rotated else []
    if not expected or any(abs(a - b) > 1e-3 * b for a, b in zip(found, expected, strict=True)):
        raise ModelError(f"{header.path}: rope_freqs.weight is not the rope scaling of Llama 3.1, the only supported one")
    return {"rope_type": "llama3", "factor": factor, **LLAMA3}


def llama3_divisors(theta: float, rotated: int, factor: float) -> list[float]:
    """Return the divisor of each rotary frequency: 1 for short waves, `factor` for long ones, a blend between."""
    low, high, original = (
        float(LLAMA3[key]) for key in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    )
    divisors = []
    for index in range(0, rotated, 2):
        turns = original / (2 * math.pi * theta ** (index / rotated))  # over the original context
        blend = min(1.0, max(0.0, (turns - low) / (high - low)))
        divisors.append(1 / ((1 - blend) / factor + blend))
    return divisors
