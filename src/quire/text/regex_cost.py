"""Bounds on what a tokenizer may cost, computed from tokenizer.json before it runs.

The `tokenizers` library matches regular expressions by backtracking (Oniguruma): `(x+x+)+y` takes exponential time on a row of
x, and gives up after ten million steps. A pattern that is accepted as cheap takes at most about n steps at each of a text's
n characters.

Its stages can also grow a text without bound: a chain of 40 normalizers that each double an "a" makes a terabyte of one
character, and the library would not end, or abort the process.
"""

import base64
import binascii
import math
import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from quire.files.reading import error_summary, shown
from quire.types.errors import ModelError

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


# ---- stages of a tokenizer

MAX_GROWTH = 1 << 20  # of a text, before it cannot be tokenized at all
MAX_ADDED_TOKENS = 4096  # that a post-processor puts around a text
UNICODE_REPLACEMENT_BYTES = 64  # of the longest replacement in Unicode's own tables of equivalents
_CHILDREN = ("normalizers", "pretokenizers", "processors", "decoders")
_PROPERTY = re.compile(r"\\[pP](\{\^?\w+\}|\w)")  # a class of characters that Python's parser does not know


class _Stages(msgspec.Struct):
    """Read the stages of a tokenizer.json. The vocabulary, which may have megabytes, is skipped."""

    normalizer: Any = None
    pre_tokenizer: Any = None
    post_processor: Any = None
    decoder: Any = None


def check_stages(path: Path, content: bytes) -> None:
    """Raise ModelError if the stages in a tokenizer.json can make a text longer by more than MAX_GROWTH."""
    try:
        stages = msgspec.json.decode(content, type=_Stages)
    except RecursionError as error:
        raise ModelError(f"{path}: cannot be read as JSON ({error_summary(error)})") from error
    except (msgspec.DecodeError, UnicodeDecodeError):
        return  # the library reports what is wrong
    for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        stage = getattr(stages, name)
        if growth_of(stage) > MAX_GROWTH:
            raise ModelError(f"{path}: {name} must not make a text more than {MAX_GROWTH:,} times as long; its stages can")
    for expression in patterns_of(stages.decoder):  # answers are decoded on the event loop
        if not is_cheap(expression):
            raise ModelError(f"{path}: decoder must have no regular expression that may backtrack; got {shown(expression)}")
    added = added_tokens(stages.post_processor)
    if added > MAX_ADDED_TOKENS:
        raise ModelError(f"{path}: post_processor must add at most {MAX_ADDED_TOKENS:,} tokens to a text; got {added:,}")


def flat_stages(stage: Any) -> Iterable[Mapping[str, Any]]:
    """Yield the stages of a section of tokenizer.json, those of sequences one by one."""
    left = [stage]
    while left:
        stage = left.pop()
        if not isinstance(stage, Mapping):
            continue
        children = [child for name in _CHILDREN if isinstance(stage.get(name), list) for child in stage[name]]
        left += reversed(children)
        if not children:
            yield stage


def growth_of(stage: Any) -> float:
    """Return how many times as long a text can become, at most."""
    growth = 1.0
    for each in flat_stages(stage):
        growth *= _growth(each)
    return growth


def patterns_of(stage: Any) -> Iterable[str]:
    """Yield the regular expressions of a section's stages."""
    for each in flat_stages(stage):
        expression = _table(each.get("pattern")).get("Regex")
        if isinstance(expression, str):
            yield expression


def added_tokens(stage: Any) -> int:
    """Return how many tokens a post-processor adds to a text."""
    added = 0
    for each in flat_stages(stage):
        tokens = _table(each.get("special_tokens"))
        names = [_table(piece.get("SpecialToken")).get("id") for piece in _template(each)]
        ids = [_table(tokens.get(name)).get("ids") for name in names if isinstance(name, str)]
        added = added * _growth(each) + sum(len(some) for some in ids if isinstance(some, list))
        if added > MAX_ADDED_TOKENS:
            break
    return added


def _growth(stage: Mapping[str, Any]) -> int:
    """By the stage's fields: the library recognizes a stage without a type by them."""
    if "content" in stage and "pattern" in stage:
        return _replacement_growth(stage["pattern"], stage["content"])
    if "precompiled_charsmap" in stage:
        return max(1, math.ceil(_longest_replacement(stage["precompiled_charsmap"]) / UNICODE_REPLACEMENT_BYTES))
    if stage.get("type") == "ByteLevel" or "trim_offsets" in stage:
        return 2  # every byte becomes a character, and the next such stage makes two of it
    return max(1, sum("Sequence" in piece for piece in _template(stage)))


def _replacement_growth(pattern: Any, content: Any) -> int:
    if not isinstance(pattern, Mapping) or not isinstance(content, str):
        return 1
    text, expression = pattern.get("String"), pattern.get("Regex")
    shortest = len(text) if isinstance(text, str) else _shortest_match(expression) if isinstance(expression, str) else 1
    return max(1, math.ceil(len(content) / shortest)) if shortest else 1 + len(content)


def _shortest_match(expression: str) -> int:
    """Characters; 0 if the expression cannot be understood."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return int(re._parser.parse(_PROPERTY.sub(r"\\w", expression)).getwidth()[0])  # type: ignore[attr-defined]
    except (re.error, RecursionError, OverflowError, ValueError):
        return 0


def _longest_replacement(table: Any) -> int:
    """Bytes of the longest text in SentencePiece's table: the length of an index, the index, texts that end with zeros."""
    try:
        data = base64.b64decode(table) if isinstance(table, str) else b""
    except (binascii.Error, ValueError):
        return 0
    return max(map(len, data[4 + int.from_bytes(data[:4], "little") :].split(b"\0")))


def _template(stage: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    parts = stage.get("single")
    return [piece for piece in parts if isinstance(piece, Mapping)] if isinstance(parts, list) else []


def _table(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
