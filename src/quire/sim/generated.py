"""Traffic without a record: random lengths, beginnings that many share, conversations; and ShareGPT's texts at a rate."""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from quire.bench.arrivals import LoadShape, arrival_times
from quire.bench.bounds import MOST_REQUESTS, MOST_SECONDS, MOST_TOKENS, check_count
from quire.bench.datasets.options import DatasetOptions, TokenCounter
from quire.bench.datasets.random_tokens import around
from quire.bench.datasets.sharegpt import samples
from quire.bench.samples import RandomPrompts
from quire.bench.workloads import workload
from quire.sim.trace import Arrival, Blocks, Contents, Trace
from quire.types.errors import ConfigError


@dataclass(frozen=True)
class Generated:
    """Lengths are spread evenly within ±range_ratio. A prompt begins with one of `num_prefixes` shared beginnings. A
    conversation has `turns`: each prompt is all that was said before it and `input_len` tokens more, `think_time` seconds after
    the one before it came."""

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
            ("num-prompts", self.requests, 1, MOST_REQUESTS),
            ("input-len", self.input_len, 0 if self.prefix_len > 0 else 1, MOST_TOKENS),
            ("output-len", self.output_len, 1, MOST_TOKENS),
            ("prefix-len", self.prefix_len, 0, MOST_TOKENS),
            ("num-prefixes", self.num_prefixes, 1, MOST_TOKENS),
            ("turns", self.turns, 1, MOST_REQUESTS),
        ):
            check_count(flag, value, least, most)
        if not 0 <= self.range_ratio < 1:
            raise ConfigError(f"--range-ratio must be from 0 to below 1, got {self.range_ratio}")
        if not self.think_time >= 0:
            raise ConfigError(f"--think-time must be 0 or more seconds, got {self.think_time}")
        if self.think_time * self.turns > MOST_SECONDS:
            raise ConfigError(f"--think-time {self.think_time:g} is more than {MOST_SECONDS:g} seconds for all turns; lower it")

    def trace(self, load: LoadShape) -> Trace:
        """The load says when conversations begin."""
        rng, contents = np.random.default_rng(self.seed), Contents()
        beginnings = [contents.new() for _ in range(self.num_prefixes)]
        starts = arrival_times(load, -(-self.requests // self.turns), self.seed)
        arrivals: list[Arrival] = []
        for start in starts.tolist():
            said: Blocks = ((beginnings[rng.integers(self.num_prefixes)], self.prefix_len),) if self.prefix_len else ()
            for turn in range(min(self.turns, self.requests)):  # more would come after all that are asked for
                length = around(rng, self.input_len, self.range_ratio, 0 if said else 1)
                said = (*said, (contents.new(), length)) if length else said
                output, echo = around(rng, self.output_len, self.range_ratio, 1), contents.new()
                arrivals.append(Arrival(start + turn * self.think_time, said, output, echo))
                said = (*said, (echo, output))
        arrivals.sort(key=lambda arrival: arrival.at)
        return Trace(self.told(load), arrivals[: self.requests])

    def told(self, load: LoadShape) -> str:
        spread = f" ± {self.range_ratio:.0%}" if self.range_ratio else ""
        text = f"{self.input_len} tokens in, {self.output_len} out{spread}, {load}"
        if self.prefix_len:
            text += f", after {self.num_prefixes} shared prefix{'es' if self.num_prefixes > 1 else ''} of {self.prefix_len}"
        return text + (f", conversations of {self.turns} turns" if self.turns > 1 else "")


def workload_trace(name: str, vocab_size: int, limit: int | None) -> Trace:
    """A workload of `quire bench throughput`. What all of its prompts begin with, they share."""
    found, contents = workload(name, vocab_size)[:limit], Contents()
    prompts = [np.asarray(sample.prompt) for sample in found]
    shortest = min(map(len, prompts))
    alike = np.all([prompt[:shortest] == prompts[0][:shortest] for prompt in prompts], axis=0)
    shared = 0 if len(prompts) == 1 else shortest if alike.all() else int(np.argmin(alike))
    head: Blocks = ((contents.new(), shared),) if shared else ()
    rest = [((contents.new(), len(prompt) - shared),) if len(prompt) > shared else () for prompt in prompts]
    return Trace(name, [Arrival(0.0, head + own, sample.output_tokens) for own, sample in zip(rest, found, strict=True)])


async def sharegpt_trace(path: Path, limit: int | None, load: LoadShape, seed: int, counter: TokenCounter) -> Trace:
    """The first question and answer of conversations, as `quire bench serve` has them. Nobody shares a beginning."""
    options = DatasetOptions(name="sharegpt", path=str(path), count=limit or MOST_REQUESTS, seed=seed, oversample=False)
    found = await samples(options, RandomPrompts(None), counter)
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
        if per_token * MOST_TOKENS < 1:
            raise ConfigError(f"--chars-per-token {per_token:g} makes more than {MOST_TOKENS} tokens of a character; raise it")
        self._per_token = per_token

    async def count(self, text: str) -> int:
        return math.ceil(len(text) / self._per_token)
