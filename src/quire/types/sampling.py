"""How to turn logits into tokens: the parameters a user sets, checked when they are made.

Checks that need the model (vocabulary, context length) are in `text/inputs.py` and `text/prompts.py`; here is all that can be
known without it.
"""

import copy
import difflib
import enum
import math
import warnings
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from quire.types.errors import InvalidParameter, NotSupported, UnknownParameter
from quire.types.structured import StructuredOutputsParams, as_structured_outputs

GREEDY_BELOW = 1e-5
LOWEST_TEMPERATURE = 1e-2
MOST_SEQUENCES = 16384
MOST_STOP_STRINGS = 4
MOST_LOGPROB_TOKEN_IDS = 128
MOST_BAD_WORDS = 128
SEED_BITS = 64
LARGEST_INT = 2**63 - 1

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
            _check_int("repetition_detection", getattr(self, name), low=0)
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
    "best_of": "all n choices are told",
    "logits_processors": "custom logits processors are not available yet",
    "truncate_prompt_tokens": 'it is in tokenization_kwargs={"truncate_prompt_tokens": ...} of generate() and chat()',
}  # fmt: skip


class _Named(msgspec.StructMeta):
    """Its classes say which argument they do not have, and which they have instead."""

    def __call__(cls, *args: Any, **values: Any) -> Any:  # noqa: N805
        unknown = [name for name in values if name not in cls.__struct_fields__]
        if not unknown:
            return super().__call__(*args, **values)
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

    def __post_init__(self) -> None:
        self._normalize()
        self._check_ranges()
        self._check_lists()
        self._refuse_what_is_not_built()
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
        """What may be drawn is decided anew for every token."""
        return self.structured_outputs is not None or self.thinking_token_budget is not None

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs is not None or self.logprob_token_ids is not None

    @property
    def reads_prefix_cache(self) -> bool:
        """Prompt logprobs need every prompt position to be run, so they skip the cache."""
        return self.prompt_logprobs is None and not self.skip_reading_prefix_cache

    def clone(self) -> "SamplingParams":
        """A private copy, so that a caller may go on changing theirs. What was changed since the check is checked."""
        if self.skip_clone:
            return self
        twin = copy.copy(self)
        for name in self.__struct_fields__:
            value = getattr(twin, name)
            if type(value) not in _IMMUTABLE:
                setattr(twin, name, value.copy() if type(value) is list else copy.deepcopy(value))
        twin.__post_init__()
        return twin

    def _normalize(self) -> None:
        if self.stop is None:
            self.stop = []
        elif isinstance(self.stop, str):
            self.stop = [self.stop]
        elif isinstance(self.stop, Sequence):
            self.stop = list(self.stop)
        self.stop_token_ids = [] if self.stop_token_ids is None else list(self.stop_token_ids)
        self.bad_words = [] if self.bad_words is None else list(self.bad_words)
        if self.seed == -1:
            self.seed = None
        if self.logprobs is True:
            self.logprobs = 1
        if self.prompt_logprobs is True:
            self.prompt_logprobs = 1
        if isinstance(self.repetition_detection, dict):
            self.repetition_detection = _as_repetition_detection(self.repetition_detection)  # type: ignore[unreachable]
        if self.structured_outputs is not None:
            self.structured_outputs = as_structured_outputs(self.structured_outputs)

    def _check_ranges(self) -> None:
        _check_int("n", self.n, low=1, high=MOST_SEQUENCES)
        _check_real("presence_penalty", self.presence_penalty, low=-2.0, high=2.0)
        _check_real("frequency_penalty", self.frequency_penalty, low=-2.0, high=2.0)
        _check_real("repetition_penalty", self.repetition_penalty, above=0.0)
        _check_real("temperature", self.temperature, low=0.0, high=2.0)
        _check_real("top_p", self.top_p, above=0.0, high=1.0)
        _check_int("top_k", self.top_k, low=-1)
        _check_real("min_p", self.min_p, low=0.0, high=1.0)
        if self.seed is not None:
            _check_int("seed", self.seed, low=-(2 ** (SEED_BITS - 1)), high=2**SEED_BITS - 1)
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, low=1)
        _check_int("min_tokens", self.min_tokens, low=0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidParameter(
                f"min_tokens ({self.min_tokens}) must not be larger than max_tokens ({self.max_tokens})", "min_tokens"
            )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                _check_int(name, value, low=-1)
        if self.prompt_logprobs is not None and self.skip_reading_prefix_cache is False:
            raise InvalidParameter(
                "prompt_logprobs need every prompt position to be run: leave skip_reading_prefix_cache out or set it to true",
                "skip_reading_prefix_cache",
            )
        if self.thinking_token_budget is not None:
            _check_int("thinking_token_budget", self.thinking_token_budget, low=0)
        if self.stream_interval is not None:
            _check_int("stream_interval", self.stream_interval, low=1)
        for name in (
            "ignore_eos", "flat_logprobs", "detokenize", "skip_special_tokens", "spaces_between_special_tokens",
            "include_stop_str_in_output", "skip_clone",
        ):  # fmt: skip
            if not isinstance(getattr(self, name), bool):
                raise InvalidParameter(f"{name} must be true or false, got {getattr(self, name)!r}", name)
        if not isinstance(self.output_kind, RequestOutputKind):
            raise InvalidParameter(f"output_kind must be a RequestOutputKind, got {self.output_kind!r}", "output_kind")
        if GREEDY_BELOW <= self.temperature < LOWEST_TEMPERATURE:
            warnings.warn(f"temperature {self.temperature} is too small to be exact; using {LOWEST_TEMPERATURE}", stacklevel=3)
            self.temperature = LOWEST_TEMPERATURE
        if self.greedy and self.n > 1:
            raise InvalidParameter(f"n must be 1 when temperature is 0 (greedy), got {self.n}", "n")

    def _check_lists(self) -> None:
        if not isinstance(self.stop, list) or not all(isinstance(s, str) for s in self.stop):
            raise InvalidParameter(f"stop must be a string or a list of strings, got {self.stop!r}", "stop")
        if any(not s for s in self.stop):
            raise InvalidParameter("stop must not contain an empty string", "stop")
        if len(self.stop) > MOST_STOP_STRINGS:
            raise InvalidParameter(f"stop may hold at most {MOST_STOP_STRINGS} strings, got {len(self.stop)}", "stop")
        if self.stop and not self.detokenize:
            raise InvalidParameter("stop strings need detokenize=True; use stop_token_ids instead", "stop")
        _check_ids("stop_token_ids", self.stop_token_ids)
        _check_ids("allowed_token_ids", self.allowed_token_ids)
        _check_ids("logprob_token_ids", self.logprob_token_ids)
        _check_ids("thinking_end_ids", self.thinking_end_ids)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidParameter("allowed_token_ids must not be empty; leave it out to allow all", "allowed_token_ids")
        if self.logprob_token_ids is not None and len(self.logprob_token_ids) > MOST_LOGPROB_TOKEN_IDS:
            raise InvalidParameter(
                f"logprob_token_ids may hold at most {MOST_LOGPROB_TOKEN_IDS} ids, got {len(self.logprob_token_ids)}",
                "logprob_token_ids",
            )
        words = self.bad_words or []
        if any(not isinstance(word, str) or not word for word in words):
            raise InvalidParameter(f"bad_words must be non-empty strings, got {words!r}", "bad_words")
        if len(words) > MOST_BAD_WORDS:
            raise InvalidParameter(f"bad_words may hold at most {MOST_BAD_WORDS} words, got {len(words)}", "bad_words")
        if self.logit_bias is not None:
            self.logit_bias = _checked_bias(self.logit_bias)

    def _refuse_what_is_not_built(self) -> None:
        not_built = {
            "extra_args": (bool(self.extra_args), "no installed plugin reads extra_args"),
            "thinking_token_budget": (
                self.thinking_token_budget is not None and not self.thinking_end_ids,
                "no reasoning parser is configured",
            ),
            "routed_experts_prompt_start": (self.routed_experts_prompt_start != 0, "routed experts are not returned"),
            "trace_decode_token_ids": (self.trace_decode_token_ids is not None, "decode traces are not available"),
        }
        for name, (asked, reason) in not_built.items():
            if asked:
                raise NotSupported(f"{name} cannot be used: {reason}", name)


MOST_LENGTH_PENALTY = 32.0  # no length to this power is more than a float can hold


class BeamSearchParams(msgspec.Struct):
    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    structured_outputs: Any = None

    def __post_init__(self) -> None:
        _check_int("beam_width", self.beam_width, low=1, high=MOST_SEQUENCES)
        _check_int("max_tokens", self.max_tokens, low=1)
        _check_real("temperature", self.temperature, low=0.0, high=2.0)
        _check_real("length_penalty", self.length_penalty, low=-MOST_LENGTH_PENALTY, high=MOST_LENGTH_PENALTY)
        if self.structured_outputs is not None:
            raise NotSupported("structured_outputs cannot be used: a beam search is not constrained", "structured_outputs")


def _check_int(name: str, value: Any, low: int, high: int = LARGEST_INT) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidParameter(f"{name} must be an integer, got {value!r}", name)
    if value < low or value > high:
        bounds = f"at least {low}" if value < low and high == LARGEST_INT else f"between {low} and {high}"
        raise InvalidParameter(f"{name} must be {bounds}, got {shown(value)}", name)


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer that no float can hold
        return False


def shown(number: float) -> str:
    """A number in an error's words; an integer of thousands of digits, which Python will not print, by its size."""
    if isinstance(number, int) and number.bit_length() > 128:
        return f"an integer of {number.bit_length()} bits"
    return f"{number}"


def _check_real(name: str, value: Any, low: float | None = None, high: float | None = None, above: float | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidParameter(f"{name} must be a number, got {value!r}", name)
    bad = not _is_finite(value)
    bad |= low is not None and value < low
    bad |= above is not None and value <= above
    bad |= high is not None and value > high
    if bad:
        parts = ["finite"]
        if low is not None:
            parts.append(f"at least {low:g}")
        if above is not None:
            parts.append(f"above {above:g}")
        if high is not None:
            parts.append(f"at most {high:g}")
        raise InvalidParameter(f"{name} must be {', '.join(parts)}, got {shown(value)}", name)


def _check_ids(name: str, ids: Any) -> None:
    if ids is None:
        return
    if not isinstance(ids, list):
        raise InvalidParameter(f"{name} must be a list of token ids (integers from 0), got {type(ids).__name__}", name)
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            what = shown(token) if isinstance(token, int) else f"{token!r:.80}"
            raise InvalidParameter(f"{name} must be a list of token ids (integers from 0), got {what} in it", name)


def _as_repetition_detection(value: dict[str, Any]) -> RepetitionDetectionParams:
    try:
        return RepetitionDetectionParams(**value)
    except TypeError as error:
        raise InvalidParameter(f"repetition_detection: {error}", "repetition_detection") from None


def _checked_bias(bias: Any) -> dict[int, float]:
    """OpenAI clients send the ids as strings; values are clamped to ±100 as OpenAI and vLLM do."""
    if not isinstance(bias, dict):
        raise InvalidParameter(f"logit_bias must map token ids to numbers, got {bias!r}", "logit_bias")
    out = {}
    for key, value in bias.items():
        try:
            token = int(key)
        except (TypeError, ValueError):
            raise InvalidParameter(f"logit_bias keys must be token ids, got {key!r}", "logit_bias") from None
        _check_real("logit_bias", value)
        out[token] = min(100.0, max(-100.0, float(value)))
    return out
