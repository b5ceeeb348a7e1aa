"""EBNF → Lark, so that exactly the same texts are accepted.

The library reads a text in two layers: a lexer takes the longest terminal that may come, and rules are made of terminals. EBNF
knows one layer. So a part of a grammar becomes a terminal only where taking the longest can do no harm; what is left are rules,
down to single characters if need be. A grammar without recursion is one terminal, and a terminal is fast.

Taking the longest does harm to a terminal T if a text of it may go on as a terminal that is possible at the same place (T
itself, or another) with a byte with which something may begin that follows T. Terminals are possible at the same place if they
follow the same terminal, or two that share a text.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import or_

from quire.features.structured.grammar.backend import GrammarError
from quire.features.structured.grammar.ebnf import (
    ROOT,
    Alt,
    Chars,
    Expression,
    Expressions,
    Ranges,
    Ref,
    Rep,
    Seq,
    read_ebnf,
    times,
    to_regex,
)

MAX_COPIES = 4  # a part that may be repeated more often is taken to be repeated without end


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
            endless = form.most is None or form.most > MAX_COPIES
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


MAX_SIZE = 20_000  # of a terminal
MAX_DEPTH = 60
MAX_WORK = 400_000  # steps, to find out what terminals have to do with each other; some 0.2 s
MAX_ROUNDS = 4  # in which what does harm is taken apart step by step; then at once
MAX_INLINE = 12  # larger parts that are no terminals get a rule of their own
START = "start"
WHOLE = "root and its end"  # no rule of a user has blanks in its name


def ebnf_to_lark(text: str, ends: Sequence[str] = ()) -> str:
    """One of `ends`, if there are any, comes behind every text of the grammar."""
    expressions = Expressions()
    try:
        rules = read_ebnf(text, expressions)
        root = expressions.ref(ROOT)
        rules[WHOLE] = expressions.seq([root, expressions.alt([expressions.text(end) for end in ends])]) if ends else root
        rules = simplify(rules, expressions)
        if rules[WHOLE] is expressions.nothing:
            raise GrammarError("no text fits this grammar: its rules name each other without end")
        return _Translation(expressions, rules).lark()
    except RecursionError:
        raise GrammarError("the grammar is nested too deeply") from None


# ---- rules without recursion are written out where they are named


def simplify(rules: dict[str, Expression], expressions: Expressions) -> dict[str, Expression]:
    """The same rules. What is left of names in them are rules with recursion, and those too large to be written out."""
    groups = components(rules)
    done: dict[str, Expression] = {}
    written = dict.fromkeys(endless(rules, groups), expressions.nothing)  # those that may be written out
    for group in groups:
        for name in group:
            form = replace(rules[name], written, expressions)
            if name in form.names and len(group) == 1:
                form = as_repetition(name, form, expressions)
            done[name] = form
            if not form.names and form.size <= MAX_SIZE and form.depth <= MAX_DEPTH:
                written[name] = form
    return done


def endless(rules: dict[str, Expression], groups: Sequence[Sequence[str]]) -> set[str]:
    """The rules without a text: they name each other and never come to an end."""
    left = set(rules)
    for group in groups:
        before = -1
        while len(left) != before:
            before = len(left)
            left -= {name for name in group if name in left and _ends(rules[name], left)}
    return left


def _ends(form: Expression, endless: set[str]) -> bool:
    match form:
        case Ref():
            return form.name not in endless
        case Seq():
            return all(_ends(part, endless) for part in form.parts)
        case Alt():
            return any(_ends(part, endless) for part in form.parts)
        case Rep():
            return not form.least or _ends(form.part, endless)
    return True


def as_repetition(name: str, form: Expression, expressions: Expressions) -> Expression:
    """`a ::= x | y a` is `y* x`, and `a ::= x | a y` is `x y*`. Other rules stay what they are."""
    alternatives = form.parts if isinstance(form, Alt) else (form,)
    for side in (-1, 0):
        again, others = [], []
        for alternative in alternatives:
            parts = alternative.parts if isinstance(alternative, Seq) else (alternative,)
            if parts and isinstance(parts[side], Ref) and name in parts[side].names:
                again.append(expressions.seq(parts[:-1] if side else parts[1:]))
            else:
                others.append(alternative)
        if not any(name in part.names for part in (*again, *others)):
            loop, once = expressions.rep(expressions.alt(again), 0, None), expressions.alt(others)
            return expressions.seq([loop, once] if side else [once, loop])
    return form


def replace(form: Expression, written: dict[str, Expression], expressions: Expressions) -> Expression:
    if form.names.isdisjoint(written):
        return form
    match form:
        case Ref():
            return written[form.name]
        case Seq():
            return expressions.seq([replace(part, written, expressions) for part in form.parts])
        case Alt():
            return expressions.alt([replace(part, written, expressions) for part in form.parts])
        case Rep():
            return expressions.rep(replace(form.part, written, expressions), form.least, form.most)
    return form


def components(rules: dict[str, Expression]) -> list[list[str]]:
    """Rules that name each other, directly or not, together; before those that name them. (Tarjan, without recursion.)"""
    names = {name: [other for other in sorted(form.names) if other in rules] for name, form in rules.items()}
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    on_stack: set[str] = set()
    out: list[list[str]] = []
    for root in names:
        work = [(root, iter(names[root]))] if root not in index else []
        while work:
            name, others = work[-1]
            if name not in index:
                index[name] = low[name] = len(index)
                stack.append(name)
                on_stack.add(name)
            for other in others:
                if other not in index:
                    work.append((other, iter(names[other])))
                    break
                if other in on_stack:
                    low[name] = min(low[name], low[other])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[name])
                if low[name] == index[name]:
                    cut = stack.index(name)
                    group, stack = stack[cut:], stack[:cut]
                    on_stack.difference_update(group)
                    out.append(group)
    return out


# ---- what becomes a terminal


class _Translation:
    """`opened` are expressions that may not be terminals; those are added that do harm as one, until none does."""

    def __init__(self, expressions: Expressions, rules: dict[str, Expression]) -> None:
        self._expressions, self._rules = expressions, rules
        self._opened: set[Expression] = set()
        self._all_open = False
        self._automata: dict[Expression, Automaton] = {}
        self._meetings: dict[tuple[Expression, Expression], Meeting] = {}
        self._alphabet = Alphabet(form.ranges for form in inside(rules.values()) if isinstance(form, Chars))
        self._work = 0

    def lark(self) -> str:
        made = self._divide()
        rounds = 0
        while harmful := self._find_harmful(made):
            rounds += 1
            self._opened.update(harmful if rounds < MAX_ROUNDS else inside(harmful))
            self._all_open = self._all_open or rounds > 2 * MAX_ROUNDS
            made = self._divide()
        return made.lark()

    # ---- dividing the grammar into rules and terminals

    def _divide(self) -> "_Divided":
        made = _Divided()
        self._to_do = [WHOLE]
        names = {WHOLE: START}
        parts: dict[Expression, str] = {}

        def named(name: str) -> Expression:
            if name not in names:
                names[name] = f"rule{len(names)}"
                self._to_do.append(name)
            return self._expressions.ref(names[name])

        def build(form: Expression) -> Expression:
            terminal = self._terminal(form)
            if terminal is not None:
                reference = self._expressions.ref(made.terminal(terminal))
                return self._expressions.rep(reference, 0, 1) if form.nullable else reference
            match form:
                case Ref():
                    return named(form.name)
                case Rep():
                    return self._expressions.rep(part(form.part), form.least, form.most)
                case Seq():
                    return self._expressions.seq([part(inner) for inner in self._neighbours(form)])
                case Alt():
                    return self._expressions.alt([part(inner) for inner in self._neighbours(form)])
            return form

        def part(form: Expression) -> Expression:
            """A large one that many may share gets a name."""
            if form.size <= MAX_INLINE or form.names or self._terminal(form) is not None:
                return build(form)
            if form not in parts:
                parts[form] = f"part{len(parts)}"
                made.rules[parts[form]] = build(form)
            return self._expressions.ref(parts[form])

        while self._to_do:
            name = self._to_do.pop()
            made.rules[names[name]] = build(self._rules[name])
        return made

    def _terminal(self, form: Expression) -> Expression | None:
        """The terminal that this expression is where it is not empty; None: it is made of several."""
        if form.names or form is self._expressions.empty:
            return None
        filled = self._expressions.filled(form)
        if isinstance(filled, Chars):
            return filled
        if self._all_open or filled in self._opened or filled.size > MAX_SIZE or filled.depth > MAX_DEPTH:
            return None
        return filled

    def _neighbours(self, form: Seq | Alt) -> Sequence[Expression]:
        """The parts, those together that can be one terminal."""
        if isinstance(form, Alt):
            simple = [inner for inner in form.parts if not inner.names]
            joined = self._expressions.alt(simple)
            together = len(simple) > 1 and self._terminal(joined) is not None
            return [joined, *(inner for inner in form.parts if inner.names)] if together else form.parts
        out: list[Expression] = []
        run: list[Expression] = []
        for inner in (*form.parts, None):
            if inner is not None and not inner.names:
                run.append(inner)
                continue
            joined = self._expressions.seq(run)
            out += [joined] if len(run) > 1 and self._terminal(joined) is not None else run
            run = []
            out += [] if inner is None else [inner]
        return out

    # ---- where taking the longest does harm

    def _find_harmful(self, made: "_Divided") -> set[Expression]:
        terminals = made.terminals
        begin, follow = made.neighbours()
        before = [sum(1 << k for k, row in enumerate(follow) if row >> i & 1) for i in range(len(terminals))]
        harmful: set[Expression] = set()
        for i, one in enumerate(terminals):
            following = 0
            for k in _each(follow[i]):
                following |= self._first_bytes(terminals[k])
            for j, other in enumerate(terminals):
                if not following or other in harmful or isinstance(other, Chars):
                    continue
                if not following & self._meet(one, other).more:
                    continue
                if (begin >> i & begin >> j & 1) or self._share(before[i], before[j], terminals):
                    harmful.add(other)
                if self._work > MAX_WORK:
                    self._all_open = True
                    return {self._expressions.empty}
        return harmful

    def _share(self, some: int, others: int, terminals: Sequence[Expression]) -> bool:
        """Is there one in both sets, or one in each that have a text in common?"""
        if some & others:
            return True
        return any(self._meet(terminals[i], terminals[j]).equal for i in _each(some) for j in _each(others))

    def _meet(self, one: Expression, other: Expression) -> Meeting:
        key = one, other
        if key not in self._meetings:
            found = self._meetings[key] = meet(self._automaton(one), self._automaton(other))
            self._work += found.work + 1
        return self._meetings[key]

    def _automaton(self, form: Expression) -> Automaton:
        if form not in self._automata:
            made = self._automata[form] = automaton(form, self._alphabet)
            self._work += sum(map(len, made.after))
        return self._automata[form]

    def _first_bytes(self, form: Expression) -> int:
        made, out = self._automaton(form), 0
        for place in made.first:
            out |= made.bytes[place]
        return out


@dataclass(frozen=True)
class _Edges:
    """Where texts of an expression begin and end: terminals, as bits."""

    empty: bool = False  # it may be
    first: int = 0
    last: int = 0


@dataclass
class _Divided:
    """A grammar of rules, whose expressions name rules and terminals and nothing else."""

    rules: dict[str, Expression] = field(default_factory=dict)
    terminals: list[Expression] = field(default_factory=list)
    _numbers: dict[Expression, int] = field(default_factory=dict)

    def terminal(self, form: Expression) -> str:
        """-> its name."""
        if form not in self._numbers:
            self._numbers[form] = len(self.terminals)
            self.terminals.append(form)
        return f"T{self._numbers[form]}"

    def lark(self) -> str:
        rules = [f"{name}: {_to_lark(form)}" for name, form in self.rules.items()]
        return "\n".join([*rules, *(f"T{i}: /{to_regex(form)}/" for i, form in enumerate(self.terminals))])

    def neighbours(self) -> tuple[int, list[int]]:
        """-> the terminals that begin a text, and for each those that may follow it."""
        edges = dict.fromkeys(self.rules, _Edges())
        edges |= {f"T{i}": _Edges(False, 1 << i, 1 << i) for i in range(len(self.terminals))}
        follow = [0] * len(self.terminals)
        for group in components(self.rules):
            known: list[_Edges] = []
            while known != (now := [edges[name] for name in group]):
                known = now
                for name in group:
                    edges[name] = _edges(self.rules[name], edges, follow)
        return edges[START].first, follow


def _edges(form: Expression, edges: dict[str, _Edges], follow: list[int]) -> _Edges:
    match form:
        case Ref():
            return edges[form.name]
        case Alt():
            found = [_edges(part, edges, follow) for part in form.parts]
            first, last = reduce(or_, (e.first for e in found), 0), reduce(or_, (e.last for e in found), 0)
            return _Edges(any(e.empty for e in found), first, last)
        case Seq():
            whole = _Edges(True)
            for part in form.parts:
                whole = _join(whole, _edges(part, edges, follow), follow)
            return whole
        case Rep():
            once = _edges(form.part, edges, follow)
            if form.most != 1:
                _join(once, once, follow)
            return _Edges(once.empty or not form.least, once.first, once.last)
    raise ValueError(form)


def _join(one: _Edges, other: _Edges, follow: list[int]) -> _Edges:
    for i in _each(one.last):
        follow[i] |= other.first
    first = one.first | (other.first if one.empty else 0)
    return _Edges(one.empty and other.empty, first, other.last | (one.last if other.empty else 0))


def _to_lark(form: Expression) -> str:
    match form:
        case Ref():
            return form.name
        case Seq():
            return " ".join(f"({_to_lark(p)})" if isinstance(p, Alt) else _to_lark(p) for p in form.parts) or '""'
        case Alt():
            return " | ".join(map(_to_lark, form.parts))
        case Rep():
            inner = _to_lark(form.part) if isinstance(form.part, Ref) else f"({_to_lark(form.part)})"
            return inner + times(form.least, form.most)
    raise ValueError(form)


def inside(expressions: Iterable[Expression]) -> Iterator[Expression]:
    """They and all that they are made of."""
    seen, todo = set(), list(expressions)
    while todo:
        form = todo.pop()
        if form in seen:
            continue
        seen.add(form)
        yield form
        match form:
            case Seq() | Alt():
                todo += form.parts
            case Rep():
                todo.append(form.part)


def _each(bits: int) -> Iterator[int]:
    while bits:
        low = bits & -bits
        yield low.bit_length() - 1
        bits ^= low
