"""Values in the types that a tool's schema names."""

import json
import re
from collections.abc import Mapping
from typing import Any

from quire.text.parse.source import AnswerText, Malformed, Pull
from quire.text.parse.values import PYTHON, reread_value

_BOOLEANS = {"true": "true", "false": "false", "1": "true", "0": "false"}
_TYPE_OF_FIRST = {"{": "object", "[": "array", "t": "boolean", "f": "boolean", "n": "null"}
# names that schemas have for types, and JSON Schema does not
_ALIASES = {
    "str": "string", "text": "string", "int": "integer", "long": "integer", "float": "number", "double": "number",
    "bool": "boolean", "list": "array", "dict": "object",
}  # fmt: skip
_WHOLE_FLOAT = re.compile(r"-?\d+\.0+", re.ASCII)


def types_of(schema: Mapping[str, Any], key: str) -> set[str]:
    """The JSON types a parameter may have; none are known where the schema does not say."""
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
