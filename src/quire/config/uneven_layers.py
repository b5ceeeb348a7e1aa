"""Models whose layers differ in the keys and values that they cache, or share those of other layers."""

from collections.abc import Mapping
from typing import Any

from quire.files.reading import shown
from quire.types.errors import ModelError

Config = Mapping[str, Any]


def key_owners(config: Config) -> list[int]:
    """Return, for each layer, the layer whose KV cache it reads.

    The last `num_kv_shared_layers` layers read that of the last layer of their type before them, all others their own.
    """
    types, shared = config["layer_types"], config.get("num_kv_shared_layers") or 0
    first = len(types) - shared if isinstance(shared, int) else 0
    if not 0 < first <= len(types):
        raise ModelError(f"num_kv_shared_layers must be less than the {len(types)} layers, got {shown(shared)}")
    last = {kind: index for index, kind in enumerate(types[:first])}
    for kind in types[first:]:
        if kind not in last:
            raise ModelError(f"layer_types: a layer of {kind!r} attends to one before it, of which none keeps its own keys")
    return [*range(first), *(last[kind] for kind in types[first:])]


_NOT_BUILT = ("mamba", "is_mamba", "llama4", "is_llama4", "moe", "is_moe", "window_length", "num_sink_tokens", "sparsify")


def block_half(config: Config, index: int, half: str) -> Config:
    """Return the fields of one half (attention, ffn) of a block, where a config lists its blocks; else nothing."""
    blocks = config.get("block_configs")
    if not blocks:
        return {}
    block = blocks[index] if isinstance(blocks, list) and index < len(blocks) else None
    found = block.get(half) if isinstance(block, Mapping) else None
    if not isinstance(found, Mapping):
        raise ModelError(f"block_configs must be a list of an attention and an ffn for every layer; layer {index} lacks {half}")
    other = [name for name in _NOT_BUILT if found.get(name)]
    if other:
        raise ModelError(f"block_configs: {other[0]} of layer {index} ({half}) is not supported")
    return found


def why_not_staged(config: Config) -> str:
    """Return why a model's layers cannot be divided into pipeline stages; empty: they can."""
    if config.get("num_kv_shared_layers"):
        return "its last layers attend to keys of others (num_kv_shared_layers)"
    if config.get("hidden_size_per_layer_input"):
        return "its layers have inputs of their own (hidden_size_per_layer_input)"
    if None in config.get("layer_shapes", ()):
        return "some of its layers do not attend (block_configs)"
    if config.get("model_type") == "longcat_flash":
        return "two of them belong together"
    if config.get("bskcn_tv"):
        return "its layers are given what others were given (bskcn_1 to bskcn_4)"
    return ""
