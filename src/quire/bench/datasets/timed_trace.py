"""`timed_trace`: replays recorded traffic: a JSON object a line, in the order of time.

`timestamp` says when (in milliseconds, unless `--timed-trace-sec-multiplier` says otherwise) and `output_length` how many
tokens to ask for. The prompt is given as `prompt`, as `messages`, or, where the record keeps no text, as `input_length` random
tokens; with `hash_ids` every hash stands for the same block of tokens wherever it appears, so that what was shared is shared.
"""

from typing import Any

import numpy as np

from quire.bench.datasets.custom import json_lines, sample
from quire.bench.datasets.options import DatasetOptions, TokenCounter
from quire.bench.record import MOST_SECONDS, read_tokens
from quire.bench.samples import Ids, RandomPrompts, Sample
from quire.types.errors import ConfigError


async def samples(options: DatasetOptions, alphabet: RandomPrompts, _: TokenCounter) -> list[Sample]:
    made: list[Sample] = []
    begin: float | None = None
    for where, line in json_lines(options):
        if len(made) == options.count:
            break
        stamp = moment(where, line.get("timestamp"), options.timed_trace_sec_multiplier)
        begin = stamp if begin is None else begin
        if stamp - begin < (made[-1].at or 0.0 if made else 0.0):
            raise ConfigError(f"{where}: its timestamp is before that of the line above it")
        made.append(_sample(where, line, len(made), stamp - begin, options, alphabet))
    return made


def _sample(
    where: str, line: dict[str, Any], index: int, at: float, options: DatasetOptions, alphabet: RandomPrompts
) -> Sample:
    output = max(1, read_tokens(where, "output_length", line.get("output_length"), 0))
    if "input_length" not in line:
        given = sample(where, {**line, "output_tokens": output}, output)
        return Sample(given.prompt, output, given.prompt_tokens, given.messages, at)
    length = read_tokens(where, "input_length", line["input_length"], 1)
    hashes = line.get("hash_ids") or []
    if not isinstance(hashes, list) or not all(type(item) is int and item >= 0 for item in hashes):
        raise ConfigError(f"{where}: hash_ids must be a list of whole numbers")
    blocks = [block(options, alphabet, item) for item in hashes[: -(-length // options.timed_trace_chunk_hash_size)]]
    known = np.concatenate(blocks)[:length] if blocks else np.zeros(0, dtype=np.int32)
    rest = alphabet.draw(np.random.default_rng((options.seed, 1, index)), length - len(known))
    prompt = np.concatenate([known, rest])
    return Sample(alphabet.write(prompt), output, length, at=at)


def block(options: DatasetOptions, alphabet: RandomPrompts, item: int) -> Ids:
    return alphabet.draw(np.random.default_rng((options.seed, 0, item)), options.timed_trace_chunk_hash_size)


def moment(where: str, value: Any, unit: float) -> float:
    """Seconds."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MOST_SECONDS / unit:
        most = f"{MOST_SECONDS / unit:g}, in units of {unit:g} seconds"
        raise ConfigError(f"{where}: timestamp must be a number from 0 to {most}; got {str(value)[:60]}")
    return value * unit
