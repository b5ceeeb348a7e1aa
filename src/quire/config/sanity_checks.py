"""Check config fields whose wrong values no tensor's shape would contradict.

A wrong value would build a model whose answers are all errors. GGUF metadata has been translated before.
The sizes of lists are checked earlier, during the translation (`oversized_counts`).
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from quire.types.checks import is_finite


class Rule(NamedTuple):
    fits: Callable[[Any], bool]
    right: str


class Wrong(NamedTuple):
    field: str
    right: str
    value: Any
    where: str  # the field is


def _is_number(value: Any) -> bool:
    """Return whether it is a finite number that float32 can hold."""
    return not isinstance(value, bool) and isinstance(value, int | float) and is_finite(value) and abs(value) < 2.0**128


def _is_positive(value: Any) -> bool:
    return _is_number(value) and value > 0


FLAG = Rule(lambda value: isinstance(value, bool), "true or false")
NUMBER = Rule(_is_number, "a number")
POSITIVE = Rule(_is_positive, "a positive number")
NOT_NEGATIVE = Rule(lambda value: _is_number(value) and value >= 0, "a number of at least 0")
SMALL = Rule(lambda value: _is_number(value) and 0 <= value < 1, "a number of at least 0 and below 1")
SHARE = Rule(lambda value: _is_number(value) and 0 < value <= 1, "a share of a head: a number above 0, 1 at most")
POSITIVES = Rule(
    lambda value: isinstance(value, list | tuple) and bool(value) and all(map(_is_positive, value)),
    "a list of positive numbers",
)
LENGTH = Rule(lambda value: _is_number(value) and 1 <= value <= 1 << 30 and value == int(value), "a positive integer")


def _sizes(low: int, high: int, right: str) -> Rule:
    """Return a rule for an integer, or a list with one per layer."""

    def fits(value: Any) -> bool:
        return all(
            type(size) is int and low <= size <= high for size in (value if isinstance(value, list | tuple) else [value])
        )

    return Rule(fits, f"{right}, {high:,} at most")


WIDTH = _sizes(1, 1 << 28, "a positive integer")
COUNT = _sizes(0, 1 << 16, "an integer of at least 0")
MAX_LAYERS = 1 << 12
_DEPTH = Rule(lambda value: not isinstance(value, int) or value <= MAX_LAYERS, f"at most {MAX_LAYERS:,}")
COUNTS = dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), _DEPTH)

_ROTATION = {"rope_theta": POSITIVE, "partial_rotary_factor": SHARE, "original_max_position_embeddings": LENGTH}
FIELDS: dict[str, Rule] = {
    **_ROTATION,
    "rope_local_base_freq": POSITIVE,
    "intermediate_size": WIDTH,
    "moe_intermediate_size": _sizes(0, 1 << 28, "an integer of at least 0"),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "n_shared_experts", "num_experts_per_tok"), COUNT),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "zero_expert_num", "num_nextn_predict_layers"), COUNT),
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"), SMALL),
    **dict.fromkeys(("tie_word_embeddings", "attention_bias", "mlp_bias", "norm_topk_prob"), FLAG),
    **dict.fromkeys(("attn_logit_softcapping", "router_jitter_noise"), NOT_NEGATIVE),
    **dict.fromkeys(("final_logit_softcapping", "query_pre_attn_scalar", "logits_scaling"), POSITIVE),
    **dict.fromkeys(("embedding_multiplier", "residual_multiplier", "attention_multiplier", "routed_scaling_factor"), NUMBER),
    "logit_scale": Rule(lambda value: isinstance(value, str) or _is_number(value), NUMBER.right),  # MPT's may be a string
}
ROPE: dict[str, Rule] = {
    **_ROTATION,
    **dict.fromkeys(("rope_type", "type"), Rule(lambda value: isinstance(value, str), "a name, such as default or yarn")),
    **dict.fromkeys(("factor", "low_freq_factor", "high_freq_factor"), POSITIVE),
    **dict.fromkeys(("long_factor", "short_factor"), POSITIVES),
    **dict.fromkeys(
        ("alpha", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "short_mscale", "long_mscale"),
        NOT_NEGATIVE,
    ),
    "truncate": FLAG,
}


def oversized_counts(config: Mapping[str, Any]) -> Iterator[Wrong]:
    """Yield counts so large that a list of that length would not fit into memory."""
    yield from _wrong(config, COUNTS, "in the model's config")


def invalid_fields(config: Mapping[str, Any]) -> Iterator[Wrong]:
    """Yield fields with invalid values. Null is allowed."""
    rope = config.get("rope_parameters")
    for settings in (rope, *rope.values()) if isinstance(rope, Mapping) else ():  # of all layers, or of a layer type
        yield from _wrong(settings, ROPE, "in the rope parameters of the model's config")
    yield from _wrong(config, FIELDS, "in the model's config")


def _wrong(values: Any, rules: Mapping[str, Rule], where: str) -> Iterator[Wrong]:
    for field, rule in rules.items() if isinstance(values, Mapping) else ():
        if (value := values.get(field)) is not None and not rule.fits(value):
            yield Wrong(field, rule.right, value, where)
