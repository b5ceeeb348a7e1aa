"""Read EBNF as llama.cpp and xgrammar write it: `root ::= "a" [b-d]+ (rule | "x"){2,3}`, comments with #.

An expression is a set of characters, a sequence, an alternative, a repetition or the name of a rule. Equal expressions are one
object: they are compared by identity, and parts that many rules share exist once.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from quire.features.structured.grammar.backend import GrammarError

LAST = 0x10FFFF
SURROGATES = (0xD800, 0xDFFF)
Ranges = tuple[tuple[int, int], ...]  # of code points, from low to high, none touching another


@dataclass(frozen=True, eq=False)
class Expression:
    size: int  # nodes, written out
    depth: int
    nullable: bool  # for one without names: may it be empty?
    names: frozenset[str]  # of the rules in it


@dataclass(frozen=True, eq=False)
class Chars(Expression):
    ranges: Ranges


@dataclass(frozen=True, eq=False)
class Ref(Expression):
    name: str


@dataclass(frozen=True, eq=False)
class Seq(Expression):
    parts: tuple[Expression, ...]


@dataclass(frozen=True, eq=False)
class Alt(Expression):
    """Without parts: nothing fits, not even the empty text."""

    parts: tuple[Expression, ...]


@dataclass(frozen=True, eq=False)
class Rep(Expression):
    part: Expression
    least: int
    most: int | None


class Expressions:
    """Makes expressions, and makes each only once."""

    def __init__(self) -> None:
        self._made: dict[tuple[object, ...], Expression] = {}
        self._filled: dict[Expression, Expression] = {}
        self.empty = self.seq([])
        self.nothing = self.alt([])

    def chars(self, ranges: Iterable[tuple[int, int]]) -> Expression:
        distinct = tidy(ranges)
        if not distinct:
            return self.nothing
        return self._make((Chars, distinct), lambda: Chars(1, 1, False, frozenset(), distinct))

    def text(self, text: str) -> Expression:
        return self.seq([self.chars([(ord(c), ord(c))]) for c in text])

    def ref(self, name: str) -> Expression:
        return self._make((Ref, name), lambda: Ref(1, 1, False, frozenset([name]), name))

    def seq(self, parts: Sequence[Expression]) -> Expression:
        if any(isinstance(part, Alt) and not part.parts for part in parts):
            return self.nothing
        parts = [part for part in parts if not (isinstance(part, Seq) and not part.parts)]
        if len(parts) == 1:
            return parts[0]
        distinct = tuple(parts)
        return self._make(
            (Seq, *map(id, distinct)),
            lambda: Seq(*_sums(distinct), all(p.nullable for p in distinct), _names(distinct), distinct),
        )

    def alt(self, parts: Sequence[Expression]) -> Expression:
        flat = [inner for part in parts for inner in (part.parts if isinstance(part, Alt) else (part,))]
        single = [part for part in flat if isinstance(part, Chars)]
        if len(single) > 1:
            flat = [self.chars(r for part in single for r in part.ranges), *(p for p in flat if not isinstance(p, Chars))]
        distinct = tuple(dict.fromkeys(flat))
        if len(distinct) == 1:
            return distinct[0]
        return self._make(
            (Alt, *map(id, distinct)),
            lambda: Alt(*_sums(distinct), any(p.nullable for p in distinct), _names(distinct), distinct),
        )

    def rep(self, part: Expression, least: int, most: int | None) -> Expression:
        if most == 0 or part is self.empty:
            return self.empty
        if part is self.nothing:
            return self.nothing if least else self.empty
        if part.nullable and not part.names:  # some of them are empty
            part, least = self.filled(part), 0
        if (least, most) == (1, 1):
            return part
        if isinstance(part, Rep) and part.most is None and part.least <= 1 and least <= 1 and most is None:
            least, part = min(least, part.least), part.part
        nullable = least == 0 or part.nullable
        return self._make(
            (Rep, id(part), least, most), lambda: Rep(part.size + 1, part.depth + 1, nullable, part.names, part, least, most)
        )

    def filled(self, form: Expression) -> Expression:
        """All of its texts but the empty one. For expressions without names."""
        if not form.nullable:
            return form
        if form not in self._filled:
            self._filled[form] = self._without_empty(form)
        return self._filled[form]

    def _without_empty(self, form: Expression) -> Expression:
        match form:
            case Alt():
                return self.alt([self.filled(part) for part in form.parts])
            case Rep():
                return self.rep(self.filled(form.part), 1, form.most)
            case Seq():  # all parts may be empty; the first that is not
                return self.alt([self.seq([self.filled(p), *form.parts[i + 1 :]]) for i, p in enumerate(form.parts)])
        return self.nothing

    def _make(self, key: tuple[object, ...], make: Callable[[], Expression]) -> Expression:
        found = self._made.get(key)
        if found is None:
            found = self._made[key] = make()
        return found


def tidy(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Sorted, joined where they touch, without the surrogates."""
    out: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        for begin, end in ((low, min(high, SURROGATES[0] - 1)), (max(low, SURROGATES[1] + 1), high)):
            if begin > end:
                continue
            if out and begin <= out[-1][1] + 1:
                out[-1] = out[-1][0], max(end, out[-1][1])
            else:
                out.append((begin, end))
    return tuple(out)


def complement(ranges: Iterable[tuple[int, int]]) -> Ranges:
    out, begin = [], 0
    for low, high in tidy(ranges):
        out.append((begin, low - 1))
        begin = high + 1
    return tidy([(low, high) for low, high in [*out, (begin, LAST)] if low <= high])


def to_regex(form: Expression) -> str:
    """For an expression without names."""
    match form:
        case Chars():
            return _class(form.ranges)
        case Seq():
            return "".join(f"(?:{to_regex(p)})" if isinstance(p, Alt) else to_regex(p) for p in form.parts)
        case Alt():
            return "|".join(map(to_regex, form.parts))
        case Rep():
            inner = to_regex(form.part) if isinstance(form.part, Chars) else f"(?:{to_regex(form.part)})"
            return inner + times(form.least, form.most)
    raise ValueError(form)


def to_pattern(text: str) -> str:
    """Matches just this text."""
    return "".join(_char(ord(c)) for c in text)


def without_anchors(pattern: str) -> str:
    """A pattern always has to match the whole text: ^ and $ at its ends say nothing more."""
    pattern = pattern.removeprefix("^")
    ending = re.search(r"(\\*)\$$", pattern)
    return pattern[:-1] if ending is not None and len(ending[1]) % 2 == 0 else pattern


def times(least: int, most: int | None) -> str:
    short = {(0, None): "*", (1, None): "+", (0, 1): "?"}.get((least, most))
    return short or f"{{{least},{'' if most is None else most}}}"


def _class(ranges: Ranges) -> str:
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        return _char(ranges[0][0])
    return "[" + "".join(_char(low) if low == high else f"{_char(low)}-{_char(high)}" for low, high in ranges) + "]"


def _char(code: int) -> str:
    return chr(code) if code < 128 and chr(code).isalnum() else f"\\x{{{code:x}}}"


def _sums(parts: Sequence[Expression]) -> tuple[int, int]:
    return 1 + sum(part.size for part in parts), 1 + max((part.depth for part in parts), default=0)


def _names(parts: Sequence[Expression]) -> frozenset[str]:
    return frozenset().union(*(part.names for part in parts))


ROOT = "root"
MAX_NESTED = 100  # parentheses
MAX_TIMES = 100_000
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
    def __init__(self, text: str, expressions: Expressions) -> None:
        self._place, self._expressions = _Place(text), expressions
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
        return self._expressions.alt(parts)

    def _sequence(self) -> Expression:
        place, parts = self._place, []
        place.skip()
        while place.text[place.at : place.at + 1] not in ("", "|", ")") and not _RULE.match(place.text, place.at):
            parts.append(self._repeated(self._element()))
        return self._expressions.seq(parts)

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
            return self._expressions.chars([(0, LAST)])
        name = place.take(_NAME)
        if name is None:
            raise place.wrong(f"expected a text, a class of characters, a group or a rule, found {place.text[place.at]!r}")
        return self._expressions.ref(name[0])

    def _group(self) -> Expression:
        place = self._place
        if place.sees("(="):
            raise place.wrong("a look-ahead, (= ...), cannot be used")
        self._depth += 1
        if self._depth > MAX_NESTED:
            raise place.wrong(f"more than {MAX_NESTED} groups in each other")
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
                    raise place.wrong(f"nothing can be repeated more than {MAX_TIMES} times")
                least = int(found[1] or 0)
                most = least if not found[2] else int(found[3]) if found[3] else None
            elif place.sees("{") or found is not None:
                raise place.wrong("expected a number of times: {2}, {2,} or {2,5}")
            else:
                least, most = {"*": (0, None), "+": (1, None), "?": (0, 1)}[place.text[place.at]]
                place.at += 1
            if most is not None and most < least:
                raise place.wrong(f"{{{least},{most}}} is no range")
            if max(least, most or 0) > MAX_TIMES:
                raise place.wrong(f"nothing can be repeated more than {MAX_TIMES} times")
            form = self._expressions.rep(form, least, most)
            place.skip()
        return form

    def _text(self) -> Expression:
        place, codes = self._place, []
        place.at += 1
        while not place.sees('"'):
            codes.append(self._code('"'))
        place.at += 1
        return self._expressions.seq([self._expressions.chars([(code, code)]) for code in codes])

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
        form = self._expressions.chars(complement(ranges) if others else ranges)
        if form is self._expressions.nothing:
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


def read_ebnf(text: str, expressions: Expressions) -> dict[str, Expression]:
    """The rules by name; every rule that is named in one exists, and one of them is `root`."""
    reader = _EbnfReader(text, expressions)
    reader.read()
    rules = reader.rules
    if ROOT not in rules:
        raise GrammarError(f"the EBNF has no rule {ROOT!r}, with which a text begins")
    for name, form in rules.items():
        for other in sorted(form.names):
            if other not in rules:
                raise GrammarError(f"rule {name!r} of the EBNF names a rule {other!r} that there is not")
    return rules
