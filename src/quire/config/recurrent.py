"""Which layers of a model are recurrent, and what those keep of a sequence: one reader for each model_type."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from quire.files.reading import shown
from quire.types.cache import StateCache
from quire.types.errors import ModelError

Config = Mapping[str, Any]
Kind = Literal["attention", "recurrent", "both", "neither"]  # both: side by side


@dataclass(frozen=True)
class Layers:
    kinds: tuple[Kind, ...]  # of all layers
    state: StateCache  # of each that is recurrent

    @property
    def attentions(self) -> int:
        return sum(kind in ("attention", "both") for kind in self.kinds)

    @property
    def states(self) -> tuple[StateCache, ...]:
        return (self.state,) * sum(kind in ("recurrent", "both") for kind in self.kinds)


def read_recurrent(config: Config) -> Layers | None:
    """None = all of its layers attend, as far as is known here."""
    read = READERS.get(str(config.get("model_type")))
    return None if read is None else read(config)


def whole(config: Config, *names: str, default: int | None = None) -> int:
    """A positive integer under any of its names."""
    name = next((name for name in names if config.get(name) is not None), names[0])
    value = config.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= 1 << 24:
        raise ModelError(f"{name} in the model's config must be a positive integer, got {shown(value)}")
    return value


def mamba2_sizes(config: Config) -> tuple[int, int, int, int, int]:
    """heads, head_dim, groups, state, width of the convolution."""
    heads = whole(config, "mamba_n_heads", "mamba_num_heads", "n_mamba_heads", "num_heads", default=128)
    head_dim = next(
        (config[name] for name in ("mamba_d_head", "mamba_head_dim", "mamba_headdim", "head_dim") if name in config), 0
    )
    if not isinstance(head_dim, int) or not head_dim:  # "auto"
        inner = config.get("mamba_d_ssm") or whole(config, "mamba_expand", "expand", default=2) * whole(config, "hidden_size")
        head_dim = int(inner) // heads
    groups = whole(config, "mamba_n_groups", "mamba_ngroups", "n_groups", default=1)
    if heads % groups:
        raise ModelError(f"the model's {heads} recurrent heads cannot be divided into {groups} groups")
    state = whole(config, "mamba_d_state", "ssm_state_size", "state_size", default=128)
    return heads, head_dim, groups, state, whole(config, "mamba_d_conv", "conv_kernel", default=4)


def mamba2_state(config: Config) -> StateCache:
    heads, head_dim, groups, state, width = mamba2_sizes(config)
    return StateCache((heads * head_dim + 2 * groups * state, width - 1), (heads, head_dim, state))


def mamba_sizes(config: Config) -> tuple[int, int, int, int]:
    """channels, state, rank of the time steps, width of the convolution."""
    hidden = whole(config, "hidden_size")
    rank = config.get("mamba_dt_rank", config.get("time_step_rank", "auto"))
    rank = -(-hidden // 16) if rank == "auto" else whole({"time_step_rank": rank}, "time_step_rank")
    inner = whole(config, "mamba_expand", "expand", default=2) * hidden
    state = whole(config, "mamba_d_state", "state_size", default=16)
    return inner, state, rank, whole(config, "mamba_d_conv", "conv_kernel", default=4)


def mamba_state(config: Config) -> StateCache:
    inner, state, _, width = mamba_sizes(config)
    return StateCache((inner, width - 1), (inner, state))


def delta_sizes(config: Config) -> tuple[int, int, int, int, int]:
    """key heads, heads, size of a key, size of a value, width of the convolution."""
    key_heads, heads = whole(config, "linear_num_key_heads", default=16), whole(config, "linear_num_value_heads", default=32)
    if heads % key_heads:
        raise ModelError(f"linear_num_value_heads {heads} must be a multiple of linear_num_key_heads {key_heads}")
    sizes = whole(config, "linear_key_head_dim", default=128), whole(config, "linear_value_head_dim", default=128)
    return key_heads, heads, *sizes, whole(config, "linear_conv_kernel_dim", default=4)


def kinds_of(config: Config, attends: Callable[[int], bool]) -> tuple[Kind, ...]:
    return tuple("attention" if attends(index) else "recurrent" for index in range(whole(config, "num_hidden_layers")))


def all_of(config: Config, kind: Kind) -> tuple[Kind, ...]:
    return (kind,) * whole(config, "num_hidden_layers")


def kinds_by_types(config: Config, names: Mapping[str, Kind], key: str = "layer_types") -> tuple[Kind, ...]:
    types, count = config.get(key), whole(config, "num_hidden_layers")
    if not isinstance(types, list) or len(types) != count or not all(kind in names for kind in types):
        known = ", ".join(names)
        raise ModelError(f"{key} in the model's config must be a list of {count} of {known}, got {shown(types)}")
    return tuple(names[kind] for kind in types)


def _bamba(config: Config) -> Layers:
    at = config.get("attn_layer_indices") or ()
    types = config.get("layers_block_type") or config.get("layer_types")
    if types and not at:
        at = [index for index, kind in enumerate(types) if kind in ("attention", "full_attention")]
    return Layers(kinds_of(config, lambda index: index in at), mamba2_state(config))


def _lfm2(config: Config) -> Layers:
    state = StateCache((whole(config, "hidden_size"), whole(config, "conv_L_cache", default=3) - 1))
    if config.get("layer_types") is not None:
        names: dict[str, Kind] = {"full_attention": "attention", "conv": "recurrent"}
        return Layers(kinds_by_types(config, names), state)
    at = config.get("full_attn_idxs")
    return Layers(kinds_of(config, lambda index: at is None or index in at), state)


def _mamba(config: Config) -> Layers:
    return Layers(all_of(config, "recurrent"), mamba_state(config))


def _mamba2(config: Config) -> Layers:
    return Layers(all_of(config, "recurrent"), mamba2_state(config))


def _granite(config: Config) -> Layers:
    types = config.get("layer_types") or config.get("layers_block_type") or ()
    at = {index for index, kind in enumerate(types) if kind in ("attention", "full_attention")}
    return Layers(kinds_of(config, lambda index: index in at), mamba2_state(config))


def _falcon_h1(config: Config) -> Layers:
    return Layers(all_of(config, "both"), mamba2_state(config))


def _jamba(config: Config) -> Layers:
    period, offset = whole(config, "attn_layer_period", default=8), config.get("attn_layer_offset", 4)
    return Layers(kinds_of(config, lambda index: index % period == offset), mamba_state(config))


def nemotron_types(config: Config) -> list[Any]:
    """Of each layer, by one of its names."""
    return list(config.get("layers_block_type") or config.get("layer_types") or config.get("hybrid_override_pattern") or ())


def _nemotron_h(config: Config) -> Layers:
    names: dict[str, Kind] = {
        "mamba": "recurrent", "linear_attention": "recurrent", "attention": "attention", "full_attention": "attention",
        "mlp": "neither", "moe": "neither", "M": "recurrent", "*": "attention", "-": "neither", "E": "neither",
    }  # fmt: skip
    types = nemotron_types(config)
    if not types or not all(kind in names for kind in types):
        raise ModelError(f"layers_block_type in the model's config must be a list of {', '.join(names)}, got {shown(types)}")
    return Layers(tuple(names[kind] for kind in types), mamba2_state(config))


def _delta_net(config: Config) -> Layers:
    key_heads, heads, key, value, width = delta_sizes(config)
    state = StateCache((2 * key_heads * key + heads * value, width - 1), (heads, key, value))
    if config.get("layer_types") is not None:
        names: dict[str, Kind] = {"full_attention": "attention", "linear_attention": "recurrent"}
        return Layers(kinds_by_types(config, names), state)
    every = whole(config, "full_attention_interval", default=4)
    return Layers(kinds_of(config, lambda index: (index + 1) % every == 0), state)


def _olmo_hybrid(config: Config) -> Layers:
    """Heads are attention's, if it does not say otherwise, and every fourth layer attends; the last of a few."""
    layers = _delta_net(config)
    if config.get("layer_types") is None and not layers.attentions:
        return Layers((*layers.kinds[:-1], "attention"), layers.state)
    return layers


def kimi_sizes(config: Config) -> tuple[int, int, int, int, int]:
    """As `delta_sizes`."""
    heads, size = whole(config, "linear_num_heads", default=32), whole(config, "linear_head_dim", default=128)
    return heads, heads, size, size, whole(config, "linear_conv_kernel_dim", default=4)


def _kimi_linear(config: Config) -> Layers:
    heads, _, size, _, width = kimi_sizes(config)
    names: dict[str, Kind] = {"full_attention": "attention", "linear_attention": "recurrent"}
    return Layers(kinds_by_types(config, names), StateCache((3 * heads * size, width - 1), (heads, size, size)))


def _minimax(config: Config) -> Layers:
    heads = whole(config, "num_attention_heads")
    size = whole(config, "head_dim", default=max(1, whole(config, "hidden_size") // heads))
    state = StateCache(state=(heads, size, size))
    if config.get("layer_types") is not None:
        names: dict[str, Kind] = {"full_attention": "attention", "linear_attention": "recurrent"}
        return Layers(kinds_by_types(config, names), state)
    return Layers(kinds_of(config, lambda index: index % 2 == 0), state)


def _zamba2(config: Config) -> Layers:
    names: dict[str, Kind] = {"linear_attention": "recurrent", "mamba": "recurrent", "hybrid": "both"}
    return Layers(kinds_by_types(config, names, "layers_block_type"), mamba2_state(config))


READERS: Mapping[str, Callable[[Config], Layers]] = MappingProxyType(
    {
        "bamba": _bamba,
        "falcon_h1": _falcon_h1,
        "falcon_mamba": _mamba,
        "granitemoehybrid": _granite,
        "jamba": _jamba,
        "kimi_linear": _kimi_linear,
        "lfm2": _lfm2,
        "lfm2_moe": _lfm2,
        "mamba": _mamba,
        "mamba2": _mamba2,
        "minimax": _minimax,
        "nemotron_h": _nemotron_h,
        "olmo_hybrid": _olmo_hybrid,
        "qwen3_5_moe_text": _delta_net,
        "qwen3_5_text": _delta_net,
        "qwen3_next": _delta_net,
        "zamba2": _zamba2,
    }
)
