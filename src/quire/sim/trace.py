"""Recorded and generated traffic: arrival times, lengths, and shared prefixes.

The text of a prompt does not matter, only which prompts share a prefix. So a prompt is a tuple of blocks (content, tokens):
equal content means equal tokens, and unshared text has unique content. The tokens are made when the request arrives.
"""

import csv
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any

import numpy as np

from quire.bench.arrivals import LoadShape, arrival_times
from quire.bench.datasets import DatasetOptions, TokenCounter, around, sharegpt_samples
from quire.bench.metrics import MAX_REQUESTS, MAX_SECONDS, MAX_TOKENS, check_count, read_tokens
from quire.bench.samples import RandomPrompts, workload
from quire.types.errors import ConfigError
from quire.types.json_text import read_json_lines

FORMATS = ("azure", "mooncake", "sharegpt")
SUFFIXES = {".csv": "azure", ".jsonl": "mooncake", ".json": "sharegpt"}
AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
MOONCAKE_BLOCK = 512  # tokens that a hash stands for
Blocks = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Arrival:
    at: float  # seconds after the first
    blocks: Blocks  # content, tokens
    output: int  # tokens
    echo: int = 0  # the content of its answer

    @property
    def length(self) -> int:
        return sum(tokens for _, tokens in self.blocks)

    def prompt(self) -> tuple[int, ...]:
        """Return the token ids: the content of a block is its token id."""
        return tuple(chain.from_iterable(repeat(content, tokens) for content, tokens in self.blocks))


@dataclass(frozen=True)
class Trace:
    name: str
    arrivals: list[Arrival]  # in the order of time

    def __post_init__(self) -> None:
        if not self.arrivals:
            raise ConfigError(f"{self.name} has no requests")

    def faster(self, factor: float) -> "Trace":
        """Return the same requests, arriving faster by this factor."""
        if not 0 < factor < float("inf"):
            raise ConfigError(f"--speedup must be above 0, got {factor:g}")
        if factor == 1:
            return self
        if self.arrivals[-1].at > factor * MAX_SECONDS:
            raise ConfigError(f"--speedup {factor:g} stretches the trace beyond {MAX_SECONDS:g} seconds; raise it")
        sooner = [Arrival(arrival.at / factor, arrival.blocks, arrival.output, arrival.echo) for arrival in self.arrivals]
        return Trace(f"{self.name}, {factor:g} times as fast", sooner)


class Contents:
    """Ids of contents: those of a trace's own ids, and new ones for unshared contents."""

    def __init__(self) -> None:
        self._known: dict[int, int] = {}
        self._next = 1  # 0 is content that no other request has

    def new(self) -> int:
        self._next += 1
        return self._next - 1

    def of(self, name: int) -> int:
        found = self._known.get(name)
        if found is None:
            found = self._known[name] = self.new()
        return found


def format_of(path: Path, trace_format: str) -> str:
    if trace_format != "auto":
        return trace_format
    if path.suffix.lower() not in SUFFIXES:
        names = ", ".join(f"{suffix} is {name}" for suffix, name in SUFFIXES.items())
        raise ConfigError(f"--trace {path}: its format is unknown ({names}); add --trace-format {'|'.join(FORMATS)}")
    return SUFFIXES[path.suffix.lower()]


def read_trace(path: Path, kind: str, limit: int | None) -> Trace:
    """Read a trace of Azure or Mooncake: all requests, or the first `limit`."""
    read = {"azure": _azure, "mooncake": _mooncake}[kind]
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return Trace(path.name, list(_from_zero(islice(read(str(path), file), limit))))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read --trace {path}: {error}") from None


def _from_zero(arrivals: Iterable[tuple[str, Arrival]]) -> Iterator[Arrival]:
    begin, last = 0.0, None
    for where, arrival in arrivals:
        if last is None:
            begin = last = arrival.at
        if arrival.at < last:
            raise ConfigError(f"{where}: its timestamp is before that of the request above it; sort the file by time")
        last = arrival.at
        yield Arrival(arrival.at - begin, arrival.blocks, arrival.output, arrival.echo)


def _azure(name: str, lines: Iterable[str]) -> Iterator[tuple[str, Arrival]]:
    """Yield requests of lines TIMESTAMP,ContextTokens,GeneratedTokens. TIMESTAMP is a date with time, or seconds."""
    rows, contents = csv.reader(lines), Contents()
    try:
        head = [cell.strip().lstrip("\ufeff") for cell in next(rows, [])]
        missing = [column for column in AZURE_COLUMNS if column not in head]
        if missing:
            raise ConfigError(f"{name} line 1: the column {missing[0]} is missing; Azure has {','.join(AZURE_COLUMNS)}")
        stamp, context, generated = (head.index(column) for column in AZURE_COLUMNS)
        zoned: bool | None = None
        for cells in rows:
            if not any(cell.strip() for cell in cells):
                continue
            where = f"{name} line {rows.line_num}"
            if len(cells) <= max(stamp, context, generated):
                raise ConfigError(f"{where} has {len(cells)} columns instead of {len(head)}")
            at, aware = _moment(where, cells[stamp])
            if zoned is not None and aware != zoned:
                raise ConfigError(f"{where}: TIMESTAMP {cells[stamp].strip()!r} has another format than those above it")
            zoned = aware
            length = read_tokens(where, "ContextTokens", _integer(cells[context]), 1)
            output = read_tokens(where, "GeneratedTokens", _integer(cells[generated]), 0)
            yield where, Arrival(at, ((contents.new(), length),), max(1, output))
    except csv.Error as error:
        raise ConfigError(f"{name} line {rows.line_num} is not CSV: {error}") from None


def _moment(where: str, text: str) -> tuple[float, bool]:
    """Return seconds, and whether the time zone is known."""
    text = text.strip()
    try:
        seconds = float(text)
    except ValueError:
        try:
            moment = datetime.fromisoformat(text)
        except ValueError:
            raise ConfigError(f"{where}: TIMESTAMP {text!r} is neither a date with time nor a number of seconds") from None
        if moment.tzinfo is not None:
            return moment.timestamp(), True
        return (moment - datetime(1970, 1, 1)).total_seconds(), False
    if not 0 <= seconds < MAX_SECONDS:
        raise ConfigError(f"{where}: TIMESTAMP must be seconds from 0 to {MAX_SECONDS:g}, got {text}")
    return seconds, False


def _mooncake(name: str, lines: Iterable[str]) -> Iterator[tuple[str, Arrival]]:
    """Yield requests of JSON lines: timestamp (ms), input_length, output_length, hash_ids (each 512 tokens of the prompt)."""
    contents = Contents()
    for where, line in read_json_lines(name, lines):
        stamp = line.get("timestamp")
        if isinstance(stamp, bool) or not isinstance(stamp, int | float) or not 0 <= stamp < 1000 * MAX_SECONDS:
            raise ConfigError(f"{where}: timestamp must be milliseconds of at least 0, got {stamp!r}")
        length = read_tokens(where, "input_length", line.get("input_length"), 1)
        output = read_tokens(where, "output_length", line.get("output_length"), 0)
        hashes = line.get("hash_ids", [])
        if not isinstance(hashes, list) or not all(type(item) is int for item in hashes):
            raise ConfigError(f"{where}: hash_ids must be a list of integers, got {str(hashes)[:60]}")
        blocks, left = [], length
        for item in hashes:
            count = min(MOONCAKE_BLOCK, left)
            if not count:
                raise ConfigError(
                    f"{where}: hash_ids has {len(hashes)} blocks of {MOONCAKE_BLOCK} tokens, too many for input_length {length}"
                )
            blocks.append((contents.of(item), count))
            left -= count
        if left:
            blocks.append((contents.new(), left))
        yield where, Arrival(stamp / 1000, tuple(blocks), max(1, output))


def mooncake_arrivals(name: str, lines: Iterable[str]) -> list[Arrival]:
    """Return the requests of lines of Mooncake's format."""
    return list(_from_zero(_mooncake(name, lines)))


def _integer(text: str) -> Any:
    try:
        return int(text)
    except ValueError:
        return text.strip()


@dataclass(frozen=True)
class Generated:
    """Generated traffic. Lengths are spread evenly within ±range_ratio; a prompt begins with one of `num_prefixes` prefixes.

    A conversation has `turns`: each prompt is the conversation up to then and `input_len` new tokens, and arrives
    `think_time` seconds after the previous one.
    """

    requests: int = 1000
    input_len: int = 1024
    output_len: int = 128
    range_ratio: float = 0.0
    prefix_len: int = 0
    num_prefixes: int = 1
    turns: int = 1
    think_time: float = 10.0
    seed: int = 0

    def __post_init__(self) -> None:
        for flag, value, least, most in (
            ("num-prompts", self.requests, 1, MAX_REQUESTS),
            ("input-len", self.input_len, 0 if self.prefix_len > 0 else 1, MAX_TOKENS),
            ("output-len", self.output_len, 1, MAX_TOKENS),
            ("prefix-len", self.prefix_len, 0, MAX_TOKENS),
            ("num-prefixes", self.num_prefixes, 1, MAX_TOKENS),
            ("turns", self.turns, 1, MAX_REQUESTS),
        ):
            check_count(flag, value, least, most)
        if not 0 <= self.range_ratio < 1:
            raise ConfigError(f"--range-ratio must be from 0 to below 1, got {self.range_ratio}")
        if not self.think_time >= 0:
            raise ConfigError(f"--think-time must be 0 or more seconds, got {self.think_time}")
        if self.think_time * self.turns > MAX_SECONDS:
            raise ConfigError(f"--think-time {self.think_time:g} is more than {MAX_SECONDS:g} seconds for all turns; lower it")

    def trace(self, load: LoadShape) -> Trace:
        """Return the requests; conversations begin at the arrival times of the load."""
        rng, contents = np.random.default_rng(self.seed), Contents()
        beginnings = [contents.new() for _ in range(self.num_prefixes)]
        starts = arrival_times(load, -(-self.requests // self.turns), self.seed)
        arrivals: list[Arrival] = []
        for start in starts.tolist():
            history: Blocks = ((beginnings[rng.integers(self.num_prefixes)], self.prefix_len),) if self.prefix_len else ()
            for turn in range(min(self.turns, self.requests)):  # later turns would exceed the number of requests
                length = around(rng, self.input_len, self.range_ratio, 0 if history else 1)
                history = (*history, (contents.new(), length)) if length else history
                output, echo = around(rng, self.output_len, self.range_ratio, 1), contents.new()
                arrivals.append(Arrival(start + turn * self.think_time, history, output, echo))
                history = (*history, (echo, output))
        arrivals.sort(key=lambda arrival: arrival.at)
        return Trace(self.describe(load), arrivals[: self.requests])

    def describe(self, load: LoadShape) -> str:
        spread = f" ± {self.range_ratio:.0%}" if self.range_ratio else ""
        text = f"{self.input_len} tokens in, {self.output_len} out{spread}, {load}"
        if self.prefix_len:
            text += f", after {self.num_prefixes} shared prefix{'es' if self.num_prefixes > 1 else ''} of {self.prefix_len}"
        return text + (f", conversations of {self.turns} turns" if self.turns > 1 else "")


def workload_trace(name: str, vocab_size: int, limit: int | None) -> Trace:
    """Return a workload of `quire bench throughput`; the common prefix of all prompts is shared content."""
    found, contents = workload(name, vocab_size)[:limit], Contents()
    prompts = [np.asarray(sample.prompt) for sample in found]
    shortest = min(map(len, prompts))
    alike = np.all([prompt[:shortest] == prompts[0][:shortest] for prompt in prompts], axis=0)
    shared = 0 if len(prompts) == 1 else shortest if alike.all() else int(np.argmin(alike))
    head: Blocks = ((contents.new(), shared),) if shared else ()
    rest = [((contents.new(), len(prompt) - shared),) if len(prompt) > shared else () for prompt in prompts]
    return Trace(name, [Arrival(0.0, head + own, sample.output_tokens) for own, sample in zip(rest, found, strict=True)])


async def sharegpt_trace(path: Path, limit: int | None, load: LoadShape, seed: int, counter: TokenCounter) -> Trace:
    """Return the first question and answer of conversations, as in `quire bench serve`. No prefixes are shared."""
    options = DatasetOptions(name="sharegpt", path=str(path), count=limit or MAX_REQUESTS, seed=seed, oversample=False)
    found = await sharegpt_samples(options, RandomPrompts(None), counter)
    contents, times = Contents(), arrival_times(load, len(found), seed).tolist()
    return Trace(
        f"{path.name}, {load}",
        [
            Arrival(at, ((contents.new(), sample.prompt_tokens or 1),), sample.output_tokens)
            for at, sample in zip(times, found, strict=True)
        ],
    )


class Characters:
    """Counts tokens without a tokenizer."""

    def __init__(self, per_token: float) -> None:
        if not 0 < per_token < math.inf:
            raise ConfigError(f"--chars-per-token must be above 0, got {per_token:g}")
        if per_token * MAX_TOKENS < 1:
            raise ConfigError(f"--chars-per-token {per_token:g} makes more than {MAX_TOKENS} tokens of a character; raise it")
        self._per_token = per_token

    async def count(self, text: str) -> int:
        return math.ceil(len(text) / self._per_token)
