"""One value, JSON's or Python's, read as it comes and written as JSON.

Whatever has been written is the beginning of valid JSON. What models often get wrong and what has one meaning only is put
right: control characters, unknown escapes and halves of surrogate pairs in strings, commas before a bracket, `True`, `False`
and `None`. Anything else raises Malformed.
"""

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass

from quire.text.parse.source import AnswerText, Malformed, Pull, marks_of

Emit = Callable[[str], None]

DEEPEST = 128
LONGEST_SCALAR = 4096
LONGEST_KEY = 256

_SPACE = re.compile(r"[ \t\r\n]+")
_SCALAR = re.compile(r"[-+.\w]+", re.ASCII)
_JSON_SCALAR = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?|true|false|null", re.ASCII)
_WORDS = {"True": "true", "False": "false", "None": "null"}
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
    """`mark`: what strings stand between, as they are. Where there is one, keys need no quotes, and words are strings, too."""

    brackets: dict[str, str]  # opening -> closing
    quotes: str
    python: bool = False
    mark: str = ""


JSON = Dialect({"{": "}", "[": "]"}, '"')
PYTHON = Dialect({"{": "}", "[": "]", "(": ")"}, "\"'", python=True)


def marked(mark: str) -> Dialect:
    """{key:<mark>text<mark>,n:1}"""
    return Dialect({"{": "}", "[": "]"}, '"', mark=mark)


def read_value(source: AnswerText, emit: Emit, dialect: Dialect = JSON) -> Pull[None]:
    """Exactly one value; spaces inside of it are kept, those around it are not its business."""
    closers: list[str] = []  # of the containers we are in
    while True:
        # in front of a value
        opened = yield from _begin(source, emit, dialect)
        if opened:
            closers.append(dialect.brackets[opened])
            if len(closers) > DEEPEST:
                raise Malformed(f"values nest more than {DEEPEST} deep")
            yield from _space(source, emit)
            if not (yield from _close(source, emit, closers)):
                if closers[-1] == "}":
                    yield from _read_key(source, emit, dialect)
                continue
        # behind a value
        while closers:
            yield from _space(source, emit)
            if (yield from _close(source, emit, closers)):
                continue
            if (yield from _next_item(source, emit, closers)):
                if closers[-1] == "}":
                    yield from _read_key(source, emit, dialect)
                break
        else:
            return


def collect_value(source: AnswerText, dialect: Dialect = JSON) -> Pull[str]:
    """The whole value, as JSON."""
    pieces: list[str] = []
    yield from read_value(source, pieces.append, dialect)
    return "".join(pieces)


def reread_value(source: AnswerText, text: str, dialect: Dialect = JSON) -> Pull[str]:
    """Text that `source` gave, read as exactly one value, as JSON."""
    own, pieces = AnswerText(), list[str]()
    own.add(text)
    own.complete = True
    for _ in read_value(own, pieces.append, dialect):
        own.show()
        yield from source.pause()
    if own.at != len(own.text) or own.hides:
        raise Malformed("more than a value")
    return "".join(pieces)


def read_string(source: AnswerText) -> Pull[str]:
    """A JSON string, decoded."""
    if (yield from source.peek()) != '"':
        raise Malformed("expected a string")
    return str(json.loads((yield from collect_value(source))))


def escape(text: str) -> str:
    """Text as it stands between the quotes of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _begin(source: AnswerText, emit: Emit, dialect: Dialect) -> Pull[str]:
    """Reads a scalar or a string, or the bracket of a container, which is returned."""
    if dialect.mark and (yield from source.literal(dialect.mark)):
        yield from _read_between_marks(source, emit, dialect.mark)
        return ""
    char = yield from source.peek()
    if not char:
        raise Malformed("the value is missing")
    if char in dialect.brackets:
        source.take(1)
        emit("[" if char == "(" else char)
        return char
    if char in dialect.quotes:
        yield from _read_quoted(source, emit, dialect)
    elif dialect.mark:
        emit((yield from _read_word(source)))
    else:
        emit((yield from _read_scalar(source, dialect)))
    return ""


def _close(source: AnswerText, emit: Emit, closers: list[str]) -> Pull[bool]:
    if not (yield from source.literal(closers[-1])):
        return False
    emit("]" if closers[-1] == ")" else closers[-1])
    closers.pop()
    return True


def _next_item(source: AnswerText, emit: Emit, closers: list[str]) -> Pull[bool]:
    """Is there one more? A comma in front of the closing bracket is left out."""
    yield from source.expect(",")
    gap: list[str] = [","]
    yield from _space(source, gap.append)
    if (yield from source.peek()) == closers[-1]:
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
        yield from _read_quoted(source, emit, dialect)
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
    while True:
        found = _SCALAR.match(source.text, source.at)
        word = "" if found is None else found.group()
        if len(word) > LONGEST_SCALAR:
            raise Malformed("a number is too long")
        if source.at + len(word) < len(source.text) or not (yield from source.more()):
            break
    value = _json_scalar(word)
    if value is None and dialect.python:
        value = _python_number(word)
    if value is None:
        raise Malformed(f"{word!r:.40} is no value")
    source.take(len(word))
    return value


def _read_word(source: AnswerText) -> Pull[str]:
    """A number or one of JSON's words; anything else is a string, up to what ends a value."""
    word = (yield from source.until(_VALUE_ENDS, LONGEST_SCALAR)).strip()
    if not word:
        raise Malformed("the value is missing")
    return _json_scalar(word) or json.dumps(word, ensure_ascii=False)


def _json_scalar(word: str) -> str | None:
    if word in _WORDS:
        return _WORDS[word]
    if not _JSON_SCALAR.fullmatch(word):
        return None
    return word if word.lstrip("-").isdigit() or word.isalpha() or math.isfinite(float(word)) else None


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


def _read_quoted(source: AnswerText, emit: Emit, dialect: Dialect) -> Pull[None]:
    quote = source.take(1)
    emit('"')
    while True:
        char = yield from source.peek()
        if not char:
            raise Malformed("a string does not end")
        if char == quote:
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
