"""Typed values of GGUF metadata, and what the cards of families with recurrent layers read from it.

llama.cpp counts key heads in every layer: a layer that has none is recurrent.
"""

from typing import Any

from quire.config.families.card import FIELDS, REQUIRED
from quire.files.gguf import GGUFHeader
from quire.files.reading import shown
from quire.types.errors import ModelError

SOME_ATTEND = {key: name for key, name in FIELDS.items() if key != "attention.head_count_kv"}
SSM_SIZES = {"ssm.conv_kernel": "mamba_d_conv", "ssm.state_size": "mamba_d_state"}
MAMBA_BIASES = {"mamba_conv_bias": "ssm_conv1d.bias", "mamba_proj_bias": "ssm_in.bias"}  # GGUF.flags
SSM_REQUIRED = (*REQUIRED, "ssm.conv_kernel", "ssm.inner_size", "ssm.state_size", "ssm.time_step_rank")
# keys whose values must have the right type, also in files of an architecture that does not read them
_NUMBERS = (
    *FIELDS, "attention.layer_norm_epsilon", "attention.value_length", "attention.key_length_mla", "attention.value_length_mla",
    "attention.q_lora_rank", "attention.kv_lora_rank", "attention.scale", "rope.dimension_count", "rope.freq_base",
    "rope.freq_base_swa", "rope.scaling.factor", "rope.scaling.attn_factor", "rope.scaling.original_context_length",
    "rope.scaling.yarn_log_multiplier", "expert_gating_func", "expert_shared_count", "expert_shared_feed_forward_length",
    "expert_weights_scale", "expert_group_count", "expert_group_used_count", "leading_dense_block_count",
    "nextn_predict_layers", "ssm.conv_kernel", "ssm.state_size", "ssm.inner_size", "ssm.time_step_rank", "ssm.group_count",
    "shortconv.l_cache", "embedding_scale", "residual_scale", "logit_scale",
)  # fmt: skip
_FLAGS = ("expert_weights_norm", "rope.scaling.finetuned", "ssm.dt_b_c_rms")


def check_types(header: GGUFHeader) -> None:
    """Raise ModelError for a value of a wrong type; lists have one value per layer."""
    for keys, kinds, right in (
        (_NUMBERS, {int, float}, "a number"),
        (_FLAGS, {bool}, "true or false"),
        (("attention.sliding_window_pattern",), {bool, int}, "an integer, or a list of true and false"),
    ):
        for key in keys:
            value = header.get(key)
            if value is not None and not kinds.issuperset(map(type, value if isinstance(value, list) else [value])):
                raise ModelError(f"{header.path}: {header.architecture}.{key} must be {right}, got {shown(value)}")


def one_value(header: GGUFHeader, key: str, value: Any) -> Any:
    if isinstance(value, list):
        if not value or any(item != value[0] for item in value):
            raise ModelError(f"{header.path}: {key} differs from layer to layer, which is not supported")
        value = value[0]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ModelError(f"{header.path}: {header.architecture}.{key} must be a number, got {value!r}")
    return value


def experts_of(header: GGUFHeader) -> int:
    """Return `expert_count` of a mixture of experts."""
    count = header.get("expert_count")
    if type(count) is not int or count < 1:
        raise ModelError(f"{header.path}: {header.architecture}.expert_count must be a positive integer, got {count!r:.100}")
    return count


def number(header: GGUFHeader, key: str, default: float) -> float:
    value = header.get(key)
    return default if value is None else neat(one_value(header, key, value))


def neat(value: float) -> float:
    """Round a float to what was written: GGUF stores 1e-05 in 32 bits as 9.99999974e-06."""
    return value if isinstance(value, int) else float(f"{value:.7g}")


def has_tensor(header: GGUFHeader, part: str) -> bool:
    """Return whether any layer has this tensor."""
    return any(name.startswith("blk.") and name.endswith(f".{part}") for name in header.tensors)


def positive_size(header: GGUFHeader, key: str) -> int:
    return int(one_value(header, key, header.get(key)))


def mamba2_fields(header: GGUFHeader, config: dict[str, Any], heads: str, head_dim: str, groups: str) -> None:
    """Set the sizes of Mamba 2 layers under the family's names for heads, head size and groups."""
    inner, count = positive_size(header, "ssm.inner_size"), positive_size(header, "ssm.time_step_rank")
    if inner % count:
        raise ModelError(f"{header.path}: ssm.inner_size {inner} is no multiple of the {count} heads (ssm.time_step_rank)")
    config |= {heads: count, head_dim: inner // count, groups: header.get("ssm.group_count", 1), "mamba_d_ssm": inner}


def attending_layers(header: GGUFHeader, config: dict[str, Any]) -> list[bool]:
    """Return for each layer whether it attends; set the config's `num_key_value_heads`."""
    found, count = header.get("attention.head_count_kv"), config["num_hidden_layers"]
    counts = {heads for heads in found if heads} if isinstance(found, list) else {found}
    if (isinstance(found, list) and len(found) != count) or len(counts) > 1 or not all(type(n) is int for n in counts):
        raise ModelError(
            f"{header.path}: {header.architecture}.attention.head_count_kv must be a list of {count} integers, 0 where a "
            f"layer is recurrent and otherwise one and the same, got {found!r:.200}"
        )
    config["num_key_value_heads"] = next(iter(counts), config["num_attention_heads"])
    return [bool(heads) for heads in found] if isinstance(found, list) else [bool(found)] * count
