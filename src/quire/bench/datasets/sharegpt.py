"""`sharegpt`: the first question and answer of every conversation in a ShareGPT file.

As many tokens are asked for as the recorded answer has. Conversations that are very short or very long are left out, with the
bounds that vLLM's benchmark has, so that runs compare.
"""

from typing import Any

from quire.bench.datasets.custom import enough
from quire.bench.datasets.options import DatasetOptions, TokenCounter, read_text
from quire.bench.samples import RandomPrompts, Sample
from quire.types.errors import ConfigError
from quire.types.json_text import read_json

LEAST, MOST_PROMPT, MOST_TOTAL = 4, 1024, 2048


async def samples(options: DatasetOptions, _: RandomPrompts, counter: TokenCounter) -> list[Sample]:
    pairs = exchanges(options)
    order = options.rng.permutation(len(pairs)) if options.shuffle else range(len(pairs))
    made: list[Sample] = []
    for index in order:
        if len(made) == options.count:
            break
        question, answer = pairs[index]
        length = await counter.count(question)
        output = options.sharegpt_output_len or await counter.count(answer)
        short = length < LEAST or (options.sharegpt_output_len is None and output < LEAST)
        if not (short or length > MOST_PROMPT or length + output > MOST_TOTAL):
            made.append(Sample(question, output, length))
    if not made:
        raise ConfigError(f"{options.path} holds no conversation of {LEAST} to {MOST_TOTAL} tokens")
    return enough(made, options)


def exchanges(options: DatasetOptions) -> list[tuple[str, str]]:
    try:
        conversations = read_json(read_text(options))
    except ValueError as error:
        raise ConfigError(f"{options.path} is not JSON: {error}") from None
    if not isinstance(conversations, list):
        raise ConfigError(f"{options.path} is not a list of conversations")
    return [(_said(turns[0]), _said(turns[1])) for turns in map(_turns, conversations) if len(turns) >= 2]


def _turns(conversation: Any) -> list[Any]:
    turns = conversation.get("conversations", conversation.get("conversation")) if isinstance(conversation, dict) else None
    return turns if isinstance(turns, list) else []


def _said(turn: Any) -> str:
    return str(turn.get("value", "")) if isinstance(turn, dict) else ""
