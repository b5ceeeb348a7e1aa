"""Values in the types that a tool's schema names."""

import json
import re
from collections.abc import Mapping
from typing import Any

from quire.text.parse.source import AnswerText, Malformed, Pull
from quire.text.parse.values import PYTHON, reread_value

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
    values = schema.get("enum")
    if not types and isinstance(values, list) and values and all(isinstance(value, str) for value in values):
        types = {"string"}
    for word in ("anyOf", "oneOf"):
        options = schema.get(word)
        if isinstance(options, list):
            types |= {one for option in options if isinstance(option, Mapping) for one in schema_types(option)}
    return types


def is_string_only(types: set[str]) -> bool:
    """Must a value be a string (or null)?"""
    return types - {"null"} == {"string"}


def as_json(source: AnswerText, text: str, types: set[str]) -> Pull[str]:
    """A value as the model wrote it, as JSON: what its type says, a string if it is nothing else."""
    quoted = json.dumps(text, ensure_ascii=False)
    if "string" in types and not ("null" in types and text.strip() == "null"):
        return quoted
    try:
        value = yield from reread_value(source, text.strip(), PYTHON)
    except Malformed:
        return quoted
    if "integer" in types and "number" not in types and _WHOLE_FLOAT.fullmatch(value):
        return value.partition(".")[0]
    return value
