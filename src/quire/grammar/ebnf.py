"""Reads EBNF as llama.cpp and xgrammar have it: `root ::= "a" [b-d]+ (rule | "x"){2,3}`, comments with #."""

import re
from dataclasses import dataclass

from quire.grammar.backend import GrammarError
from quire.grammar.forms import LAST, Expression, Expressions, complement

ROOT = "root"
MOST_NESTED = 100  # parentheses
MOST_TIMES = 100_000
_RULE = re.compile(r"[\w.-]+[ \t]*::=")
_IS_EBNF = re.compile(rf"^[ \t]*{_RULE.pattern}", re.MULTILINE)
_BLANK = re.compile(r"(?:\s|#[^\r\n]*)*")
_NAME = re.compile(r"[\w-]+(?:\.[\w-]+)*")
_RANGE = re.compile(r"\{\s*(\d*)\s*(?:(,)\s*(\d*)\s*)?\}")
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|u\{([0-9a-fA-F]{1,8})\}|(.))", re.DOTALL)
_LETTERS = {"n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "0": "\0"}
_THEMSELVES = "\"'\\/[](){}|*+?.^$-#:=<>"


def is_ebnf(text: str) -> bool:
    return _IS_EBNF.search(text) is not None


@dataclass
class _Place:
    text: str
    at: int = 0

    def skip(self) -> None:
        found = _BLANK.match(self.text, self.at)
        assert found is not None
        self.at = found.end()

    def sees(self, text: str) -> bool:
        return self.text.startswith(text, self.at)

    def take(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        found = pattern.match(self.text, self.at)
        if found is not None:
            self.at = found.end()
        return found

    def wrong(self, what: str) -> GrammarError:
        line = self.text.count("\n", 0, self.at) + 1
        column = self.at - self.text.rfind("\n", 0, self.at)
        return GrammarError(f"line {line}, column {column} of the EBNF: {what}")


class _EbnfReader:
    def __init__(self, text: str, forms: Expressions) -> None:
        self._place, self._forms = _Place(text), forms
        self._depth = 0
        self.rules: dict[str, Expression] = {}

    def read(self) -> None:
        place = self._place
        place.skip()
        while place.at < len(place.text):
            name = place.take(_NAME)
            place.skip()
            if name is None or not place.sees("::="):
                raise place.wrong('expected a rule: name ::= "text" ...')
            if name[0] in self.rules:
                raise place.wrong(f"there already is a rule {name[0]!r}")
            place.at += 3
            self.rules[name[0]] = self._alternatives()

    def _alternatives(self) -> Expression:
        parts = [self._sequence()]
        while self._place.sees("|"):
            self._place.at += 1
            parts.append(self._sequence())
        return self._forms.alt(parts)

    def _sequence(self) -> Expression:
        place, parts = self._place, []
        place.skip()
        while place.text[place.at : place.at + 1] not in ("", "|", ")") and not _RULE.match(place.text, place.at):
            parts.append(self._repeated(self._element()))
        return self._forms.seq(parts)

    def _element(self) -> Expression:
        place = self._place
        if place.sees('"'):
            return self._text()
        if place.sees("["):
            return self._class()
        if place.sees("("):
            return self._group()
        if place.sees("."):
            place.at += 1
            return self._forms.chars([(0, LAST)])
        name = place.take(_NAME)
        if name is None:
            raise place.wrong(f"expected a text, a class of characters, a group or a rule, found {place.text[place.at]!r}")
        return self._forms.ref(name[0])

    def _group(self) -> Expression:
        place = self._place
        if place.sees("(="):
            raise place.wrong("a look-ahead, (= ...), cannot be used")
        self._depth += 1
        if self._depth > MOST_NESTED:
            raise place.wrong(f"more than {MOST_NESTED} groups in each other")
        place.at += 1
        inner = self._alternatives()
        if not place.sees(")"):
            raise place.wrong("expected ')'")
        place.at += 1
        self._depth -= 1
        return inner

    def _repeated(self, form: Expression) -> Expression:
        place = self._place
        place.skip()
        while place.at < len(place.text) and place.text[place.at] in "*+?{":
            if (found := place.take(_RANGE)) is not None and (found[1] or found[3]):
                if max(len(found[1]), len(found[3] or "")) > 9:  # int() takes no more than 4,300 digits
                    raise place.wrong(f"nothing can be repeated more than {MOST_TIMES} times")
                least = int(found[1] or 0)
                most = least if not found[2] else int(found[3]) if found[3] else None
            elif place.sees("{") or found is not None:
                raise place.wrong("expected a number of times: {2}, {2,} or {2,5}")
            else:
                least, most = {"*": (0, None), "+": (1, None), "?": (0, 1)}[place.text[place.at]]
                place.at += 1
            if most is not None and most < least:
                raise place.wrong(f"{{{least},{most}}} is no range")
            if max(least, most or 0) > MOST_TIMES:
                raise place.wrong(f"nothing can be repeated more than {MOST_TIMES} times")
            form = self._forms.rep(form, least, most)
            place.skip()
        return form

    def _text(self) -> Expression:
        place, codes = self._place, []
        place.at += 1
        while not place.sees('"'):
            codes.append(self._code('"'))
        place.at += 1
        return self._forms.seq([self._forms.chars([(code, code)]) for code in codes])

    def _class(self) -> Expression:
        place = self._place
        begun = place.at
        place.at += 1
        others = place.sees("^")
        place.at += others
        ranges = []
        while not place.sees("]"):
            low = high = self._code("]")
            if place.sees("-") and not place.sees("-]"):
                place.at += 1
                high = self._code("]")
            if high < low:
                raise place.wrong(f"the range goes backwards: {chr(low)!r} to {chr(high)!r}")
            ranges.append((low, high))
        place.at += 1
        form = self._forms.chars(complement(ranges) if others else ranges)
        if form is self._forms.nothing:
            place.at = begun
            raise place.wrong("no character is in this class")
        return form

    def _code(self, end: str) -> int:
        """The next character within a text or a class."""
        place = self._place
        if place.at >= len(place.text) or (end == '"' and place.text[place.at] in "\r\n"):
            raise place.wrong(f"expected {end!r}")
        if not place.sees("\\"):
            place.at += 1
            return ord(place.text[place.at - 1])
        begun = place.at
        code = self._escape()
        if 0xD800 <= code < 0xDC00 and place.sees("\\u"):  # the first half of a pair
            low = self._escape()
            if 0xDC00 <= low < 0xE000:
                return 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00)
        if code > LAST or 0xD800 <= code < 0xE000:
            place.at = begun
            raise place.wrong(f"{code:#x} is no character")
        return code

    def _escape(self) -> int:
        place = self._place
        found = place.take(_ESCAPE)
        letter = None if found is None else found[5]
        if found is not None and letter is None:
            return int(found[1] or found[2] or found[3] or found[4], 16)
        if letter is not None and letter in _LETTERS:
            return ord(_LETTERS[letter])
        if letter is None or letter not in _THEMSELVES:
            raise place.wrong(f"unknown escape \\{letter or ''}")
        return ord(letter)


def read_ebnf(text: str, forms: Expressions) -> dict[str, Expression]:
    """The rules by name; every rule that is named in one exists, and one of them is `root`."""
    reader = _EbnfReader(text, forms)
    reader.read()
    rules = reader.rules
    if ROOT not in rules:
        raise GrammarError(f"the EBNF has no rule {ROOT!r}, with which a text begins")
    for name, form in rules.items():
        for other in sorted(form.names):
            if other not in rules:
                raise GrammarError(f"rule {name!r} of the EBNF names a rule {other!r} that there is not")
    return rules
