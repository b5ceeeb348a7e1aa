"""How to turn logits into tokens: the parameters a user sets, checked when they are made.

Checks that need the model (vocabulary, context length) are in `text/inputs.py` and `text/prompts.py`; here is all that can be
known without it.
"""

import copy
import difflib
import enum
import warnings
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, Literal

import msgspec

from quire.types.checks import LARGEST_INT, check_flag, check_ids, check_int, check_real
from quire.types.errors import InvalidParameter, NotSupported, UnknownParameter
from quire.types.structured import StructuredOutputsParams, as_structured_outputs

GREEDY_BELOW = 1e-5
LOWEST_TEMPERATURE = 1e-2
MAX_SEQUENCES = 16384
MAX_LOGPROB_TOKEN_IDS = 128
MAX_BAD_WORDS = 128
SEED_BITS = 64

LogprobsMode = Literal["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"]


class RequestOutputKind(enum.Enum):
    CUMULATIVE = 0  # each output holds everything so far
    DELTA = 1  # each output holds only what is new
    FINAL_ONLY = 2  # one output, at the end


class RepetitionDetectionParams(msgspec.Struct, forbid_unknown_fields=True):
    """Stop when the last tokens are one pattern, `min_pattern_size`..`max_pattern_size` long, `min_count` times in a row."""

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0

    def __post_init__(self) -> None:
        for name in ("max_pattern_size", "min_pattern_size", "min_count"):
            check_int("repetition_detection", getattr(self, name), low=0)
        if self.max_pattern_size and self.min_count < 2:
            raise InvalidParameter(
                f"repetition_detection.min_count must be at least 2, got {self.min_count}", "repetition_detection"
            )
        if self.min_pattern_size > self.max_pattern_size:
            raise InvalidParameter(
                f"repetition_detection.min_pattern_size ({self.min_pattern_size}) must not be larger than "
                f"max_pattern_size ({self.max_pattern_size})",
                "repetition_detection",
            )


_IMMUTABLE = frozenset({int, float, bool, str, type(None), RequestOutputKind})


_NOW = "its name is now structured_outputs=StructuredOutputsParams"
# what vLLM's SamplingParams had or has, and where it went
_GONE = {
    **{f"guided_{kind}": f"{_NOW}({kind}=...)" for kind in (
        "json", "regex", "choice", "grammar", "json_object", "whitespace_pattern")},
    "guided_decoding": f"{_NOW}(...)",
    "best_of": "all n choices are returned",
    "logits_processors": "give classes to LLM(..., logits_processors=[...]), and what they need of a request in extra_args",
    "truncate_prompt_tokens": 'it is in tokenization_kwargs={"truncate_prompt_tokens": ...} of generate() and chat()',
}  # fmt: skip


@cache
def _field_names(kind: type[msgspec.Struct]) -> frozenset[str]:
    return frozenset(kind.__struct_fields__)


class _Named(msgspec.StructMeta):
    """A metaclass that reports unknown arguments, and the names that replace them."""

    def __call__(cls, *args: Any, **values: Any) -> Any:  # noqa: N805
        if values.keys() <= _field_names(cls):
            return super().__call__(*args, **values)
        unknown = [name for name in values if name not in cls.__struct_fields__]
        if (why := _GONE.get(unknown[0])) is not None and issubclass(cls, SamplingParams):
            raise UnknownParameter(f"SamplingParams has no argument {unknown[0]!r}: {why}", unknown[0])
        near = difflib.get_close_matches(unknown[0], cls.__struct_fields__, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else f"; it has {', '.join(cls.__struct_fields__)}"
        raise UnknownParameter(f"{cls.__name__} has no argument {unknown[0]!r}{hint}", unknown[0])


class SamplingParams(msgspec.Struct, omit_defaults=True, metaclass=_Named):
    """vLLM's fields, defaults and rules. A value out of range raises InvalidParameter (a ValueError) at once."""

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    flat_logprobs: bool = False
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    stream_interval: int | None = None
    structured_outputs: StructuredOutputsParams | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    extra_args: dict[str, Any] | None = None
    skip_clone: bool = False
    skip_reading_prefix_cache: bool | None = None
    thinking_token_budget: int | None = None  # of an answer that begins with reasoning
    thinking_end_ids: list[int] | None = None  # the tokens that end it
    repetition_detection: RepetitionDetectionParams | None = None
    routed_experts_prompt_start: int = 0
    trace_decode_token_ids: list[int] | None = None
    thinking_forced_ids: list[int] | None = None  # sampled when thinking_token_budget is spent; None = thinking_end_ids

    def __post_init__(self) -> None:
        """Check all fields that differ from their default."""
        for name, check, default in _CHECKED:
            value = getattr(self, name)
            if value is not default and (type(value) is not type(default) or value != default):
                setattr(self, name, check(name, value))
        for name in _LISTS:
            if getattr(self, name) is None:
                setattr(self, name, [])
        self._check_pairs()
        if self.greedy:
            self.temperature, self.top_p, self.top_k, self.min_p = 0.0, 1.0, 0, 0.0

    @classmethod
    def from_optional(cls, **values: Any) -> "SamplingParams":
        """From fields of which some may be None, which leaves them at their default."""
        return cls(**{name: value for name, value in values.items() if value is not None or name == "max_tokens"})

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def stops(self) -> list[str]:
        return self.stop if isinstance(self.stop, list) else []

    @property
    def needs_masks(self) -> bool:
        """Return whether every token needs a new mask."""
        return self.structured_outputs is not None or self.thinking_token_budget is not None

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs is not None or self.logprob_token_ids is not None

    @property
    def reads_prefix_cache(self) -> bool:
        """Return whether a prefix hit may be used. Prompt logprobs need every prompt position, so they skip the cache."""
        return self.prompt_logprobs is None and not self.skip_reading_prefix_cache

    def clone(self) -> "SamplingParams":
        """Return a private copy, since a caller may change the original later. Changed fields are checked again."""
        if self.skip_clone:
            return self
        twin = copy.copy(self)
        for name in self.__struct_fields__:
            value = getattr(twin, name)
            if type(value) not in _IMMUTABLE:
                setattr(twin, name, value.copy() if type(value) is list else copy.deepcopy(value))
        twin.__post_init__()
        return twin

    def _check_pairs(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidParameter(
                f"min_tokens ({self.min_tokens}) must not be larger than max_tokens ({self.max_tokens})", "min_tokens"
            )
        if self.prompt_logprobs is not None and self.skip_reading_prefix_cache is False:
            raise InvalidParameter(
                "prompt_logprobs need every prompt position to be run: leave skip_reading_prefix_cache out or set it to true",
                "skip_reading_prefix_cache",
            )
        if self.greedy and self.n > 1:
            raise InvalidParameter(f"n must be 1 when temperature is 0 (greedy), got {self.n}", "n")
        if self.stop and not self.detokenize:
            raise InvalidParameter("stop strings need detokenize=True; use stop_token_ids instead", "stop")
        if self.thinking_token_budget is not None and not self.thinking_end_ids:
            name = "thinking_token_budget"
            raise NotSupported(f"{name} cannot be used: no reasoning parser is configured", name)


MAX_LENGTH_PENALTY = 32.0  # any length to this power is a finite float


class BeamSearchParams(msgspec.Struct):
    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    structured_outputs: Any = None

    def __post_init__(self) -> None:
        check_int("beam_width", self.beam_width, low=1, high=MAX_SEQUENCES)
        check_int("max_tokens", self.max_tokens, low=1)
        check_real("temperature", self.temperature, low=0.0, high=2.0)
        check_real("length_penalty", self.length_penalty, low=-MAX_LENGTH_PENALTY, high=MAX_LENGTH_PENALTY)
        if self.structured_outputs is not None:
            raise NotSupported("structured_outputs cannot be used: a beam search is not constrained", "structured_outputs")


# ---- the table of checks: each takes a field's name and what was given, and returns what the field then has

Check = Callable[[str, Any], Any]


def _integer(low: int, high: int = LARGEST_INT) -> Check:
    return partial(check_int, low=low, high=high)


def _real(low: float | None = None, high: float | None = None, above: float | None = None) -> Check:
    return partial(check_real, low=low, high=high, above=above)


def _or_none(check: Check) -> Check:
    return lambda name, value: None if value is None else check(name, value)


def _not_built(why: str, empty: Any) -> Check:
    def check(name: str, value: Any) -> Any:
        if value != empty:
            raise NotSupported(f"{name} cannot be used: {why}", name)
        return value

    return check


def _temperature(name: str, value: Any) -> Any:
    check_real(name, value, low=0.0, high=2.0)
    if GREEDY_BELOW <= value < LOWEST_TEMPERATURE:
        warnings.warn(f"temperature {value} is too small to be exact; using {LOWEST_TEMPERATURE}", stacklevel=3)
        return LOWEST_TEMPERATURE
    return value


def _seed(name: str, value: Any) -> int | None:
    seed = check_int(name, value, low=-(2 ** (SEED_BITS - 1)), high=2**SEED_BITS - 1)
    return None if seed == -1 else seed


def _logprobs(name: str, value: Any) -> int:
    return check_int(name, 1 if value is True else value, low=-1)


def _output_kind(name: str, value: Any) -> RequestOutputKind:
    if not isinstance(value, RequestOutputKind):
        raise InvalidParameter(f"{name} must be a RequestOutputKind, got {value!r}", name)
    return value


def _stop(name: str, value: Any) -> list[str]:
    stop = [value] if isinstance(value, str) else value
    if not isinstance(stop, Sequence) or not all(isinstance(text, str) for text in stop):
        raise InvalidParameter(f"stop must be a string or a list of strings, got {value!r}", name)
    if any(not text for text in stop):
        raise InvalidParameter("stop must not contain an empty string", name)
    return list(stop)


def _bad_words(name: str, value: Any) -> list[str]:
    words = list(value)
    if any(not isinstance(word, str) or not word for word in words):
        raise InvalidParameter(f"bad_words must be non-empty strings, got {words!r}", name)
    if len(words) > MAX_BAD_WORDS:
        raise InvalidParameter(f"bad_words may hold at most {MAX_BAD_WORDS} words, got {len(words)}", name)
    return words


def _stop_ids(name: str, value: Any) -> list[int]:
    return check_ids(name, list(value))


def _allowed_ids(name: str, value: Any) -> list[int]:
    ids = check_ids(name, value)
    if not ids:
        raise InvalidParameter("allowed_token_ids must not be empty; leave it out to allow all", name)
    return ids


def _logprob_ids(name: str, value: Any) -> list[int]:
    ids = check_ids(name, value)
    if len(ids) > MAX_LOGPROB_TOKEN_IDS:
        raise InvalidParameter(f"logprob_token_ids may hold at most {MAX_LOGPROB_TOKEN_IDS} ids, got {len(ids)}", name)
    return ids


def _repetition_detection(name: str, value: Any) -> Any:
    try:
        return RepetitionDetectionParams(**value) if isinstance(value, dict) else value
    except TypeError as error:
        raise InvalidParameter(f"repetition_detection: {error}", name) from None


def _extra_args(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise InvalidParameter(f"{name} must be a dict with string keys; got {value!r:.200}", name)
    try:
        msgspec.msgpack.encode(value)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InvalidParameter(f"{name} must hold JSON values: {error}", name) from None
    return value


def _bias(name: str, value: Any) -> dict[int, float]:
    """OpenAI clients send the ids as strings; values are clamped to ±100 as OpenAI and vLLM do."""
    if not isinstance(value, dict):
        raise InvalidParameter(f"logit_bias must map token ids to numbers, got {value!r}", name)
    out = {}
    for key, number in value.items():
        try:
            token = int(key)
        except (TypeError, ValueError):
            raise InvalidParameter(f"logit_bias keys must be token ids, got {key!r}", name) from None
        check_real(name, number)
        out[token] = min(100.0, max(-100.0, float(number)))
    return out


_CHECKS: dict[str, Check] = {
    "n": _integer(1, MAX_SEQUENCES),
    "presence_penalty": _real(low=-2.0, high=2.0),
    "frequency_penalty": _real(low=-2.0, high=2.0),
    "repetition_penalty": _real(above=0.0),
    "temperature": _temperature,
    "top_p": _real(above=0.0, high=1.0),
    "top_k": _integer(-1),
    "min_p": _real(low=0.0, high=1.0),
    "seed": _seed,
    "max_tokens": _or_none(_integer(1)),
    "min_tokens": _integer(0),
    "logprobs": _logprobs,
    "prompt_logprobs": _logprobs,
    "thinking_token_budget": _integer(0),
    "stream_interval": _integer(1),
    "ignore_eos": check_flag,
    "flat_logprobs": check_flag,
    "detokenize": check_flag,
    "skip_special_tokens": check_flag,
    "spaces_between_special_tokens": check_flag,
    "include_stop_str_in_output": check_flag,
    "skip_clone": check_flag,
    "output_kind": _output_kind,
    "stop": _stop,
    "stop_token_ids": _stop_ids,
    "allowed_token_ids": _allowed_ids,
    "logprob_token_ids": _logprob_ids,
    "thinking_end_ids": check_ids,
    "thinking_forced_ids": check_ids,
    "bad_words": _bad_words,
    "logit_bias": _bias,
    "repetition_detection": _repetition_detection,
    "structured_outputs": lambda _, value: as_structured_outputs(value),
    "extra_args": _extra_args,
    "routed_experts_prompt_start": _not_built("routed experts are not returned", 0),
    "trace_decode_token_ids": _not_built("decode traces are not available", None),
}
_DEFAULTS = {field.name: field.default for field in msgspec.structs.fields(SamplingParams)}
_CHECKED = [(name, check, _DEFAULTS[name]) for name, check in _CHECKS.items()]
_LISTS = ("stop", "stop_token_ids", "bad_words")  # None stands for an empty list
