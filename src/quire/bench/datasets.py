"""The data sets of texts: options, and for each a coroutine that returns its samples. `sources.py` has all by name."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from quire.bench.metrics import MAX_REQUESTS, MAX_SECONDS, MAX_TOKENS, check_count, read_tokens
from quire.bench.samples import Ids, RandomPrompts, Sample
from quire.types.errors import ConfigError
from quire.types.json_text import read_json, read_json_lines

SYNTHETIC = ("random", "random-mm", "prefix_repetition", "timed_trace")  # of random tokens or words


class TokenCounter(Protocol):
    async def count(self, text: str) -> int: ...


@dataclass(frozen=True)
class DatasetOptions:
    name: str = "random"
    path: str | None = None
    count: int = 1000
    seed: int = 0
    shuffle: bool = True
    oversample: bool = True
    random_input_len: int = 1024
    random_output_len: int = 128
    random_range_ratio: float = 0.0
    random_prefix_len: int = 0
    random_mm_base_items_per_request: int = 1
    random_mm_num_mm_items_range_ratio: float = 0.0
    random_mm_limit_mm_per_prompt: str | None = None
    random_mm_bucket_config: str | None = None
    prefix_repetition_prefix_len: int = 256
    prefix_repetition_suffix_len: int = 256
    prefix_repetition_num_prefixes: int = 10
    prefix_repetition_output_len: int = 128
    sharegpt_output_len: int | None = None
    custom_output_len: int = 256
    timed_trace_chunk_hash_size: int = 512
    timed_trace_sec_multiplier: float = 0.001

    def __post_init__(self) -> None:
        check_count("num-prompts", self.count, 1, MAX_REQUESTS)
        if self.seed < 0:
            raise ConfigError(f"--seed must be at least 0, got {self.seed}")
        if not 0 <= self.random_range_ratio < 1:
            raise ConfigError(f"--random-range-ratio must be from 0 to below 1, got {self.random_range_ratio}")
        if not 0 <= self.random_mm_num_mm_items_range_ratio <= 1:
            ratio = self.random_mm_num_mm_items_range_ratio
            raise ConfigError(f"--random-mm-num-mm-items-range-ratio must be from 0 to 1, got {ratio}")
        for name, minimum in (
            ("random_mm_base_items_per_request", 0),
            ("random_input_len", 0 if self.random_prefix_len > 0 else 1),
            ("random_output_len", 1),
            ("random_prefix_len", 0),
            ("prefix_repetition_prefix_len", 1),
            ("prefix_repetition_suffix_len", 0),
            ("prefix_repetition_num_prefixes", 1),
            ("prefix_repetition_output_len", 1),
            ("custom_output_len", 1),
            ("timed_trace_chunk_hash_size", 1),
        ):
            check_count(name.replace("_", "-"), getattr(self, name), minimum, MAX_TOKENS)
        if self.sharegpt_output_len is not None:
            check_count("sharegpt-output-len", self.sharegpt_output_len, 1, MAX_TOKENS)
        if not 1e-12 <= self.timed_trace_sec_multiplier <= 1e12:
            raise ConfigError(
                f"--timed-trace-sec-multiplier must be from 1e-12 to 1e+12, got {self.timed_trace_sec_multiplier}"
            )
        from_file = self.name in ("sharegpt", "custom", "timed_trace")
        if from_file and self.path is None:
            raise ConfigError(f"--dataset-name {self.name} needs --dataset-path")
        if not from_file and self.path is not None:
            raise ConfigError(f"--dataset-name {self.name} reads no file; drop --dataset-path or name its data set")

    @property
    def rng(self) -> np.random.Generator:
        return np.random.default_rng(self.seed)


def _read_text(options: DatasetOptions) -> str:
    assert options.path is not None
    try:
        return Path(options.path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read --dataset-path {options.path}: {error}") from None


async def random_samples(options: DatasetOptions, alphabet: RandomPrompts, _: TokenCounter) -> list[Sample]:
    """Return prompts of random tokens, of one length or spread evenly around it, after a prefix that all share."""
    rng = options.rng
    prefix = alphabet.draw(rng, options.random_prefix_len)
    made = []
    for _index in range(options.count):
        length = around(rng, options.random_input_len, options.random_range_ratio, 0 if prefix.size else 1)
        output = around(rng, options.random_output_len, options.random_range_ratio, 1)
        prompt = np.concatenate([prefix, alphabet.draw(rng, length)])
        made.append(Sample(alphabet.write(prompt), output, len(prompt)))
    return made


def around(rng: np.random.Generator, length: int, ratio: float, minimum: int) -> int:
    """Return an integer from length * (1 - ratio) to length * (1 + ratio), all equally likely."""
    low, high = math.floor(length * (1 - ratio)), math.ceil(length * (1 + ratio))
    return max(minimum, int(rng.integers(low, high, endpoint=True)))


async def prefix_repetition_samples(options: DatasetOptions, alphabet: RandomPrompts, _: TokenCounter) -> list[Sample]:
    """Return a few prefixes, each shared by many prompts with different ends, which shows what a prefix cache saves."""
    rng = options.rng
    prefixes = [
        alphabet.draw(rng, options.prefix_repetition_prefix_len) for _index in range(options.prefix_repetition_num_prefixes)
    ]
    made = []
    for index in range(options.count):
        prompt = np.concatenate([prefixes[index % len(prefixes)], alphabet.draw(rng, options.prefix_repetition_suffix_len)])
        made.append(Sample(alphabet.write(prompt), options.prefix_repetition_output_len, len(prompt)))
    return [made[index] for index in rng.permutation(len(made))] if options.shuffle else made


MAX_TOKEN_ID = 2**31 - 1


async def custom_samples(options: DatasetOptions, _: RandomPrompts, __: TokenCounter) -> list[Sample]:
    """Return samples of JSON lines with `prompt` (text or token ids) or `messages`, and optionally `output_tokens`."""
    made = [_custom_sample(where, line, options.custom_output_len) for where, line in _json_lines(options)]
    if options.shuffle:
        made = [made[index] for index in options.rng.permutation(len(made))]
    return _enough(made, options)


def _custom_sample(where: str, line: dict[str, Any], output_tokens: int) -> Sample:
    prompt, messages = line.get("prompt"), line.get("messages")
    asked = read_tokens(where, "output_tokens", line.get("output_tokens", output_tokens), 1)
    if isinstance(messages, list) and messages and prompt is None:
        return Sample(None, asked, messages=messages)
    if messages is None and isinstance(prompt, str) and prompt:
        return Sample(prompt, asked)
    if messages is None and isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        if not all(0 <= token <= MAX_TOKEN_ID for token in prompt):
            raise ConfigError(f"{where}: prompt must have token ids from 0 to {MAX_TOKEN_ID}")
        return Sample(np.asarray(prompt, dtype=np.int32), asked, len(prompt))
    raise ConfigError(f'{where}: needs either "prompt" (text or a list of token ids) or "messages" (a list)')


def _json_lines(options: DatasetOptions) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each line's place in the file, for errors, and its object."""
    empty = True
    for each in read_json_lines(str(options.path), _read_text(options).splitlines()):
        empty = False
        yield each
    if empty:
        raise ConfigError(f"{options.path} holds no lines")


def _enough(made: list[Sample], options: DatasetOptions) -> list[Sample]:
    """Return `options.count` samples; if there are fewer, they are repeated where `oversample` allows it."""
    if len(made) >= options.count or not options.oversample:
        return made[: options.count]
    return [made[index % len(made)] for index in range(options.count)]


MIN_TEXT_TOKENS, MAX_PROMPT_TOKENS, MAX_TOTAL_TOKENS = 4, 1024, 2048


async def sharegpt_samples(options: DatasetOptions, _: RandomPrompts, counter: TokenCounter) -> list[Sample]:
    """Return the first question and answer of every conversation in a ShareGPT file, with the answer's length.

    Very short and very long conversations are left out, with the bounds of vLLM's benchmark, so that runs compare.
    """
    pairs = _exchanges(options)
    order = options.rng.permutation(len(pairs)) if options.shuffle else range(len(pairs))
    made: list[Sample] = []
    for index in order:
        if len(made) == options.count:
            break
        question, answer = pairs[index]
        length = await counter.count(question)
        output = options.sharegpt_output_len or await counter.count(answer)
        short = length < MIN_TEXT_TOKENS or (options.sharegpt_output_len is None and output < MIN_TEXT_TOKENS)
        if not (short or length > MAX_PROMPT_TOKENS or length + output > MAX_TOTAL_TOKENS):
            made.append(Sample(question, output, length))
    if not made:
        raise ConfigError(f"{options.path} holds no conversation of {MIN_TEXT_TOKENS} to {MAX_TOTAL_TOKENS} tokens")
    return _enough(made, options)


def _exchanges(options: DatasetOptions) -> list[tuple[str, str]]:
    try:
        conversations = read_json(_read_text(options))
    except ValueError as error:
        raise ConfigError(f"{options.path} is not JSON: {error}") from None
    if not isinstance(conversations, list):
        raise ConfigError(f"{options.path} is not a list of conversations")
    return [(_text_of(turns[0]), _text_of(turns[1])) for turns in map(_turns, conversations) if len(turns) >= 2]


def _turns(conversation: Any) -> list[Any]:
    turns = conversation.get("conversations", conversation.get("conversation")) if isinstance(conversation, dict) else None
    return turns if isinstance(turns, list) else []


def _text_of(turn: Any) -> str:
    return str(turn.get("value", "")) if isinstance(turn, dict) else ""


async def timed_trace_samples(options: DatasetOptions, alphabet: RandomPrompts, _: TokenCounter) -> list[Sample]:
    """Return recorded traffic: JSON lines in the order of their timestamps.

    `timestamp` is in units of `--timed-trace-sec-multiplier` seconds (default: milliseconds); `output_length` is the number of
    tokens to generate. The prompt is `prompt`, `messages`, or `input_length` random tokens. Each of its `hash_ids` stands for
    the same block of tokens wherever it appears, so that requests share the prefixes that they shared in the recording.
    """
    made: list[Sample] = []
    begin: float | None = None
    for where, line in _json_lines(options):
        if len(made) == options.count:
            break
        stamp = _seconds(where, line.get("timestamp"), options.timed_trace_sec_multiplier)
        begin = stamp if begin is None else begin
        if stamp - begin < (made[-1].at or 0.0 if made else 0.0):
            raise ConfigError(f"{where}: its timestamp is before that of the line above it")
        made.append(_timed_sample(where, line, len(made), stamp - begin, options, alphabet))
    return made


def _timed_sample(
    where: str, line: dict[str, Any], index: int, at: float, options: DatasetOptions, alphabet: RandomPrompts
) -> Sample:
    output = max(1, read_tokens(where, "output_length", line.get("output_length"), 0))
    if "input_length" not in line:
        given = _custom_sample(where, {**line, "output_tokens": output}, output)
        return Sample(given.prompt, output, given.prompt_tokens, given.messages, at)
    length = read_tokens(where, "input_length", line["input_length"], 1)
    hashes = line.get("hash_ids") or []
    if not isinstance(hashes, list) or not all(type(item) is int and item >= 0 for item in hashes):
        raise ConfigError(f"{where}: hash_ids must be a list of integers of at least 0")
    blocks = [_block(options, alphabet, item) for item in hashes[: -(-length // options.timed_trace_chunk_hash_size)]]
    known = np.concatenate(blocks)[:length] if blocks else np.zeros(0, dtype=np.int32)
    rest = alphabet.draw(np.random.default_rng((options.seed, 1, index)), length - len(known))
    prompt = np.concatenate([known, rest])
    return Sample(alphabet.write(prompt), output, length, at=at)


def _block(options: DatasetOptions, alphabet: RandomPrompts, item: int) -> Ids:
    return alphabet.draw(np.random.default_rng((options.seed, 0, item)), options.timed_trace_chunk_hash_size)


def _seconds(where: str, value: Any, unit: float) -> float:
    """Return a timestamp in seconds; `unit`: seconds of one unit of it."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_SECONDS / unit:
        most = f"{MAX_SECONDS / unit:g}, in units of {unit:g} seconds"
        raise ConfigError(f"{where}: timestamp must be a number from 0 to {most}; got {str(value)[:60]}")
    return value * unit
