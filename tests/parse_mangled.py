"""Answers with tool calls as models mangle them: cut, doubled, shuffled, with marks where none belong."""

import random

from parse_samples import FAMILIES, Call
from quire.text.parse.format import combine
from quire.text.parse.formats import BUILT_IN

ARGUMENTS = [
    {}, {"s": "Köln 🌧\n\"quoted\" \\ 'x'"}, {"n": -3, "l": [1, "漢", {"k": None}]}, {"o": {"u": {"q": ["\\", "}]"]}}, "s": ""},
]  # fmt: skip


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


def answers(family: str, names: list[str], rounds: int, seed: int = 0) -> list[tuple[str, list[str]]]:
    """Mangled answers, and the words in them that stand between calls."""
    tool, thinking, write, _ = FAMILIES[family]
    marks = sorted(combine(BUILT_IN[tool], BUILT_IN[thinking]).marks)
    out = []
    for i in range(rounds):
        dice = random.Random(f"{family} {seed} {i}")
        text, words = "", []
        for k in range(dice.randrange(1, 4)):
            calls: list[Call] = [(dice.choice(names), dice.choice(ARGUMENTS)) for _ in range(dice.randrange(3))]
            part = write("so" if not k and dice.random() < 0.5 else "", "", calls)
            for _ in range(dice.randrange(4)):
                part = mangle(part, marks, dice)
            words.append(f"word{k}")
            text += f"{part}\nword{k}. "
        out.append((text, words))
    return out
