"""speculative_config: vLLM's fields that Quire supports. `--spec-method`, `--spec-model` and `--spec-tokens` are three of them.

Speculation changes when tokens come, never which tokens.
"""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from quire.config.plugins import DRAFTERS, PlugIn, find_plugins, why_missing
from quire.types.errors import ConfigError

NAME = "speculative_config"
NGRAM, SUFFIX, SYNTHETIC, CUSTOM, DRAFT_MODEL = "ngram", "suffix", "synthetic", "custom_class", "draft_model"
EAGLE, EAGLE3, MEDUSA, MTP = "eagle", "eagle3", "medusa", "mtp"
HEADS = (EAGLE, EAGLE3, MEDUSA, MTP)  # they read the model's hidden states
METHODS = (NGRAM, SUFFIX, SYNTHETIC, CUSTOM, DRAFT_MODEL, *HEADS)
ON_DEVICE = (DRAFT_MODEL, *HEADS)  # the others draft on the host
NOT_BUILT = ("mlp_speculator", "dflash", "dflash2", "dspark", "ngram_gpu", "extract_hidden_states")
MAX_DRAFTS = 64  # of a row
Schedule = tuple[tuple[int, int, int], ...]  # (from requests, to requests, most drafts)


@dataclass(frozen=True)
class SpeculativeConfig:
    method: str  # one of METHODS, or the name of an entry point
    num_speculative_tokens: int
    model: str | None = None  # draft_model and heads: a model's name; custom_class: "package.module:Class"
    revision: str | None = None  # of a draft model from the hub
    explicit: frozenset[str] = frozenset()  # fields that the user set; the draft model's files decide the others
    prompt_lookup_min: int = 5
    prompt_lookup_max: int = 5
    suffix_decoding_max_tree_depth: int = 24
    suffix_decoding_max_cached_requests: int = 10_000
    suffix_decoding_max_spec_factor: float = 1.0
    suffix_decoding_min_token_prob: float = 0.1
    synthetic_acceptance_rates: tuple[float, ...] = ()  # of each draft token, if all before it were accepted
    disable_by_batch_size: int | None = None  # no drafts while there are more requests
    num_speculative_tokens_per_batch_size: Schedule = ()
    use_heterogeneous_vocab: bool | None = None  # the draft model drafts by text; None: if its tokens differ
    adaptive: bool = True  # drafts per row follow costs and acceptance; False: always all


def _integer(low: int, high: int | None = None) -> Callable[[Any], str | None]:
    right = f"an integer of at least {low}" if high is None else f"an integer from {low} to {high}"

    def check(value: Any) -> str | None:
        good = isinstance(value, int) and not isinstance(value, bool) and value >= low and (high is None or value <= high)
        return None if good else right

    return check


def _number(low: float, high: float | None = None) -> Callable[[Any], str | None]:
    right = f"a number of at least {low:g}" if high is None else f"a number from {low:g} to {high:g}"

    def check(value: Any) -> str | None:
        good = (
            isinstance(value, int | float) and not isinstance(value, bool) and value >= low and (high is None or value <= high)
        )
        return None if good and value < float("inf") else right

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
        isinstance(row, list | tuple) and len(row) == 3 and all(_integer(0)(item) is None for item in row) and row[0] <= row[1]
        for row in value
    )
    return None if good else "a list of [from, to, num_speculative_tokens]"


_CHECKS: dict[str, Callable[[Any], str | None]] = {
    "method": _text,
    "model": _text,
    "revision": _text,
    "num_speculative_tokens": _integer(1, MAX_DRAFTS),
    "prompt_lookup_min": _integer(1),
    "prompt_lookup_max": _integer(1),
    "suffix_decoding_max_tree_depth": _integer(1),
    "suffix_decoding_max_cached_requests": _integer(0),
    "suffix_decoding_max_spec_factor": _number(0),
    "suffix_decoding_min_token_prob": _number(0, 1),
    "synthetic_acceptance_rates": _rates,
    "synthetic_acceptance_length": _number(1),
    "disable_by_batch_size": _integer(1),
    "num_speculative_tokens_per_batch_size": _schedule,
    "use_heterogeneous_vocab": _flag,
    "adaptive": _flag,
}
# vLLM's other fields: values without effect, which are accepted, and why others are not
_UNSUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "draft_tensor_parallel_size": ((1,), "draft models and heads are replicated on every rank"),
    "rejection_sample_method": (("standard",), "a draft is accepted if it is sampled; method 'synthetic' is for benchmarks"),
    "draft_sample_method": (("greedy",), "drafters propose the most likely token"),
    **dict.fromkeys(
        ("parallel_drafting", "disable_padded_drafter_batch", "use_local_argmax_reduction", "enable_adaptive_verification",
         "enforce_eager", "disable_logprobs"), ((False,), "no supported method has it")),
    **dict.fromkeys(
        ("quantization", "moe_backend", "attention_backend", "kv_cache_dtype", "max_model_len", "code_revision",
         "draft_load_config", "dspark_draft_topk"), ((), "a draft model is loaded like the model")),
}  # fmt: skip
_BELONGS = {"prompt_lookup_": NGRAM, "suffix_decoding_": SUFFIX, "synthetic_": SYNTHETIC}


def read_speculative(
    given: Mapping[str, Any] | None, method: str | None = None, model: str | None = None, tokens: int | None = None
) -> SpeculativeConfig | None:
    """Return the checked configuration; None: no speculation. `method`, `model` and `tokens` are separate flags."""
    values = {name: value for name, value in (given or {}).items() if value is not None}
    flags = (
        ("spec_method", "method", method),
        ("spec_model", "model", model),
        ("spec_tokens", "num_speculative_tokens", tokens),
    )
    for flag, name, value in flags:
        if value is None or (flag == "spec_tokens" and value == 0):
            continue
        if values.get(name, value) != value:
            raise ConfigError(f"{flag} is {value!r}, but {NAME}.{name} is {values[name]!r}; give one of them")
        values[name] = value
    if not values and given is None:
        return None
    for name, value in values.items():
        _check(name, value)
    values = {name: value for name, value in values.items() if name not in _UNSUPPORTED}
    explicit = frozenset(values)
    chosen = values["method"] = _method(values)
    values["explicit"] = explicit
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
    deepest = min(values.get("suffix_decoding_max_tree_depth", SpeculativeConfig.suffix_decoding_max_tree_depth), MAX_DRAFTS)
    values.setdefault("num_speculative_tokens", {NGRAM: 5, SUFFIX: deepest}.get(chosen, 4))
    return _complete(values)


def _check(name: str, value: Any) -> None:
    if name in _UNSUPPORTED:
        harmless, reason = _UNSUPPORTED[name]
        if value not in harmless:
            raise ConfigError(f"{NAME}.{name}={value!r} is not supported: {reason}; leave it out")
    elif name not in _CHECKS:
        known = [*_CHECKS, *_UNSUPPORTED]
        near = difflib.get_close_matches(name, known, n=1)
        raise ConfigError(
            f"{NAME} has no {name!r}; " + (f"did you mean {near[0]}?" if near else f"it has {', '.join(_CHECKS)}")
        )
    elif (right := _CHECKS[name](value)) is not None:
        raise ConfigError(f"{NAME}.{name} must be {right}, got {value!r}")


def _method(values: dict[str, Any]) -> str:
    model = values.get("model")
    if model in (NGRAM, f"[{NGRAM}]") and values.get("method", NGRAM) == NGRAM:  # vLLM's old spelling
        del values["model"]
        return NGRAM
    method = values.get("method", DRAFT_MODEL if model is not None else None)
    if method is None:
        raise ConfigError(
            f"{NAME} needs a method ({NAME}.method, or --spec-method): {', '.join((*METHODS, *plugin_drafters()))}"
        )
    if method.endswith("_mtp"):  # vLLM's old spelling
        method = MTP
    if method in NOT_BUILT:
        raise ConfigError(f"{NAME}.method {method!r} is not built; built are {', '.join(METHODS)}")
    if method not in METHODS and method not in (plugins := plugin_drafters()):
        known, hint = ", ".join((*METHODS, *plugins)), why_missing(DRAFTERS, str(method))
        raise ConfigError(f"{NAME}.method must be one of {known}; got {method!r}{hint}")
    if method in ON_DEVICE and method != MTP and model is None:
        raise ConfigError(f"method {method!r} requires a draft model or head: {NAME}.model, or --spec-model")
    if method == CUSTOM and model is None:
        raise ConfigError(f"{NAME}.model must be 'package.module:Class' for method {CUSTOM!r}")
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
        raise ConfigError(
            f"{NAME}.synthetic_acceptance_length {length:g} is more than the {1 + tokens} tokens of {tokens} accepted drafts"
        )
    low, high = 0.0, 1.0
    for _ in range(60):  # the rate whose powers add up to that
        rate = (low + high) / 2
        low, high = (rate, high) if sum(rate**i for i in range(tokens + 1)) < length else (low, rate)
    return (high,) * tokens


def plugin_drafters() -> dict[str, PlugIn]:
    """Return the drafters of other packages by name; names of Quire's own methods are ignored. Nothing is imported."""
    return find_plugins(DRAFTERS, (*METHODS, *NOT_BUILT))
