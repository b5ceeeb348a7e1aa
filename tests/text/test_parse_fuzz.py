"""Answers as models mangle them: cut, doubled, shuffled, with marks where none belong. Four laws hold for every format.

Nothing raises; the pieces do not matter; the arguments of a complete call are a JSON object; what stands between calls is told.
"""

import json
import random
from collections.abc import Callable
from functools import partial

import pytest

from parse_samples import FAMILIES, Call, Folded
from quire.text.parse.events import Event, ToolEnd
from quire.text.parse.format import Format, combine
from quire.text.parse.formats import BUILT_IN, REQUIRED, named
from quire.text.parse.machine import Parser

SCHEMA = {"properties": {"s": {"type": "string"}, "n": {"type": "integer"}, "o": {"type": "object"}, "l": {"type": "array"}}}
TOOLS = {"f": SCHEMA, "get_weather": SCHEMA}
ARGUMENTS = [
    {}, {"s": "Köln 🌧\n\"quoted\" \\ 'x'"}, {"n": -3, "l": [1, "漢", {"k": None}]}, {"o": {"u": {"q": ["\\", "}]"]}}, "s": ""},
]  # fmt: skip
ROUNDS = 25

Calls = list[Call]


def read(machine: Parser, text: str, cuts: list[int]) -> list[Event]:
    out, begin = [], 0
    for cut in [*cuts, len(text)]:
        out += machine.feed(text[begin:cut])
        begin = cut
    return out + machine.finish()


def mangle(text: str, marks: list[str], dice: random.Random) -> str:
    """One thing that goes wrong."""
    if not text:
        return dice.choice(marks)
    a, b = sorted(dice.choices(range(len(text) + 1), k=2))
    match dice.randrange(8):
        case 0:
            return text[:a] + text[b:]
        case 1:
            return text[:b] + text[a:]
        case 2:
            return text[:a] + dice.choice(marks) + text[a:]
        case 3:
            return text[:a]
        case 4:
            return text[:a] + dice.choice("{}[]()\"'\\,:<>|= \n\x00\ud7ff\\ud800") + text[a:]
        case 5:
            mark = dice.choice(marks)
            return text.replace(mark, "", 1)
        case 6:
            return text.replace('"arguments"', '"arguments": {"n": 7}, "arguments"', dice.randrange(1, 3))
    return text


def answers(family: str, rounds: int, seed: int) -> list[tuple[str, list[str]]]:
    """Mangled answers, and the words in them that stand between calls."""
    tool, thinking, write, _ = FAMILIES[family]
    marks = sorted(combine(BUILT_IN[tool], BUILT_IN[thinking]).marks)
    out = []
    for i in range(rounds):
        dice = random.Random(f"{family} {seed} {i}")
        text, words = "", []
        for k in range(dice.randrange(1, 4)):
            calls: Calls = [(dice.choice(sorted(TOOLS)), dice.choice(ARGUMENTS)) for _ in range(dice.randrange(3))]
            part = write("so" if not k and dice.random() < 0.5 else "", "", calls)
            for _ in range(dice.randrange(4)):
                part = mangle(part, marks, dice)
            words.append(f"word{k}")
            text += f"{part}\nword{k}. "
        out.append((text, words))
    return out


def check(make: Callable[[], Parser], text: str, words: list[str], dice: random.Random) -> None:
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
    for text, words in answers(family, ROUNDS, 0):
        dice = random.Random(text)
        if tool == "openai":
            words = []  # headers are not told
        make = partial(Parser, form, tools=TOOLS, inside=dice.choice([None, True, False]))
        check(make, text, words, dice)


@pytest.mark.parametrize("calls", [REQUIRED, named("f")], ids=["required", "named"])
def test_mangled_answers_of_grammars(calls):
    samples = ['[{"name": "f", "parameters": {"n": 1}}, {"name": "get_weather", "parameters": {}}]', '{"n": 1, "l": [{}]}']
    for i in range(10 * ROUNDS):
        dice = random.Random(i)
        text = dice.choice(samples)
        for _ in range(dice.randrange(1, 4)):
            text = mangle(text, ['"name"', '"parameters"', "[", "{"], dice)
        check(partial(Parser, Format((calls,), BUILT_IN["qwen3"].thinking), tools=TOOLS), text, [], dice)
