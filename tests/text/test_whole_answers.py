"""Answers that are sent as a whole: their text is made of many tokens at once, and is that of a stream."""

import random

import pytest

from quire.text.inputs import InputProcessor
from quire.text.outputs import TOKENS_AT_ONCE, OutputProcessor
from quire.text.tokenizer import Tokenizer
from quire.types.outputs import TokenDelta
from quire.types.request import FinishReason
from quire.types.sampling import RequestOutputKind, SamplingParams
from quire.types.stats import Arrived, OutputNews
from text.tiny_tokenizers import KINDS

LENGTHS = [1, TOKENS_AT_ONCE - 1, TOKENS_AT_ONCE, 3 * TOKENS_AT_ONCE + 5]


class Texts:
    def __init__(self) -> None:
        self.texts: list[str] = []

    def on_arrival(self, request: Arrived) -> None:
        pass

    def on_outputs(self, news: OutputNews) -> None:
        self.texts += [text for done in news.finished for text in done.texts]


def text_of(tokenizer: Tokenizer, ids: list[int], kind: RequestOutputKind, end: TokenDelta | None, **fields: object) -> str:
    """Send the tokens in small deltas, then the end; without one the request is forgotten."""
    seen = Texts()
    inputs = InputProcessor(tokenizer, vocab_size=len(tokenizer), max_model_len=4096, max_logprobs=5, eos_ids=(), seed=0)
    outputs = OutputProcessor(tokenizer, [seen])
    outputs.add(inputs.prepare("r", "Hello", SamplingParams(max_tokens=999, output_kind=kind, **fields), arrival=0.0))
    text, sizes = "", random.Random(0)
    while ids:
        size = sizes.randint(1, 5)
        for output in outputs.process([TokenDelta("r", ids[:size])]).outputs:
            text = output.outputs[0].text
        ids = ids[size:]
    if end is None:
        outputs.forget("r")
        return seen.texts[0]
    for output in outputs.process([end]).outputs:
        text = output.outputs[0].text
    assert seen.texts == [text]
    return text


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("reason", ["length", "stop", "abort", None])
@pytest.mark.parametrize("last", [[], [17]])
def test_the_text_is_that_of_a_stream(
    kinds: dict[str, Tokenizer], kind: str, length: int, reason: FinishReason | None, last: list[int]
) -> None:
    tokenizer, chance = kinds[kind], random.Random(length)
    ids = [chance.randrange(len(tokenizer)) for _ in range(length)]
    end = None if reason is None else TokenDelta("r", last, reason)
    whole = text_of(tokenizer, ids, RequestOutputKind.FINAL_ONLY, end)
    assert whole == text_of(tokenizer, ids, RequestOutputKind.CUMULATIVE, end)
    assert whole or length < 2
