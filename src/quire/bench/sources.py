"""All data sets of the benchmarks by name."""

from collections.abc import Callable, Coroutine
from typing import Any

from quire.bench.datasets import (
    DatasetOptions,
    TokenCounter,
    custom_samples,
    prefix_repetition_samples,
    random_samples,
    sharegpt_samples,
    timed_trace_samples,
)
from quire.bench.media import random_media_samples
from quire.bench.samples import RandomPrompts, Sample

Source = Callable[[DatasetOptions, RandomPrompts, TokenCounter], Coroutine[Any, Any, list[Sample]]]
SOURCES: dict[str, Source] = {
    "random": random_samples,
    "random-mm": random_media_samples,
    "prefix_repetition": prefix_repetition_samples,
    "sharegpt": sharegpt_samples,
    "custom": custom_samples,
    "timed_trace": timed_trace_samples,
}
