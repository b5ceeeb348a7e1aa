"""Answers as models mangle them: cut, doubled, shuffled, with marks where none belong. Four laws hold for every format.

Nothing raises; the pieces do not matter; the arguments of a complete call are a JSON object; what stands between calls is told.
"""

import json
import random
from collections.abc import Callable
from functools import partial

import pytest

from parse_mangled import answers, mangle
from parse_samples import FAMILIES, Folded
from quire.text.parse.events import Event, ToolEnd
from quire.text.parse.format import Format, combine
from quire.text.parse.formats import BUILT_IN, REQUIRED, named
from quire.text.parse.machine import AnswerParser

SCHEMA = {"properties": {"s": {"type": "string"}, "n": {"type": "integer"}, "o": {"type": "object"}, "l": {"type": "array"}}}
TOOLS = {"f": SCHEMA, "get_weather": SCHEMA}
ROUNDS = 25


def read(machine: AnswerParser, text: str, cuts: list[int]) -> list[Event]:
    out, begin = [], 0
    for cut in [*cuts, len(text)]:
        out += machine.feed(text[begin:cut])
        begin = cut
    return out + machine.finish()


def check(make: Callable[[], AnswerParser], text: str, words: list[str], dice: random.Random) -> None:
    whole = read(make(), text, [])
    told = Folded.of(whole)
    for cuts in (list(range(len(text))), sorted(dice.choices(range(len(text) + 1), k=6))):
        assert Folded.of(read(make(), text, cuts)) == told, text
    for event in whole:
        if isinstance(event, ToolEnd) and event.complete:
            assert isinstance(json.loads(told.calls[event.index][1]), dict), text
            told.calls[event.index][1].encode()  # no halves of characters
    everything = told.text + told.reasoning + repr(told.calls)
    for word in words:
        assert word in everything, (word, text, told)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_mangled_answers(family):
    tool, thinking, *_ = FAMILIES[family]
    form = combine(BUILT_IN[tool], BUILT_IN[thinking])
    for text, words in answers(family, sorted(TOOLS), ROUNDS):
        dice = random.Random(text)
        if tool in ("openai", "muse_glimmer", "kimi_k2"):
            words = []  # headers are not told, nor is text between calls of a section
        make = partial(AnswerParser, form, tools=TOOLS, inside=dice.choice([None, True, False]))
        check(make, text, words, dice)


@pytest.mark.parametrize("calls", [REQUIRED, named("f")], ids=["required", "named"])
def test_mangled_answers_of_grammars(calls):
    samples = ['[{"name": "f", "parameters": {"n": 1}}, {"name": "get_weather", "parameters": {}}]', '{"n": 1, "l": [{}]}']
    for i in range(10 * ROUNDS):
        dice = random.Random(i)
        text = dice.choice(samples)
        for _ in range(dice.randrange(1, 4)):
            text = mangle(text, ['"name"', '"parameters"', "[", "{"], dice)
        check(partial(AnswerParser, Format((calls,), BUILT_IN["qwen3"].thinking), tools=TOOLS), text, [], dice)
