"""Whether a tokenizer's regular expression is matched in little time, whatever the text is.

The `tokenizers` library matches by backtracking (Oniguruma): `(x+x+)+y` takes exponential time on a row of x, and gives up
after ten million steps. What is found here to be cheap takes at most about n steps at each of a text's n characters.
"""

import re
from dataclasses import dataclass, field

MAX_CHOICES = 6  # optional parts and alternations that one alternative may have: each can double the work
MAX_FAILING = 1  # quantifiers without a bound that a later part can make try again
SHORT_RANGE = 16  # {2,18} is a choice; a wider range counts as unbounded
_QUANTIFIER = re.compile(r"([*+?]|\{(\d*)(,?)(\d*)\})([?+]?)")
_ESCAPE = re.compile(r"\\(?:[pP](?:\{\^?\w+\}|\w)|x[0-9a-fA-F]{2}|x\{[0-9a-fA-F ]+\}|u[0-9a-fA-F]{4}|[^1-9kgKQERXN])")
_GROUP = re.compile(r"\((?:\?(?:[im-]*:|[=!>]|<[=!]|<[A-Za-z]\w*>))?")
_FLAGS = re.compile(r"\(\?[im-]+\)")


class _Unknown(Exception):
    """The expression has something that is not understood here."""


@dataclass
class _Cost:
    """Of one alternative. `failing`: quantifiers without a bound that a later part can make try again; `trailing`: those
    without such a part; `choices`: optional parts and alternations."""

    failing: int = 0
    trailing: int = 0
    choices: int = 0

    @property
    def fixed(self) -> bool:
        return not (self.failing or self.trailing or self.choices)


@dataclass
class _Group:
    current: _Cost = field(default_factory=_Cost)
    done: list[_Cost] = field(default_factory=list)

    def cost(self) -> _Cost:
        """Of the worst alternatives; one more choice where there are several."""
        costs = [*self.done, self.current]
        worst = _Cost(*(max(getattr(cost, name) for cost in costs) for name in ("failing", "trailing", "choices")))
        worst.choices += len(costs) > 1
        return worst


def is_cheap(expression: str) -> bool:
    """Return whether matching cannot take long. False also for what is not understood."""
    try:
        worst = _worst(expression)
    except _Unknown:
        return False
    return worst.failing <= MAX_FAILING and worst.choices <= MAX_CHOICES


def _worst(expression: str) -> _Cost:
    groups, at = [_Group()], 0
    while at < len(expression):
        character = expression[at]
        if character == "(":
            if (flags := _FLAGS.match(expression, at)) is not None:
                at = flags.end()
                continue
            opening = _GROUP.match(expression, at)
            if opening is None or expression[opening.end() : opening.end() + 1] in ("?", "*"):
                raise _Unknown
            groups.append(_Group())
            at = opening.end()
        elif character == "|":
            groups[-1].done.append(groups[-1].current)
            groups[-1].current = _Cost()
            at += 1
        else:
            inside = _Cost()
            if character == ")":
                if len(groups) == 1:
                    raise _Unknown
                inside = groups.pop().cost()
            end = _skip_atom(expression, at)
            at = _add(groups[-1].current, inside, expression, end)
    if len(groups) > 1:
        raise _Unknown
    # only the number of choices within one alternative matters: alternatives of the whole are tried one after the other
    costs = [*groups[0].done, groups[0].current]
    return _Cost(max(cost.failing for cost in costs), 0, max(cost.choices for cost in costs))


def _skip_atom(expression: str, at: int) -> int:
    """Return where a character, an escape or a class ends."""
    character = expression[at]
    if character == "\\":
        escape = _ESCAPE.match(expression, at)
        if escape is None:
            raise _Unknown
        return escape.end()
    if character == "[":
        return _skip_class(expression, at)
    if character in "*+?":
        raise _Unknown
    return at + 1


def _skip_class(expression: str, at: int) -> int:
    depth = 0
    while at < len(expression):
        if expression.startswith(("[]", "[^]"), at):
            raise _Unknown
        if expression[at] == "\\":
            escape = _ESCAPE.match(expression, at)
            if escape is None:
                raise _Unknown
            at = escape.end()
            continue
        depth += (expression[at] == "[") - (expression[at] == "]")
        at += 1
        if not depth:
            return at
    raise _Unknown


def _add(cost: _Cost, inside: _Cost, expression: str, at: int) -> int:
    """Add an atom that ends at `at`, with its quantifier, to its alternative. Return where the quantifier ends."""
    least, most, at = _read_quantifier(expression, at)
    if most > 1 and not inside.fixed:
        raise _Unknown  # a repetition of what can match in several ways
    if least:
        cost.failing, cost.trailing = cost.failing + cost.trailing, 0
    cost.failing += inside.failing
    cost.trailing += inside.trailing
    cost.choices += inside.choices
    if most - least > SHORT_RANGE:
        cost.trailing += 1
    elif most > least:
        cost.choices += 1
    return at


def _read_quantifier(expression: str, at: int) -> tuple[int, int, int]:
    """Return the least and most repetitions, and where the quantifier ends."""
    found = _QUANTIFIER.match(expression, at)
    if found is None or found[1] in ("{}", "{,}"):
        return 1, 1, at
    following = _QUANTIFIER.match(expression, found.end())
    if (following is not None and following[1] != "{}") or (found[1][0] == "{" and found[5] == "+"):
        raise _Unknown  # a quantifier of a quantifier
    if found[1][0] != "{":
        least, most = {"*": (0, 1 << 30), "+": (1, 1 << 30), "?": (0, 1)}[found[1]]
        return least, most, found.end()
    least = int(found[2] or 0)
    most = least if not found[3] else int(found[4]) if found[4] else 1 << 30
    return least, most, found.end()
