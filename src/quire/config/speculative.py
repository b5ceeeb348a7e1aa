"""speculative_config: vLLM's fields, those that mean something here. `--spec-method` and its sisters are three of them.

Whatever is asked for here changes when tokens come, never which.
"""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from quire.types.errors import ConfigError

NAME = "speculative_config"
GROUP = "quire.drafters"  # entry points: a drafter that another package brings
NGRAM, SUFFIX, SYNTHETIC, CUSTOM, DRAFT_MODEL = "ngram", "suffix", "synthetic", "custom_class", "draft_model"
EAGLE, EAGLE3, MEDUSA, MTP = "eagle", "eagle3", "medusa", "mtp"
HEADS = (EAGLE, EAGLE3, MEDUSA, MTP)  # they read what the model computes
METHODS = (NGRAM, SUFFIX, SYNTHETIC, CUSTOM, DRAFT_MODEL, *HEADS)
ON_DEVICE = (DRAFT_MODEL, *HEADS)  # the others draft on the host
NOT_BUILT = ("mlp_speculator", "dflash", "dflash2", "dspark", "ngram_gpu", "extract_hidden_states")
MOST = 64  # drafts of a row
Schedule = tuple[tuple[int, int, int], ...]  # (from requests, to requests, most drafts)


@dataclass(frozen=True)
class SpeculativeConfig:
    method: str  # one of METHODS, or the name of an entry point
    num_speculative_tokens: int
    model: str | None = None  # of draft_model and heads: as any model is named; of custom_class: where the class is
    revision: str | None = None  # of a draft model from the hub
    told: frozenset[str] = frozenset()  # of the fields, those that were given: what files say is for the others
    prompt_lookup_min: int = 5
    prompt_lookup_max: int = 5
    suffix_decoding_max_tree_depth: int = 24
    suffix_decoding_max_cached_requests: int = 10_000
    suffix_decoding_max_spec_factor: float = 1.0
    suffix_decoding_min_token_prob: float = 0.1
    synthetic_acceptance_rates: tuple[float, ...] = ()  # of each draft, if all before it were right
    disable_by_batch_size: int | None = None  # no drafts while more requests than that are there
    num_speculative_tokens_per_batch_size: Schedule = ()
    use_heterogeneous_vocab: bool | None = None  # a draft model is asked by text; None = where it has other tokens
    adaptive: bool = True  # how many drafts a row gets is decided by what they cost and bring; otherwise it gets all there are


def _whole(low: int, high: int | None = None) -> Callable[[Any], str | None]:
    wanted = f"a whole number of at least {low}" if high is None else f"a whole number from {low} to {high}"

    def check(value: Any) -> str | None:
        good = isinstance(value, int) and not isinstance(value, bool) and value >= low and (high is None or value <= high)
        return None if good else wanted

    return check


def _number(low: float, high: float | None = None) -> Callable[[Any], str | None]:
    wanted = f"a number of at least {low:g}" if high is None else f"a number from {low:g} to {high:g}"

    def check(value: Any) -> str | None:
        good = (
            isinstance(value, int | float) and not isinstance(value, bool) and value >= low and (high is None or value <= high)
        )
        return None if good and value < float("inf") else wanted

    return check


def _text(value: Any) -> str | None:
    return None if isinstance(value, str) and value else "a string"


def _flag(value: Any) -> str | None:
    return None if isinstance(value, bool) else "true or false"


def _rates(value: Any) -> str | None:
    good = isinstance(value, list | tuple) and len(value) > 0 and all(_number(0, 1)(rate) is None for rate in value)
    return None if good else "a list of numbers from 0 to 1, one for each draft"


def _schedule(value: Any) -> str | None:
    good = isinstance(value, list | tuple) and all(
        isinstance(row, list | tuple) and len(row) == 3 and all(_whole(0)(item) is None for item in row) and row[0] <= row[1]
        for row in value
    )
    return None if good else "a list of [from, to, num_speculative_tokens]"


_CHECKS: dict[str, Callable[[Any], str | None]] = {
    "method": _text,
    "model": _text,
    "revision": _text,
    "num_speculative_tokens": _whole(1, MOST),
    "prompt_lookup_min": _whole(1),
    "prompt_lookup_max": _whole(1),
    "suffix_decoding_max_tree_depth": _whole(1),
    "suffix_decoding_max_cached_requests": _whole(0),
    "suffix_decoding_max_spec_factor": _number(0),
    "suffix_decoding_min_token_prob": _number(0, 1),
    "synthetic_acceptance_rates": _rates,
    "synthetic_acceptance_length": _number(1),
    "disable_by_batch_size": _whole(1),
    "num_speculative_tokens_per_batch_size": _schedule,
    "use_heterogeneous_vocab": _flag,
    "adaptive": _flag,
}
# vLLM's other fields: what they may be because it asks for nothing, and why they cannot be anything else
_ELSEWHERE: dict[str, tuple[tuple[Any, ...], str]] = {
    "draft_tensor_parallel_size": ((1,), "models and heads that draft are whole on every rank"),
    "rejection_sample_method": (("standard",), "a draft is right if it is what is drawn; method 'synthetic' is for benchmarks"),
    "draft_sample_method": (("greedy",), "drafters here guess the most likely token"),
    **dict.fromkeys(
        ("parallel_drafting", "disable_padded_drafter_batch", "use_local_argmax_reduction", "enable_adaptive_verification",
         "enforce_eager", "disable_logprobs"), ((False,), "no method that is built has it")),
    **dict.fromkeys(
        ("quantization", "moe_backend", "attention_backend", "kv_cache_dtype", "max_model_len", "code_revision",
         "draft_load_config", "dspark_draft_topk"), ((), "a draft model is loaded as the model itself is")),
}  # fmt: skip
_BELONGS = {"prompt_lookup_": NGRAM, "suffix_decoding_": SUFFIX, "synthetic_": SYNTHETIC}


def read_speculative(
    given: Mapping[str, Any] | None, method: str | None = None, model: str | None = None, tokens: int | None = None
) -> SpeculativeConfig | None:
    """What was asked for; None = no speculation. `method`, `model` and `tokens` are flags of their own."""
    values = {name: value for name, value in (given or {}).items() if value is not None}
    sisters = (
        ("spec_method", "method", method),
        ("spec_model", "model", model),
        ("spec_tokens", "num_speculative_tokens", tokens),
    )
    for flag, name, value in sisters:
        if value is None or (flag == "spec_tokens" and value == 0):
            continue
        if values.get(name, value) != value:
            raise ConfigError(f"{flag} is {value!r}, but {NAME}.{name} is {values[name]!r}; give one of them")
        values[name] = value
    if not values and given is None:
        return None
    for name, value in values.items():
        _check(name, value)
    values = {name: value for name, value in values.items() if name not in _ELSEWHERE}
    told = frozenset(values)
    chosen = values["method"] = _method(values)
    values["told"] = told
    for start, owner in _BELONGS.items():
        strange = [name for name in values if name.startswith(start)]
        if strange and chosen != owner:
            raise ConfigError(f"{NAME}.{strange[0]} is for method {owner!r}, but the method is {chosen!r}")
    heads = tuple(name for name in HEADS if name != MTP)
    for name, owners in (("model", (CUSTOM, DRAFT_MODEL, *heads)), ("revision", (DRAFT_MODEL, *heads))):
        if name in values and chosen not in owners:
            raise ConfigError(f"{NAME}.{name} is not for method {chosen!r}, which has no model; leave it out")
    if values.get("use_heterogeneous_vocab") and chosen != DRAFT_MODEL:
        raise ConfigError(f"{NAME}.use_heterogeneous_vocab is for method {DRAFT_MODEL!r}, but the method is {chosen!r}")
    deepest = min(values.get("suffix_decoding_max_tree_depth", SpeculativeConfig.suffix_decoding_max_tree_depth), MOST)
    values.setdefault("num_speculative_tokens", {NGRAM: 5, SUFFIX: deepest}.get(chosen, 4))
    return _complete(values)


def _check(name: str, value: Any) -> None:
    if name in _ELSEWHERE:
        harmless, reason = _ELSEWHERE[name]
        if value not in harmless:
            raise ConfigError(f"{NAME}.{name}={value!r} is not supported: {reason}; leave it out")
    elif name not in _CHECKS:
        known = [*_CHECKS, *_ELSEWHERE]
        near = difflib.get_close_matches(name, known, n=1)
        raise ConfigError(
            f"{NAME} has no {name!r}; " + (f"did you mean {near[0]}?" if near else f"it has {', '.join(_CHECKS)}")
        )
    elif (wanted := _CHECKS[name](value)) is not None:
        raise ConfigError(f"{NAME}.{name} must be {wanted}, got {value!r}")


def _method(values: dict[str, Any]) -> str:
    model = values.get("model")
    if model in (NGRAM, f"[{NGRAM}]") and values.get("method", NGRAM) == NGRAM:  # how it was said once
        del values["model"]
        return NGRAM
    method = values.get("method", DRAFT_MODEL if model is not None else None)
    if method is None:
        raise ConfigError(
            f"{NAME} needs a method ({NAME}.method, or --spec-method): {', '.join((*METHODS, *sorted(brought_drafters())))}"
        )
    if method.endswith("_mtp"):  # how it was said once
        method = MTP
    if method in NOT_BUILT:
        raise ConfigError(f"{NAME}.method {method!r} is not built; built are {', '.join(METHODS)}")
    if method not in METHODS and method not in (brought := brought_drafters()):
        raise ConfigError(f"{NAME}.method must be one of {', '.join((*METHODS, *sorted(brought)))}; got {method!r}")
    if method in ON_DEVICE and method != MTP and model is None:
        raise ConfigError(f"method {method!r} needs the model or head that drafts: {NAME}.model, or --spec-model")
    if method == CUSTOM and model is None:
        raise ConfigError(f"{NAME}.model must say where the class of method {CUSTOM!r} is: 'package.module:Class'")
    return str(method)


def _complete(values: dict[str, Any]) -> SpeculativeConfig:
    method, tokens = values["method"], values["num_speculative_tokens"]
    if method == NGRAM and (low := values.get("prompt_lookup_min")) != (high := values.get("prompt_lookup_max")):
        values["prompt_lookup_min"], values["prompt_lookup_max"] = low or high, high or low
        if values["prompt_lookup_min"] > values["prompt_lookup_max"]:
            raise ConfigError(f"{NAME}.prompt_lookup_min {low} is above prompt_lookup_max {high}")
    if method == SYNTHETIC:
        values["synthetic_acceptance_rates"] = _synthetic(values, tokens)
    values.pop("synthetic_acceptance_length", None)
    rows = values.get("num_speculative_tokens_per_batch_size", ())
    values["num_speculative_tokens_per_batch_size"] = tuple((low, high, count) for low, high, count in rows)
    return replace(SpeculativeConfig(method, tokens), **values)


def _synthetic(values: Mapping[str, Any], tokens: int) -> tuple[float, ...]:
    rates, length = values.get("synthetic_acceptance_rates"), values.get("synthetic_acceptance_length")
    if (rates is None) == (length is None):
        raise ConfigError(f"{NAME}: method {SYNTHETIC!r} needs synthetic_acceptance_rates or synthetic_acceptance_length")
    if rates is not None:
        if len(rates) not in (1, tokens):
            raise ConfigError(
                f"{NAME}.synthetic_acceptance_rates has {len(rates)} rates for {tokens} drafts; give one, or one for each"
            )
        return tuple(float(rate) for rate in rates) * (tokens if len(rates) == 1 else 1)
    assert length is not None
    if length > 1 + tokens:
        raise ConfigError(f"{NAME}.synthetic_acceptance_length {length:g} is more than {tokens} drafts can bring, {1 + tokens}")
    low, high = 0.0, 1.0
    for _ in range(60):  # the rate whose powers add up to that
        rate = (low + high) / 2
        low, high = (rate, high) if sum(rate**i for i in range(tokens + 1)) < length else (low, rate)
    return (high,) * tokens


def brought_drafters() -> dict[str, EntryPoint]:
    """By name; those with a name of ours are not heeded. Nothing is imported."""
    return {point.name: point for point in entry_points(group=GROUP) if point.name not in (*METHODS, *NOT_BUILT)}
