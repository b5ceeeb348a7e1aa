"""`custom`: a JSON object a line, with `prompt` (text or token ids) or `messages`, and perhaps `output_tokens`."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from quire.bench.datasets.options import DatasetOptions, TokenCounter, read_text
from quire.bench.record import read_tokens
from quire.bench.samples import RandomPrompts, Sample
from quire.types.errors import ConfigError
from quire.types.json_text import read_json

MOST_ID = 2**31 - 1


async def samples(options: DatasetOptions, _: RandomPrompts, __: TokenCounter) -> list[Sample]:
    made = [sample(where, line, options.custom_output_len) for where, line in json_lines(options)]
    if options.shuffle:
        made = [made[index] for index in options.rng.permutation(len(made))]
    return enough(made, options)


def sample(where: str, line: dict[str, Any], output_tokens: int) -> Sample:
    prompt, messages = line.get("prompt"), line.get("messages")
    asked = read_tokens(where, "output_tokens", line.get("output_tokens", output_tokens), 1)
    if isinstance(messages, list) and messages and prompt is None:
        return Sample(None, asked, messages=messages)
    if messages is None and isinstance(prompt, str) and prompt:
        return Sample(prompt, asked)
    if messages is None and isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        if not all(0 <= token <= MOST_ID for token in prompt):
            raise ConfigError(f"{where}: prompt must have token ids from 0 to {MOST_ID}")
        return Sample(np.asarray(prompt, dtype=np.int32), asked, len(prompt))
    raise ConfigError(f'{where}: needs either "prompt" (text or a list of token ids) or "messages" (a list)')


def json_lines(options: DatasetOptions) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every line with where it stands, for complaints."""
    empty = True
    for number, text in enumerate(read_text(options).splitlines(), 1):
        if not text.strip():
            continue
        where = f"{options.path} line {number}"
        try:
            line = read_json(text)
        except ValueError as error:
            raise ConfigError(f"{where} is not JSON: {error}") from None
        if not isinstance(line, dict):
            raise ConfigError(f"{where} is not a JSON object")
        empty = False
        yield where, line
    if empty:
        raise ConfigError(f"{options.path} holds no lines")


def enough(made: list[Sample], options: DatasetOptions) -> list[Sample]:
    """As many as were asked for: from the start again where there are fewer, if that is allowed."""
    if len(made) >= options.count or not options.oversample:
        return made[: options.count]
    return [made[index % len(made)] for index in range(options.count)]
