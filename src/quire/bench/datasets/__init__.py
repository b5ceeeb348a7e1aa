"""Where samples come from: one file per data set, each with `async def samples(options, alphabet, counter) -> list[Sample]`."""

import importlib
from collections.abc import Callable, Coroutine
from typing import Any

from quire.bench.datasets.options import DatasetOptions, TokenCounter
from quire.bench.samples import RandomPrompts, Sample

Source = Callable[[DatasetOptions, RandomPrompts, TokenCounter], Coroutine[Any, Any, list[Sample]]]

HOMES = {
    "random": "random_tokens",
    "prefix_repetition": "prefix_repetition",
    "sharegpt": "sharegpt",
    "custom": "custom",
    "timed_trace": "timed_trace",
}


def find(name: str) -> Source:
    source: Source = importlib.import_module(f"quire.bench.datasets.{HOMES[name]}").samples
    return source
