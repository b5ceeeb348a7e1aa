"""One value, JSON's or Python's, read as it comes and written as JSON.

Whatever has been written is the beginning of valid JSON. What models often get wrong and what has one meaning only is put
right: control characters, unknown escapes and halves of surrogate pairs in strings, commas before a bracket, `True`, `False`
and `None`, zeros in front of an integer. A Python set is a list. Anything else raises Malformed.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from quire.text.parse.source import AnswerText, Malformed, Pull, marks_of

Emit = Callable[[str], None]
Strings = Callable[[str], bool]  # must the value of this key be a string?

DEEPEST = 128
LONGEST_SCALAR = 4096
LONGEST_KEY = 256

_SPACE = re.compile(r"[ \t\r\n]+")
_SCALAR = re.compile(r"[-+.\w]+", re.ASCII)
_JSON_SCALAR = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?|true|false|null", re.ASCII)
_PADDED_INTEGER = re.compile(r"([-+]?)0+(\d+)", re.ASCII)
_ARGUMENT_NAME = re.compile(r"[^\W\d][\w.-]*")
_VALUE_BEGINS = "\"'[({]})+-0123456789"
LONGEST_LOOK_AHEAD = 64  # characters after a quote that may end a string
_WORDS = {"True": "true", "False": "false", "None": "null"}
_ALL_WORDS = (*_WORDS, *_WORDS.values())
_PLAIN = {quote: re.compile(rf"[^{quote}\\\x00-\x1f]+") for quote in "\"'"}
_HEX_DIGITS = re.compile(r"[0-9a-fA-F]*")
_LOW_HALF = re.compile(r"\\u[dD][c-fC-F][0-9a-fA-F]{2}")
_LOW_HALF_SIZE = 6
_NO_CHARACTER = "\\ufffd"
_COLON = marks_of(frozenset(":"))
_VALUE_ENDS = marks_of(frozenset(",}]"))
_LONGER_ESCAPES = {"x": 2, "u": 4, "U": 8}
_PYTHON_ESCAPES = {
    "n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0", "\\": "\\", "'": "'", '"': '"',
    "\n": "",
}  # fmt: skip


@dataclass(frozen=True)
class Dialect:
    """`mark`: what strings stand between, as they are. Where there is one, keys need no quotes, and words are strings, too.

    `argument`: the value is an argument of a Python call. Models leave quotes in such strings unescaped, so a quote ends a
    string only if what follows can follow a string there.
    """

    brackets: dict[str, str]  # opening -> closing
    quotes: str
    python: bool = False
    mark: str = ""
    argument: bool = False
    nested: bool = False  # it is in a container


@dataclass(frozen=True)
class _Container:
    """`close`: the bracket that ends it in the text. `written`: the bracket that ends it in JSON."""

    close: str
    written: str

    @property
    def keyed(self) -> bool:
        return self.written == "}"


JSON = Dialect({"{": "}", "[": "]"}, '"')
PYTHON = Dialect({"{": "}", "[": "]", "(": ")"}, "\"'", python=True)
PYTHON_ARGUMENT = replace(PYTHON, argument=True)
_PYTHON_ITEM = replace(PYTHON_ARGUMENT, nested=True)


def marked(mark: str) -> Dialect:
    """{key:<mark>text<mark>,n:1}"""
    return Dialect({"{": "}", "[": "]"}, '"', mark=mark)


def read_value(source: AnswerText, emit: Emit, dialect: Dialect = JSON, strings: Strings | None = None) -> Pull[None]:
    """Exactly one value; spaces inside of it are part of it, those around it are not.

    `strings`: of an object, the members that must be strings; their values are written as such.
    """
    inside: list[_Container] = []
    done = False  # has the next value been read already?
    while True:
        # in front of a value
        opened = None if done else (yield from _begin(source, emit, dialect, dialect.nested or bool(inside)))
        done = False
        if opened is not None:
            container, done = opened
            inside.append(container)
            if len(inside) > DEEPEST:
                raise Malformed(f"values nest more than {DEEPEST} deep")
            if not done:
                yield from _space(source, emit)
                if not (yield from _close(source, emit, inside)):
                    done = container.keyed and (yield from _read_member(source, emit, dialect, strings, inside))
                    continue
            elif container.keyed:
                done = False
                continue
        # after a value
        while inside:
            yield from _space(source, emit)
            if (yield from _close(source, emit, inside)):
                continue
            if (yield from _next_item(source, emit, inside)):
                done = inside[-1].keyed and (yield from _read_member(source, emit, dialect, strings, inside))
                break
        else:
            return


def collect_value(source: AnswerText, dialect: Dialect = JSON) -> Pull[str]:
    """The whole value, as JSON."""
    chunks: list[str] = []
    yield from read_value(source, chunks.append, dialect)
    return "".join(chunks)


def reread_value(source: AnswerText, text: str, dialect: Dialect = JSON, strings: Strings | None = None) -> Pull[str]:
    """Text that `source` gave, read as exactly one value, as JSON."""
    own, chunks = AnswerText(), list[str]()
    own.add(text)
    own.complete = True
    for _ in read_value(own, chunks.append, dialect, strings):
        own.show()
        yield from source.pause()
    if own.at != len(own.text) or own.hides:
        raise Malformed("more than a value")
    return "".join(chunks)


def read_string(source: AnswerText) -> Pull[str]:
    """A JSON string, decoded."""
    if (yield from source.peek()) != '"':
        raise Malformed("expected a string")
    return str(json.loads((yield from collect_value(source))))


def escape(text: str) -> str:
    """Text as it stands between the quotes of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def read_as_string(source: AnswerText, emit: Emit, dialect: Dialect = JSON) -> Pull[bool]:
    """Write a value that is no string as a string of its text. False: a string follows, or null, which is left to be read."""
    char = yield from source.peek()
    if not char or char in dialect.quotes or (dialect.mark and dialect.mark.startswith(char)):
        return False
    if char in dialect.brackets:
        emit(json.dumps((yield from collect_value(source, dialect)), ensure_ascii=False))
        return True
    word = yield from _peek_word(source)
    if word in ("null", "None") or (_json_scalar(word) or _padded_integer(word) or _python_number(word)) is None:
        return False
    source.take(len(word))
    emit(f'"{word}"')
    return True


def _read_member(
    source: AnswerText, emit: Emit, dialect: Dialect, strings: Strings | None, inside: list[_Container]
) -> Pull[bool]:
    """Read a key, and the value too if it must be a string and is written as something else (True)."""
    if strings is None or len(inside) > 1:
        yield from _read_key(source, emit, dialect)
        return False
    chunks: list[str] = []

    def note(piece: str) -> None:
        chunks.append(piece)
        emit(piece)

    yield from _read_key(source, note, dialect)
    key = json.loads("".join(chunks).rstrip().removesuffix(":"))
    return strings(key) and (yield from read_as_string(source, emit, dialect))


def _begin(source: AnswerText, emit: Emit, dialect: Dialect, nested: bool) -> Pull[tuple[_Container, bool] | None]:
    """Reads a scalar or a string, or opens a container: is its first key (of a list: its first value) read?"""
    if dialect.mark and (yield from source.literal(dialect.mark)):
        yield from _read_between_marks(source, emit, dialect.mark)
        return None
    char = yield from source.peek()
    if not char:
        raise Malformed("the value is missing")
    if char in dialect.brackets:
        source.take(1)
        if char == "{" and dialect.python:
            return (yield from _open_braces(source, emit, dialect))
        emit("{" if char == "{" else "[")
        return _Container(dialect.brackets[char], "}" if char == "{" else "]"), False
    if char in dialect.quotes:
        yield from _read_quoted(source, emit, dialect, nested)
    elif dialect.mark:
        emit((yield from _read_word(source)))
    else:
        emit((yield from _read_scalar(source, dialect)))
    return None


def _open_braces(source: AnswerText, emit: Emit, dialect: Dialect) -> Pull[tuple[_Container, bool]]:
    """A Python dict, with its first key, or a set, with its first item."""
    yield from source.space()
    char = yield from source.peek()
    if char == "}":
        emit("{")
        return _Container("}", "}"), False
    if char in dialect.brackets:
        raise Malformed("a key or an item of a set is no container")
    first = yield from collect_value(source, _PYTHON_ITEM if dialect.argument else dialect)
    yield from source.space()
    if not (yield from source.literal(":")):
        emit("[" + first)
        return _Container("}", "]"), True
    emit("{" + (first if first.startswith('"') else f'"{first}"') + ":")
    yield from _space(source, emit)
    return _Container("}", "}"), True


def _close(source: AnswerText, emit: Emit, inside: list[_Container]) -> Pull[bool]:
    if not (yield from source.literal(inside[-1].close)):
        return False
    emit(inside.pop().written)
    return True


def _next_item(source: AnswerText, emit: Emit, inside: list[_Container]) -> Pull[bool]:
    """Is there one more? A comma in front of the closing bracket is left out."""
    yield from source.expect(",")
    gap: list[str] = [","]
    yield from _space(source, gap.append)
    if (yield from source.peek()) == inside[-1].close:
        return False
    emit("".join(gap))
    return True


def read_bare_key(source: AnswerText, dialect: Dialect) -> Pull[str]:
    """A key in front of a colon, which is taken: between marks, or as it is."""
    key = (yield from source.until(_COLON, LONGEST_KEY)).strip()
    if key.startswith(dialect.mark) and key.endswith(dialect.mark) and len(key) >= 2 * len(dialect.mark):
        key = key[len(dialect.mark) : len(key) - len(dialect.mark)]
    elif not key or any(char in key for char in "{}[],"):
        raise Malformed(f"{key!r:.40} is no key")
    yield from source.expect(":")
    return key


def _read_key(source: AnswerText, emit: Emit, dialect: Dialect) -> Pull[None]:
    char = yield from source.peek()
    if char and char in dialect.quotes:
        yield from _read_quoted(source, emit, dialect, nested=True)
    elif dialect.mark:
        emit(f'"{escape((yield from read_bare_key(source, dialect)))}":')
        yield from _space(source, emit)
        return
    elif dialect.python:
        emit('"' + (yield from _read_scalar(source, dialect)) + '"')
    else:
        raise Malformed("expected a key in quotes")
    yield from _space(source, emit)
    yield from source.expect(":")
    emit(":")
    yield from _space(source, emit)


def _space(source: AnswerText, emit: Emit) -> Pull[None]:
    while True:
        found = source.run(_SPACE)
        if found:
            emit(found)
        if source.at < len(source.text) or not (yield from source.more()):
            return


def _read_scalar(source: AnswerText, dialect: Dialect) -> Pull[str]:
    """It is taken only if it is one: what is wrong stays to be read."""
    word = yield from _peek_word(source)
    value = _json_scalar(word) or _padded_integer(word)
    if value is None and dialect.python:
        value = _python_number(word)
    if value is None:
        raise Malformed(f"{word!r:.40} is no value")
    source.take(len(word))
    return value


def _peek_word(source: AnswerText) -> Pull[str]:
    """The word or number that comes next; it is not taken."""
    while True:
        found = _SCALAR.match(source.text, source.at)
        word = "" if found is None else found.group()
        if len(word) > LONGEST_SCALAR:
            raise Malformed("a number is too long")
        if source.at + len(word) < len(source.text) or not (yield from source.more()):
            return word


def _read_word(source: AnswerText) -> Pull[str]:
    """A number or one of JSON's words; anything else is a string, up to what ends a value."""
    word = (yield from source.until(_VALUE_ENDS, LONGEST_SCALAR)).strip()
    if not word:
        raise Malformed("the value is missing")
    return _json_scalar(word) or _padded_integer(word) or json.dumps(word, ensure_ascii=False)


def _json_scalar(word: str) -> str | None:
    if word in _WORDS:
        return _WORDS[word]
    if not _JSON_SCALAR.fullmatch(word):
        return None
    return word if word.lstrip("-").isdigit() or word.isalpha() or math.isfinite(float(word)) else None


def _padded_integer(word: str) -> str | None:
    """An integer after zeros, which neither JSON nor Python has."""
    found = _PADDED_INTEGER.fullmatch(word)
    return None if found is None else found[1].replace("+", "") + found[2]


def _python_number(word: str) -> str | None:
    for read in (lambda text: int(text, 0), float):
        try:
            number = read(word)
            if isinstance(number, int) or math.isfinite(number):
                return json.dumps(number)
        except ValueError:  # no number, or one that is too long to write out
            continue
    return None


def _read_between_marks(source: AnswerText, emit: Emit, mark: str) -> Pull[None]:
    end = marks_of(frozenset({mark}))
    emit('"')
    while True:
        found = end.find(source.text, source.at)
        sure = end.safe(source.text, source.at) if found is None else found[0]
        if sure > source.at:
            emit(escape(source.take(sure - source.at)))
        if found is not None:
            source.take(len(mark))
            emit('"')
            return
        if not (yield from source.more()):
            raise Malformed("a string does not end")


def _read_quoted(source: AnswerText, emit: Emit, dialect: Dialect, nested: bool) -> Pull[None]:
    """`nested`: it is in a container."""
    quote = source.take(1)
    emit('"')
    while True:
        char = yield from source.peek()
        if not char:
            raise Malformed("a string does not end")
        if char == quote and dialect.argument and not (yield from _ends_string(source, nested)):
            emit(escape(source.take(1)))
        elif char == quote:
            source.take(1)
            emit('"')
            return
        if char == "\\":
            source.take(1)
            emit((yield from _read_escape(source, dialect)))
        elif char < " ":
            emit(escape(source.take(1)))
        else:
            plain = source.run(_PLAIN[quote])
            emit(plain if quote == '"' else escape(plain))


def _ends_string(source: AnswerText, nested: bool) -> Pull[bool]:
    """Can what follows this quote follow a string in the arguments of a Python call?"""
    while True:
        following = source.text[source.at + 1 :]
        decided = _may_follow_string(following.lstrip(), nested)
        if decided is not None or len(following) > LONGEST_LOOK_AHEAD:
            return bool(decided)
        if not (yield from source.more()):
            return True


def _may_follow_string(text: str, nested: bool) -> bool | None:
    """None: that depends on more text."""
    if not text:
        return None
    if nested and text[0] != ",":
        return text[0] in ":]})"
    rest = text[1:].lstrip()
    if text[0] not in ",)" or not rest:
        return None if text[0] in ",)" else False
    if text[0] == ")":
        return rest[0] not in ")'\""
    if nested:
        return rest[0] in _VALUE_BEGINS or _begins_with(rest, _ALL_WORDS)
    name = _ARGUMENT_NAME.match(rest)
    if name is None:
        return rest[0] == ")"
    rest = rest[name.end() :].lstrip()
    return None if rest in ("", "=") else rest[0] == "=" != rest[1]


def _begins_with(text: str, words: Iterable[str]) -> bool | None:
    if any(text.startswith(word) for word in words):
        return True
    return None if any(word.startswith(text) for word in words) else False


def _read_escape(source: AnswerText, dialect: Dialect) -> Pull[str]:
    """What follows a backslash. One that begins no escape stands for itself."""
    char = yield from source.peek()
    if not char:
        raise Malformed("a string does not end")
    if char in _LONGER_ESCAPES and (char == "u" or dialect.python):
        return (yield from _read_code(source, _LONGER_ESCAPES[char]))
    if dialect.python and char in _PYTHON_ESCAPES:
        source.take(1)
        return escape(_PYTHON_ESCAPES[char])
    if char in '"\\/bfnrt':
        return "\\" + source.take(1)
    return "" if char == "'" else "\\\\"


def _read_code(source: AnswerText, digits: int) -> Pull[str]:
    while len(source.text) - source.at <= digits:
        if not (yield from source.more()):
            raise Malformed("a string does not end")
    code = source.text[source.at + 1 : source.at + 1 + digits]
    if not _HEX_DIGITS.fullmatch(code) or int(code, 16) > 0x10FFFF:
        return "\\\\"
    number = int(code, 16)
    if 0xDC00 <= number < 0xE000:
        source.take(1 + digits)
        return _NO_CHARACTER
    if 0xD800 <= number < 0xDC00:
        return (yield from _read_pair(source, digits, code))
    source.take(1 + digits)
    return "\\u" + code if digits == 4 else json.dumps(chr(number))[1:-1]


def _read_pair(source: AnswerText, digits: int, high: str) -> Pull[str]:
    """The second half of a character must follow the first; a half by itself stands for nothing."""
    both = 1 + digits + _LOW_HALF_SIZE
    while len(source.text) - source.at < both and not source.ended:
        yield from source.more()
    found = _LOW_HALF.match(source.text, source.at + 1 + digits)
    if found is None or digits != 4:
        source.take(1 + digits)
        return _NO_CHARACTER
    source.take(both)
    return f"\\u{high}{found.group()}"


# ---- values in the types that a tool's schema names

_BOOLEANS = {"true": "true", "false": "false", "1": "true", "0": "false"}
_TYPE_OF_FIRST = {"{": "object", "[": "array", "t": "boolean", "f": "boolean", "n": "null"}
# names that schemas have for types, and JSON Schema does not
_ALIASES = {
    "str": "string", "text": "string", "int": "integer", "long": "integer", "float": "number", "double": "number",
    "bool": "boolean", "list": "array", "dict": "object",
}  # fmt: skip
_WHOLE_FLOAT = re.compile(r"-?\d+\.0+", re.ASCII)


def types_of(schema: Mapping[str, Any], key: str) -> set[str]:
    """The JSON types a parameter may have; empty if the schema does not name them."""
    properties = schema.get("properties")
    found = properties.get(key) if isinstance(properties, Mapping) else None
    return schema_types(found) if isinstance(found, Mapping) else set()


def schema_types(schema: Mapping[str, Any]) -> set[str]:
    kind = schema.get("type")
    types = (
        {kind} if isinstance(kind, str) else {one for one in kind if isinstance(one, str)} if isinstance(kind, list) else set()
    )
    types = {_ALIASES.get(one, one) for one in types}
    values = schema.get("enum")
    if not types and isinstance(values, list) and values and all(isinstance(value, str) for value in values):
        types = {"string"}
    for word in ("anyOf", "oneOf", "allOf"):
        options = schema.get(word)
        if isinstance(options, list):
            types |= {one for option in options if isinstance(option, Mapping) for one in schema_types(option)}
    return types


def is_string_only(types: set[str]) -> bool:
    """Must a value be a string (or null)?"""
    return types - {"null"} == {"string"}


def as_json(source: AnswerText, text: str, types: set[str]) -> Pull[str]:
    """A value as the model wrote it, as JSON of one of the types. A string if it has none of them, or is nothing else."""
    quoted, word = json.dumps(text, ensure_ascii=False), text.strip()
    if is_string_only(types):
        return "null" if "null" in types and word == "null" else quoted
    if "boolean" in types and not types & {"integer", "number"} and word.lower() in _BOOLEANS:
        return _BOOLEANS[word.lower()]
    try:
        value = yield from reread_value(source, word, PYTHON)
    except Malformed:
        return quoted
    if "integer" in types and "number" not in types and _WHOLE_FLOAT.fullmatch(value):
        value = value.partition(".")[0]
    return quoted if "string" in types and not _has_type(value, types) else value


def _has_type(value: str, types: set[str]) -> bool:
    """Does JSON have one of the types, other than a string?"""
    if value[0] in _TYPE_OF_FIRST:
        return _TYPE_OF_FIRST[value[0]] in types
    return value[0] != '"' and ("number" in types or ("integer" in types and value.lstrip("-").isdigit()))
