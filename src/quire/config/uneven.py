"""Models whose layers keep unlike keys and values, or none of their own."""

from collections.abc import Mapping
from typing import Any

from quire.files.reading import shown
from quire.types.errors import ModelError

Config = Mapping[str, Any]


def key_owners(config: Config) -> list[int]:
    """Of every layer, the one whose keys and values it attends to: itself, or, of the last `num_kv_shared_layers`, the last
    before those of the same type."""
    types, shared = config["layer_types"], config.get("num_kv_shared_layers") or 0
    first = len(types) - shared if isinstance(shared, int) else 0
    if not 0 < first <= len(types):
        raise ModelError(f"num_kv_shared_layers must be less than the {len(types)} layers, got {shown(shared)}")
    last = {kind: index for index, kind in enumerate(types[:first])}
    for kind in types[first:]:
        if kind not in last:
            raise ModelError(f"layer_types: a layer of {kind!r} attends to one before it, of which none keeps its own keys")
    return [*range(first), *(last[kind] for kind in types[first:])]


def gemma3n(config: Config) -> Config:
    """Every fifth layer sees everything."""
    count = config.get("num_hidden_layers")
    if config.get("layer_types") or not isinstance(count, int):
        return {}
    return {"layer_types": ["sliding_attention" if (index + 1) % 5 else "full_attention" for index in range(count)]}


def gemma4(config: Config) -> Config:
    """Every sixth layer and the last see everything, with heads of another size."""
    count, types = config.get("num_hidden_layers"), config.get("layer_types")
    if not isinstance(count, int) or count < 1:
        return {}
    if not types:
        types = ["sliding_attention" if (index + 1) % 6 else "full_attention" for index in range(count)]
    if not isinstance(types, list):
        return {}
    types = [*types[:-1], "full_attention"]
    usual = config.get("num_key_value_heads"), config.get("head_dim")
    wide = usual[0], config.get("global_head_dim") or 512
    if config.get("attention_k_eq_v") and config.get("num_global_key_value_heads"):
        wide = config["num_global_key_value_heads"], wide[1]
    shapes = [usual if kind == "sliding_attention" else wide for kind in types]
    told = config.get("per_layer_config")
    if isinstance(told, Mapping):  # as newer files say it, and then of all that differ
        shapes = [usual] * len(types)
        for index, layer in told.items():
            if str(index).isdecimal() and int(index) < len(shapes) and isinstance(layer, Mapping):
                shapes[int(index)] = layer.get("num_key_value_heads", usual[0]), layer.get("head_dim", usual[1])
    return {"layer_types": types, "layer_shapes": shapes}


def mimo_v2_flash(config: Config) -> Config:
    """The first layer and every sixth see everything; the others have twice as many key heads. The first is dense."""
    count, keys, size = (config.get(name) for name in ("num_hidden_layers", "num_key_value_heads", "head_dim"))
    if not isinstance(count, int) or not isinstance(keys, int):
        return {}
    types, feeds = config.get("layer_types"), config.get("mlp_layer_types")
    if not types:
        types = ["sliding_attention" if index and (index + 1) % 6 else "full_attention" for index in range(count)]
    if not isinstance(types, list):
        return {}
    before = config.get("sliding_window_size")  # keys before a query's own
    return {
        "layer_types": types,
        "layer_shapes": [(keys if kind == "full_attention" else 2 * keys, size) for kind in types],
        "mlp_layer_types": feeds or ["dense", *["sparse"] * (count - 1)],
        "sliding_window": before + 1 if isinstance(before, int) else config.get("sliding_window"),
    }


_OTHER_HALVES = ("mamba", "is_mamba", "llama4", "is_llama4", "moe", "is_moe", "window_length", "num_sink_tokens", "sparsify")


def of_block(config: Config, index: int, half: str) -> Config:
    """What a configuration has block by block says of one half of a block."""
    blocks = config.get("block_configs")
    if not blocks:
        return {}
    block = blocks[index] if isinstance(blocks, list) and index < len(blocks) else None
    found = block.get(half) if isinstance(block, Mapping) else None
    if not isinstance(found, Mapping):
        raise ModelError(f"block_configs must be a list of an attention and an ffn for every layer; layer {index} lacks {half}")
    other = [name for name in _OTHER_HALVES if found.get(name)]
    if other:
        raise ModelError(f"block_configs: {other[0]} of layer {index} ({half}) is not supported")
    return found


def decilm(config: Config) -> Config:
    """As many key heads as each layer says, in one of two ways; some layers do not attend."""
    count, heads, width = (config.get(name) for name in ("num_hidden_layers", "num_attention_heads", "hidden_size"))
    if not (isinstance(count, int) and isinstance(heads, int) and isinstance(width, int) and heads > 0):
        return {}
    size, each = config.get("head_dim") or width // heads, config.get("num_key_value_heads_per_layer")
    if isinstance(each, list) and len(each) == count:
        return {"layer_shapes": [(keys, size) for keys in each]}
    shapes: list[tuple[Any, Any] | None] = []
    for index in range(count):
        attention = of_block(config, index, "attention")
        if attention.get("no_op") or attention.get("replace_with_linear"):
            shapes.append(None)
            continue
        group = attention.get("n_heads_in_group") or 1
        if not isinstance(group, int) or group < 1 or heads % group:
            raise ModelError(f"block_configs: n_heads_in_group of layer {index} must divide {heads} heads, got {shown(group)}")
        shapes.append((heads // group, size))
    return {"layer_shapes": shapes}


def whole_only(config: Config) -> str:
    """Why a model's layers cannot be divided into the stages of a pipeline; empty = they can."""
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
