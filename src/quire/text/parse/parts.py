"""What a tool call may be made of. A format lists the parts of its calls in order; space between parts means nothing.

Each part is a table row that can read itself: `read(source, call)` reads its text and passes the content to the call.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

from quire.text.parse.events import LONGEST_NAME, CallWriter, write_settled
from quire.text.parse.source import AnswerText, Malformed, Marks, Pull, marks_of
from quire.text.parse.values import (
    DEEPEST,
    PYTHON_ARGUMENT,
    as_json,
    collect_value,
    escape,
    is_string_only,
    marked,
    read_as_string,
    read_bare_key,
    read_string,
    read_value,
    reread_value,
    schema_types,
    types_of,
)

_OTHER_KEYS = ("id", "type", "index", "tool_call_id")
_KEY = re.compile(r"[\w.$-]{1,64}")
_IDENTIFIER = re.compile(r"[\w.-]*")


class CallPart(Protocol):
    def read(self, source: AnswerText, call: CallWriter) -> Pull[None]: ...

    @property
    def marks(self) -> tuple[str, ...]:
        """Its fixed strings: some may be special tokens."""


@dataclass(frozen=True)
class Mark:
    """A string that must stand here."""

    text: str

    @property
    def marks(self) -> tuple[str, ...]:
        return (self.text,)

    def read(self, source: AnswerText, call: CallWriter) -> Pull[None]:  # noqa: ARG002 every part is read alike
        yield from source.expect(self.text)


@dataclass(frozen=True)
class Name:
    """The tool's name, up to one of `ends`, which is taken, or of `left`, which is not.

    `written`: a pattern whose group 1 is the name, where more stands here; then all of it is the call's id.
    `doubled`: "f.f" is the tool "f", where there is no tool with the longer name.
    """

    ends: tuple[str, ...]
    left: tuple[str, ...] = ()
    written: str | None = None
    doubled: bool = False

    @property
    def marks(self) -> tuple[str, ...]:
        return self.ends + self.left

    def read(self, source: AnswerText, call: CallWriter) -> Pull[None]:
        text = (yield from source.until(marks_of(frozenset(self.ends + self.left)), LONGEST_NAME)).strip()
        for end in self.ends:
            if (yield from source.literal(end)):
                break
        if self.doubled and not call.is_tool(text):
            head, _, tail = text.partition(".")
            text = head if head == tail and call.is_tool(head) else text
        if self.written is None:
            call.name_it(text)
            return
        found = re.fullmatch(self.written, text)
        call.name_it(text if found is None else found[1], text)


@dataclass(frozen=True)
class Known:
    """The tool's name is known already; it is not in the text."""

    name: str

    @property
    def marks(self) -> tuple[str, ...]:
        return ()

    def read(self, source: AnswerText, call: CallWriter) -> Pull[None]:  # noqa: ARG002 every part is read alike
        call.name_it(self.name)
        yield from ()


@dataclass(frozen=True)
class Id:
    """The call's id between two strings, where there is one. The second is left."""

    begin: str
    end: str

    @property
    def marks(self) -> tuple[str, ...]:
        return (self.begin, self.end)

    def read(self, source: AnswerText, call: CallWriter) -> Pull[None]:
        if (yield from source.literal(self.begin)):
            call.identify((yield from source.until(marks_of(frozenset({self.end})), LONGEST_NAME)).strip())


@dataclass(frozen=True)
class Maybe:
    """A string that may stand here."""

    text: str

    @property
    def marks(self) -> tuple[str, ...]:
        return (self.text,)

    def read(self, source: AnswerText, call: CallWriter) -> Pull[None]:  # noqa: ARG002 every part is read alike
        yield from source.literal(self.text)


@dataclass(frozen=True)
class Word:
    """A word that may stand here and means nothing."""

    @property
    def marks(self) -> tuple[str, ...]:
        return ()

    def read(self, source: AnswerText, call: CallWriter) -> Pull[None]:  # noqa: ARG002 every part is read alike
        if _IDENTIFIER.fullmatch((yield from source.peek())):
            yield from _read_identifier(source)


@dataclass(frozen=True)
class Json:
    """The arguments, as a JSON object."""

    @property
    def marks(self) -> tuple[str, ...]:
        return ()

    def read(self, source: AnswerText, call: CallWriter) -> Pull[None]:
        if (yield from source.peek()) != "{":
            raise Malformed("the arguments are no object")
        yield from read_value(source, call.write, strings=call.must_be_string)


@dataclass(frozen=True)
class Keyed:
    """The whole call as one JSON object with a single member: the tool's name and the arguments."""

    @property
    def marks(self) -> tuple[str, ...]:
        return ()

    def read(self, source: AnswerText, call: CallWriter) -> Pull[None]:
        yield from source.expect("{")
        yield from source.space()
        call.name_it((yield from read_string(source)))
        yield from source.space()
        yield from source.expect(":")
        yield from source.space()
        yield from Json().read(source, call)
        yield from source.space()
        yield from source.expect("}")


@dataclass(frozen=True)
class Envelope:
    """The whole call as one JSON object with name and arguments (or parameters), in any order.

    Of arguments that are there twice the first count: they may have been emitted. `strict`: without arguments it is none, and a
    key that no call has makes it none at once, so that other objects are not held back to their end.
    """

    name_keys: tuple[str, ...] = ("name",)
    strict: bool = False
    argument_keys: tuple[str, ...] = ("arguments", "parameters")

    @property
    def marks(self) -> tuple[str, ...]:
        return ()

    def read(self, source: AnswerText, call: CallWriter) -> Pull[None]:
        early: list[str] = []  # arguments in front of the name: their types are not known yet
        yield from source.expect("{")
        while True:
            yield from source.space()
            key = yield from read_string(source)
            known = key in (*self.name_keys, *self.argument_keys, *_OTHER_KEYS)
            if not known and (self.strict or not _KEY.fullmatch(key)):
                raise Malformed(f"a call has no {key!r:.40}")
            yield from source.space()
            yield from source.expect(":")
            yield from source.space()
            yield from self._read_member(key, source, call, early)
            yield from source.space()
            if (yield from source.literal("}")):
                break
            yield from source.expect(",")
        if self.strict and not call.has_arguments:
            raise Malformed("the call has no arguments")

    def _read_member(self, key: str, source: AnswerText, call: CallWriter, early: list[str]) -> Pull[None]:
        if key in self.name_keys:
            call.name_it((yield from read_string(source)))
            if early:
                call.write((yield from reread_value(source, early.pop(), strings=call.must_be_string)))
        elif key in self.argument_keys and not call.has_arguments and not early:
            yield from self._read_arguments(source, call, early)
        else:
            value = yield from collect_value(source)
            if key == "id" and value.startswith('"'):
                call.identify(json.loads(value))

    def _read_arguments(self, source: AnswerText, call: CallWriter, early: list[str]) -> Pull[None]:
        if (yield from source.peek()) != "{":
            yield from write_settled(source, call, (yield from collect_value(source)))
        elif call.named:
            yield from read_value(source, call.write, strings=call.must_be_string)
        else:
            early.append((yield from collect_value(source)))


@dataclass(frozen=True)
class PythonCall:
    """name(key=value, ...) with Python's literals."""

    @property
    def marks(self) -> tuple[str, ...]:
        return ()

    def read(self, source: AnswerText, call: CallWriter) -> Pull[None]:
        name = yield from _read_identifier(source)
        yield from source.expect("(")
        call.name_it(name)
        before = "{"
        while True:
            yield from source.space()
            if (yield from source.literal(")")):
                break
            key = yield from _read_identifier(source)
            yield from source.space()
            yield from source.expect("=")
            yield from source.space()
            call.write(f'{before}"{escape(key)}": ')
            dialect, string = PYTHON_ARGUMENT, call.must_be_string(key)
            if not (string and (yield from read_as_string(source, call.write, dialect))):
                yield from read_value(source, call.write, dialect)
            before = ", "
            yield from source.space()
            if not (yield from source.literal(",")):
                yield from source.expect(")")
                break
        call.write("{}" if before == "{" else "}")


@dataclass(frozen=True)
class Parameters:
    """The arguments one by one, between marks, as text; the tool's schema has their types.

    `kinds`: other ends of a key that say whether the value is a "string" or "json", for keys that the schema has no type for.
    `lines`: a value has lines of its own, so a line end before it and one after it are not part of it. `stops` end a value
    whose own end is missing. `wrap`: two marks that may stand around a value. The parameters end with `end`, or, where that is
    none or was forgotten, in front of one of `before`.
    """

    key: tuple[str, str]
    value: tuple[str, str]
    kinds: tuple[tuple[str, str], ...] = ()
    lines: bool = False
    stops: tuple[str, ...] = ()
    end: str = ""
    before: tuple[str, ...] = ()
    wrap: tuple[str, str] = ("", "")

    @property
    def marks(self) -> tuple[str, ...]:
        return (*self.key, *self.value, *(end for end, _ in self.kinds), *self.stops, self.end, *self.before, *self.wrap)

    def read(self, source: AnswerText, call: CallWriter) -> Pull[None]:
        written = 0
        while True:
            yield from source.space()
            if not (yield from source.literal(self.key[0])):
                break
            key, types = yield from self._read_key(source, call)
            if self.value[0]:
                yield from source.space()
                yield from source.expect(self.value[0])
            call.write(f'{", " if written else "{"}"{escape(key)}": ')
            yield from self._read_text(source, call, types)
            written += 1
        yield from self._read_end(source, bool(written))
        call.write("}" if written else "{}")

    def _read_key(self, source: AnswerText, call: CallWriter) -> Pull[tuple[str, set[str]]]:
        """The key, and the types of its value."""
        ends = {self.key[1]: "", **dict(self.kinds)}
        key = (yield from source.until(marks_of(frozenset(ends)), LONGEST_NAME)).strip()
        for end, kind in ends.items():
            if (yield from source.literal(end)):
                return key, types_of(call.schema, key) or ({kind} if kind else set())
        raise Malformed("a key does not end")

    def _read_end(self, source: AnswerText, some: bool) -> Pull[None]:
        """The text after the last argument must show that it was the last."""
        if self.end and (yield from source.literal(self.end)):
            return
        for mark in self.before:
            if (yield from source.literal(mark)):
                source.at -= len(mark)
                return
        if (self.end or self.before) and not (some and not (yield from source.peek())):
            raise Malformed("the parameters do not end")

    def _read_text(self, source: AnswerText, call: CallWriter, types: set[str]) -> Pull[None]:
        """A string is emitted as it arrives; any other value when it is complete."""
        ends = marks_of(frozenset({self.value[1], *self.stops}))
        if self.lines:
            yield from source.literal("\n")
        if self.wrap[0] and (yield from source.literal(self.wrap[0])):
            ends = marks_of(frozenset({self.wrap[1]}))
        if types != {"string"}:
            text = yield from read_all(source, ends)
            call.write((yield from as_json(source, text.removesuffix("\n") if self.lines else text, types)))
            yield from self._read_value_end(source)
            return
        call.write('"')
        while True:
            found = ends.find(source.text, source.at)
            if found is not None:
                text = source.take(found[0] - source.at)
                call.write(escape(text.removesuffix("\n") if self.lines else text) + '"')
                yield from self._read_value_end(source)
                return
            sure = ends.safe(source.text, source.at)
            if self.lines and sure > source.at and source.text[sure - 1] == "\n":
                sure -= 1
            if sure > source.at:
                call.write(escape(source.take(sure - source.at)))
            if not (yield from source.more()):
                raise Malformed("a parameter does not end")

    def _read_value_end(self, source: AnswerText) -> Pull[None]:
        if self.wrap[1] and (yield from source.literal(self.wrap[1])):
            yield from source.space()
        yield from source.literal(self.value[1])


@dataclass(frozen=True)
class Marked:
    """The arguments as {key:value, ...} with keys as they are and strings between two of `mark`."""

    mark: str

    @property
    def marks(self) -> tuple[str, ...]:
        return (self.mark,)

    def read(self, source: AnswerText, call: CallWriter) -> Pull[None]:
        dialect, before = marked(self.mark), "{"
        yield from source.expect("{")
        while True:
            yield from source.space()
            if (yield from source.literal("}")):
                break
            key = yield from read_bare_key(source, dialect)
            yield from source.space()
            types = types_of(call.schema, key)
            if not types or "string" in types:
                call.write(f'{before}"{escape(key)}": ')
                if not (is_string_only(types) and (yield from read_as_string(source, call.write, dialect))):
                    yield from read_value(source, call.write, dialect)
            else:  # what is no string may be written as one
                value = yield from collect_value(source, dialect)
                value = (yield from as_json(source, json.loads(value), types)) if value.startswith('"') else value
                call.write(f'{before}"{escape(key)}": {value}')
            before = ", "
            yield from source.space()
            if not (yield from source.literal(",")):
                yield from source.expect("}")
                break
        call.write("{}" if before == "{" else "}")


def _read_identifier(source: AnswerText) -> Pull[str]:
    name = ""
    while True:
        name += source.run(_IDENTIFIER)
        if len(name) > LONGEST_NAME:
            raise Malformed("a name is too long")
        if source.at < len(source.text) or not (yield from source.more()):
            break
    if not name:
        raise Malformed("expected a name")
    return name


def read_all(source: AnswerText, end: Marks) -> Pull[str]:
    """The text in front of the next of the marks, which is not taken."""
    chunks: list[str] = []
    while True:
        found = end.find(source.text, source.at)
        sure = end.safe(source.text, source.at) if found is None else found[0]
        chunks.append(source.take(sure - source.at))
        if found is not None:
            return "".join(chunks)
        if not (yield from source.more()):
            raise Malformed("a parameter does not end")


# ---- elements

ITEM = "item"  # name of the elements of a list
TEXT_KEY = "$text"  # of text between elements

Content = str | list[tuple[str, Any]]  # of an element: text, or elements by name


@dataclass(frozen=True)
class Elements:
    """<a>1</a><b><c>x</c></b> with `tag` in front of every mark, up to `end`, or in front of one of `before`.

    An element that holds others is an object, or a list where the schema says so or all of them are items. An element that is
    there several times is a list, so nothing is emitted before the end.
    """

    tag: str
    end: str
    before: tuple[str, ...] = ()

    @property
    def marks(self) -> tuple[str, ...]:
        return (self.tag, self.end, *self.before)

    def read(self, source: AnswerText, call: CallWriter) -> Pull[None]:
        text = yield from read_all(source, marks_of(frozenset({self.end, *self.before})))
        yield from source.literal(self.end)
        call.write((yield from _object(source, _parse(text, self.tag), call.schema)))


@lru_cache(maxsize=16)
def _pattern(tag: str) -> "re.Pattern[str]":
    return re.compile(re.escape(tag) + r"<(/?)([^<>]{1,256})>")


def _parse(text: str, tag: str) -> list[tuple[str, Content]]:
    stack: list[tuple[str, list[tuple[str, Content]], list[str]]] = [("", [], [])]  # name, elements and text of the open ones
    at = 0
    for mark in _pattern(tag).finditer(text):
        name, elements, texts = stack[-1]
        texts.append(text[at : mark.start()])
        at = mark.end()
        if not mark[1]:
            stack.append((mark[2], [], []))
            if len(stack) > DEEPEST:
                raise Malformed(f"elements nest more than {DEEPEST} deep")
            continue
        if mark[2] != name or len(stack) == 1:
            raise Malformed(f"{mark[2]!r:.40} is not the element that is open")
        stack.pop()
        text_between = "".join(texts)
        if elements and text_between.strip():
            elements.append((TEXT_KEY, text_between))
        stack[-1][1].append((name, elements or text_between))
    if len(stack) > 1 or (text[at:] + "".join(stack[0][2])).strip():
        raise Malformed("the arguments are no elements")
    return stack[0][1]


def _value(source: AnswerText, content: Content, schema: Any) -> Pull[str]:
    schema = schema if isinstance(schema, Mapping) else {}
    types = schema_types(schema)
    if isinstance(content, str):
        if not content.strip() and "string" not in types and types & {"array", "object"}:
            return "[]" if "array" in types else "{}"
        return (yield from as_json(source, content, types))
    items = all(name == ITEM for name, _ in content)
    if "array" in types or (items and "object" not in types):
        values = []
        for _, item in content:
            values.append((yield from _value(source, item, schema.get("items"))))
        return f"[{', '.join(values)}]"
    return (yield from _object(source, content, schema))


def _object(source: AnswerText, elements: list[tuple[str, Content]], schema: Mapping[str, Any]) -> Pull[str]:
    properties = schema.get("properties")
    known = properties if isinstance(properties, Mapping) else {}
    values: dict[str, list[str]] = {}
    for name, content in elements:
        value = yield from _value(source, content, known.get(name, schema.get("additionalProperties")))
        values.setdefault(name, []).append(value)
    written = [
        f"{json.dumps(name, ensure_ascii=False)}: {each[0] if len(each) == 1 else '[' + ', '.join(each) + ']'}"
        for name, each in values.items()
    ]
    return f"{{{', '.join(written)}}}"
