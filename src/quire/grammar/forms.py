"""Expressions of a grammar: sets of characters, sequences, alternatives, repetitions and names of rules.

Equal expressions are one object, so they are compared and remembered by identity, and what many rules share is kept once.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

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
        told = tidy(ranges)
        if not told:
            return self.nothing
        return self._make((Chars, told), lambda: Chars(1, 1, False, frozenset(), told))

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
        told = tuple(parts)
        return self._make((Seq, *map(id, told)), lambda: Seq(*_sums(told), all(p.nullable for p in told), _names(told), told))

    def alt(self, parts: Sequence[Expression]) -> Expression:
        flat = [inner for part in parts for inner in (part.parts if isinstance(part, Alt) else (part,))]
        single = [part for part in flat if isinstance(part, Chars)]
        if len(single) > 1:
            flat = [self.chars(r for part in single for r in part.ranges), *(p for p in flat if not isinstance(p, Chars))]
        told = tuple(dict.fromkeys(flat))
        if len(told) == 1:
            return told[0]
        return self._make((Alt, *map(id, told)), lambda: Alt(*_sums(told), any(p.nullable for p in told), _names(told), told))

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
