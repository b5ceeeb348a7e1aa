"""What the texts of two expressions have to do with each other, found by walking through both at once."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import or_

from quire.grammar.forms import Alt, Chars, Expression, Ranges, Rep, Seq

MOST_COPIES = 4  # a part that may be repeated more often is taken to be repeated without end


class Alphabet:
    """Sets of characters as bits: one for every piece of the code points that no set in use cuts through."""

    def __init__(self, sets: Iterable[Ranges]) -> None:
        cuts = sorted({cut for ranges in sets for low, high in ranges for cut in (low, high + 1)})
        self._number = {cut: i for i, cut in enumerate(cuts)}
        self._bits: dict[Ranges, int] = {}

    def bits(self, ranges: Ranges) -> int:
        if ranges not in self._bits:
            spans = ((self._number[low], self._number[high + 1]) for low, high in ranges)
            self._bits[ranges] = sum((1 << end) - (1 << begin) for begin, end in spans)
        return self._bits[ranges]


def first_bytes(ranges: Ranges) -> int:
    """The first bytes of these characters in UTF-8, as bits."""
    return reduce(or_, ((2 << _first_byte(high)) - (1 << _first_byte(low)) for low, high in ranges), 0)


@dataclass
class Automaton:
    """Of an expression without names that is not empty: a place for every set of characters in it."""

    bits: list[int] = field(default_factory=list)  # [places] what is read to get there
    bytes: list[int] = field(default_factory=list)  # [places] its first bytes
    after: list[set[int]] = field(default_factory=list)  # [places] the places that may be next
    first: list[int] = field(default_factory=list)
    last: set[int] = field(default_factory=set)  # where a text may end


def automaton(form: Expression, alphabet: Alphabet) -> Automaton:
    """It may accept more than the expression where that repeats something often."""
    made = Automaton()
    made.first, last, _ = _build(form, made, alphabet)
    made.last = set(last)
    return made


def _build(form: Expression, made: Automaton, alphabet: Alphabet) -> tuple[list[int], list[int], bool]:
    """-> the places where it may begin and end, and whether it may be empty."""
    match form:
        case Chars():
            made.bits.append(alphabet.bits(form.ranges))
            made.bytes.append(first_bytes(form.ranges))
            made.after.append(set())
            return [len(made.bits) - 1], [len(made.bits) - 1], False
        case Alt():
            built = [_build(part, made, alphabet) for part in form.parts]
            return [i for b in built for i in b[0]], [i for b in built for i in b[1]], any(b[2] for b in built)
        case Seq():
            return _chain([_build(part, made, alphabet) for part in form.parts], made)
        case Rep():
            endless = form.most is None or form.most > MOST_COPIES
            copies = 1 if endless else form.most or 1
            built = [_build(form.part, made, alphabet) for _ in range(copies)]
            if endless:
                _link(built[0][1], built[0][0], made)
            least = 1 if endless and form.least else form.least
            return _chain([(b[0], b[1], b[2] or i >= least) for i, b in enumerate(built)], made)
    raise ValueError(form)


def _chain(built: Sequence[tuple[list[int], list[int], bool]], made: Automaton) -> tuple[list[int], list[int], bool]:
    first: list[int] = []
    last: list[int] = []
    nullable = True
    for begin, end, empty in built:
        _link(last, begin, made)
        first = [*first, *begin] if nullable else first
        last = [*last, *end] if empty else end
        nullable = nullable and empty
    return first, last, nullable


def _link(ends: Iterable[int], begins: Iterable[int], made: Automaton) -> None:
    for place in ends:
        made.after[place].update(begins)


@dataclass(frozen=True)
class Meeting:
    """Of a text of one expression and a beginning of a text of another that are the same."""

    equal: bool  # some text is one of both
    more: int  # first bytes of what may follow it, in the other one, as bits
    work: int


def meet(one: Automaton, other: Automaton) -> Meeting:
    todo = [(i, j) for i in one.first for j in other.first if one.bits[i] & other.bits[j]]
    seen = set(todo)
    equal, more, work = False, 0, len(todo)
    while todo:
        i, j = todo.pop()
        if i in one.last:
            equal = equal or j in other.last
            more |= reduce(or_, (other.bytes[k] for k in other.after[j]), 0)
        for a in one.after[i]:
            for b in other.after[j]:
                work += 1
                if one.bits[a] & other.bits[b] and (a, b) not in seen:
                    seen.add((a, b))
                    todo.append((a, b))
    return Meeting(equal, more, work)


def _first_byte(code: int) -> int:
    return chr(code).encode()[0]
