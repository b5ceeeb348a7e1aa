"""Arguments as elements with the parameters' names, which may hold elements themselves."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from quire.text.parse.call import CallWriter
from quire.text.parse.parts import read_all
from quire.text.parse.source import AnswerText, Malformed, Pull, marks_of
from quire.text.parse.values import DEEPEST, as_json, schema_types

ITEM = "item"  # name of the elements of a list
TEXT_KEY = "$text"  # of text beside elements

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
        beside = "".join(texts)
        if elements and beside.strip():
            elements.append((TEXT_KEY, beside))
        stack[-1][1].append((name, elements or beside))
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
