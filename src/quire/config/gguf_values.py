"""What a GGUF architecture is told by, and numbers of a file's metadata."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from quire.files.gguf import GGUFHeader
from quire.files.reading import shown
from quire.types.errors import ModelError

FIELDS = {
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
REQUIRED = ("block_count", "context_length", "embedding_length", "attention.head_count")
# what is known by name must be of its type, also in files of an architecture that does not need it
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


@dataclass(frozen=True)
class Architecture:
    """`fields`: a file's -> a config's; `fixed`: what files do not say; `required`: of a file's, positive integers."""

    hf_class: str
    model_type: str
    fixed: Mapping[str, Any] = field(default_factory=dict)
    fields: Mapping[str, str] = field(default_factory=lambda: FIELDS)
    finish: Callable[[GGUFHeader, dict[str, Any]], None] | None = None
    required: tuple[str, ...] = REQUIRED


def check_types(header: GGUFHeader) -> None:
    """Lists are of one value per layer."""
    for keys, kinds, right in (
        (_NUMBERS, {int, float}, "a number"),
        (_FLAGS, {bool}, "true or false"),
        (("attention.sliding_window_pattern",), {bool, int}, "a whole number, or a list of true and false"),
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
    """Of a model that has some."""
    count = header.get("expert_count")
    if type(count) is not int or count < 1:
        raise ModelError(f"{header.path}: {header.architecture}.expert_count must be a positive integer, got {count!r:.100}")
    return count


def number(header: GGUFHeader, key: str, default: float) -> float:
    value = header.get(key)
    return default if value is None else neat(one_value(header, key, value))


def neat(value: float) -> float:
    """GGUF floats have 32 bits: 9.99999974e-06 was written as 1e-05."""
    return value if isinstance(value, int) else float(f"{value:.7g}")
