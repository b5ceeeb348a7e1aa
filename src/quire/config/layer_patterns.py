"""Models whose layers differ: recurrent layers and their state, shared KV caches, blocks with their own shapes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from quire.files.reading import shown
from quire.types.cache import StateCache
from quire.types.errors import ModelError

Config = Mapping[str, Any]
Kind = Literal["attention", "recurrent", "both", "neither"]  # both: in parallel


@dataclass(frozen=True)
class Layers:
    kinds: tuple[Kind, ...]  # of all layers
    state: StateCache  # of each recurrent layer

    @property
    def attentions(self) -> int:
        return sum(kind in ("attention", "both") for kind in self.kinds)

    @property
    def states(self) -> tuple[StateCache, ...]:
        return (self.state,) * sum(kind in ("recurrent", "both") for kind in self.kinds)


def read_size(config: Config, *names: str, default: int | None = None) -> int:
    """Return a positive integer that a config has under one of `names`."""
    name = next((name for name in names if config.get(name) is not None), names[0])
    value = config.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= 1 << 24:
        raise ModelError(f"{name} in the model's config must be a positive integer, got {shown(value)}")
    return value


def mamba2_sizes(config: Config) -> tuple[int, int, int, int, int]:
    """Return heads, head_dim, groups, state size, width of the convolution."""
    heads = read_size(config, "mamba_n_heads", "mamba_num_heads", "n_mamba_heads", "num_heads", default=128)
    head_dim = next(
        (config[name] for name in ("mamba_d_head", "mamba_head_dim", "mamba_headdim", "head_dim") if name in config), 0
    )
    if not isinstance(head_dim, int) or not head_dim:  # "auto"
        inner = config.get("mamba_d_ssm") or read_size(config, "mamba_expand", "expand", default=2) * read_size(
            config, "hidden_size"
        )
        head_dim = int(inner) // heads
    groups = read_size(config, "mamba_n_groups", "mamba_ngroups", "n_groups", default=1)
    if heads % groups:
        raise ModelError(f"the model's {heads} recurrent heads cannot be divided into {groups} groups")
    state = read_size(config, "mamba_d_state", "ssm_state_size", "state_size", default=128)
    return heads, head_dim, groups, state, read_size(config, "mamba_d_conv", "conv_kernel", default=4)


def mamba2_state(config: Config) -> StateCache:
    heads, head_dim, groups, state, width = mamba2_sizes(config)
    return StateCache((heads * head_dim + 2 * groups * state, width - 1), (heads, head_dim, state), groups, 2 * state)


def mamba_sizes(config: Config) -> tuple[int, int, int, int]:
    """Return channels, state size, rank of the time steps, width of the convolution."""
    hidden = read_size(config, "hidden_size")
    rank = config.get("mamba_dt_rank", config.get("time_step_rank", "auto"))
    rank = -(-hidden // 16) if rank == "auto" else read_size({"time_step_rank": rank}, "time_step_rank")
    inner = read_size(config, "mamba_expand", "expand", default=2) * hidden
    state = read_size(config, "mamba_d_state", "state_size", default=16)
    return inner, state, rank, read_size(config, "mamba_d_conv", "conv_kernel", default=4)


def mamba_state(config: Config) -> StateCache:
    inner, state, _, width = mamba_sizes(config)
    return StateCache((inner, width - 1), (inner, state))


def delta_sizes(config: Config) -> tuple[int, int, int, int, int]:
    """Return key heads, value heads, key size, value size, width of the convolution."""
    key_heads, heads = (
        read_size(config, "linear_num_key_heads", default=16),
        read_size(config, "linear_num_value_heads", default=32),
    )
    if heads % key_heads:
        raise ModelError(f"linear_num_value_heads {heads} must be a multiple of linear_num_key_heads {key_heads}")
    sizes = read_size(config, "linear_key_head_dim", default=128), read_size(config, "linear_value_head_dim", default=128)
    return key_heads, heads, *sizes, read_size(config, "linear_conv_kernel_dim", default=4)


def kinds_of(config: Config, attends: Callable[[int], bool]) -> tuple[Kind, ...]:
    return tuple("attention" if attends(index) else "recurrent" for index in range(read_size(config, "num_hidden_layers")))


def all_of(config: Config, kind: Kind) -> tuple[Kind, ...]:
    return (kind,) * read_size(config, "num_hidden_layers")


def kinds_by_types(config: Config, names: Mapping[str, Kind], key: str = "layer_types") -> tuple[Kind, ...]:
    types, count = config.get(key), read_size(config, "num_hidden_layers")
    if not isinstance(types, list) or len(types) != count or not all(kind in names for kind in types):
        known = ", ".join(names)
        raise ModelError(f"{key} in the model's config must be a list of {count} of {known}, got {shown(types)}")
    return tuple(names[kind] for kind in types)


def nemotron_types(config: Config) -> list[Any]:
    """Return the type of each layer, from whichever field has them."""
    return list(config.get("layers_block_type") or config.get("layer_types") or config.get("hybrid_override_pattern") or ())


def gated_delta_layers(config: Config) -> Layers:
    key_heads, heads, key, value, width = delta_sizes(config)
    state = StateCache((2 * key_heads * key + heads * value, width - 1), (heads, key, value), key_heads, 2 * key)
    if config.get("layer_types") is not None:
        names: dict[str, Kind] = {"full_attention": "attention", "linear_attention": "recurrent"}
        return Layers(kinds_by_types(config, names), state)
    every = read_size(config, "full_attention_interval", default=4)
    return Layers(kinds_of(config, lambda index: (index + 1) % every == 0), state)


def kimi_sizes(config: Config) -> tuple[int, int, int, int, int]:
    """Return what `delta_sizes` does."""
    heads, size = read_size(config, "linear_num_heads", default=32), read_size(config, "linear_head_dim", default=128)
    return heads, heads, size, size, read_size(config, "linear_conv_kernel_dim", default=4)


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
            raise ModelError(f"layer_types: a layer of {kind!r} shares the KV cache of an earlier one, but none has a cache")
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


def staging_problem(config: Config) -> str:
    """Return why a model's layers cannot be divided into pipeline stages; empty: they can."""
    if config.get("num_kv_shared_layers"):
        return "its last layers share the KV cache of others (num_kv_shared_layers)"
    if config.get("hidden_size_per_layer_input"):
        return "its layers have inputs of their own (hidden_size_per_layer_input)"
    if None in config.get("layer_shapes", ()):
        return "some of its layers do not attend (block_configs)"
    if config.get("model_type") == "longcat_flash":
        return "its layers work in pairs"
    if config.get("model_type") == "zamba2":
        return "its layers share weights and read the embedded tokens"
    if config.get("bskcn_tv"):
        return "its layers read inputs of other layers (bskcn_1 to bskcn_4)"
    return ""
