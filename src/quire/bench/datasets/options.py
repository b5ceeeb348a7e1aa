"""What can be asked of the data sets. Each reads what is its own."""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from quire.bench.record import MOST_REQUESTS, MOST_TOKENS, check_count
from quire.types.errors import ConfigError

SYNTHETIC = ("random", "prefix_repetition", "timed_trace")  # written in an alphabet


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
    prefix_repetition_prefix_len: int = 256
    prefix_repetition_suffix_len: int = 256
    prefix_repetition_num_prefixes: int = 10
    prefix_repetition_output_len: int = 128
    sharegpt_output_len: int | None = None
    custom_output_len: int = 256
    timed_trace_chunk_hash_size: int = 512
    timed_trace_sec_multiplier: float = 0.001

    def __post_init__(self) -> None:
        check_count("num-prompts", self.count, 1, MOST_REQUESTS)
        if self.seed < 0:
            raise ConfigError(f"--seed must be at least 0, got {self.seed}")
        if not 0 <= self.random_range_ratio < 1:
            raise ConfigError(f"--random-range-ratio must be from 0 to below 1, got {self.random_range_ratio}")
        for name, least in (
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
            check_count(name.replace("_", "-"), getattr(self, name), least, MOST_TOKENS)
        if self.sharegpt_output_len is not None:
            check_count("sharegpt-output-len", self.sharegpt_output_len, 1, MOST_TOKENS)
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


def read_text(options: DatasetOptions) -> str:
    assert options.path is not None
    try:
        return Path(options.path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read --dataset-path {options.path}: {error}") from None
