"""JSON schemas as the library takes them."""

import json
from collections.abc import Callable, Iterator
from typing import Any

from quire.grammar.backend import GrammarError
from quire.types.structured import StructuredOutputsParams

# one space or so, or a line break with an indentation: a model cannot go on with blanks for ever
WHITESPACE = r"[ ]{0,2}|\r?\n[ \t]{0,40}"

# beside these, others have a say about the same object
_JOINT = ("allOf", "anyOf", "oneOf", "$ref", "if", "then", "else", "not", "dependentSchemas", "unevaluatedProperties")
# where a JSON schema holds other schemas: alone, in a list, by name
_ALONE = ("items", "additionalProperties", "additionalItems", "contains", "not", "if", "then", "else", "propertyNames")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_NAMED = ("properties", "patternProperties", "$defs", "definitions")
Place = tuple[str | int, ...]
Schema = dict[str, Any]


def _says_all(node: Schema, place: Place) -> bool:
    """Does this schema alone name the keys of its objects?"""
    joint, steps = False, iter(place)
    for step in steps:
        joint = step in _JOINT
        if step in _LISTS or step in _NAMED:
            next(steps, None)  # a number, or a name
    return "properties" in node and not joint and not any(word in node for word in _JOINT)


def prepare_schema(schema: Schema, params: StructuredOutputsParams | None = None) -> Schema:
    """As the library takes it. Raises GrammarError for alternatives of a oneOf that may hold at the same time."""

    def change(node: Schema, place: Place) -> Schema:
        if params is not None and params.disable_additional_properties and _says_all(node, place):
            node.setdefault("additionalProperties", False)
        if "oneOf" in node:
            node = _as_any_of(node, schema, place)
        return node

    changed = _rebuild(schema, change)
    options: Schema = {"whitespace_pattern": WHITESPACE}
    if params is not None and params.disable_any_whitespace:
        options = {"whitespace_flexible": False}
    elif params is not None and params.whitespace_pattern is not None:
        options = {"whitespace_pattern": params.whitespace_pattern}
    return {**changed, "x-guidance": options}


def subschemas(node: Schema) -> Iterator[tuple[Place, Schema]]:
    """The schemas directly in this one, each with its place."""
    for key, value in node.items():
        if key in _ALONE and isinstance(value, dict):
            yield (key,), value
        elif key in _LISTS and isinstance(value, list):
            yield from (((key, i), item) for i, item in enumerate(value) if isinstance(item, dict))
        elif key in _NAMED and isinstance(value, dict):
            yield from (((key, name), item) for name, item in value.items() if isinstance(item, dict))


def pointer(place: Place) -> str:
    """$.properties.a.anyOf[1]: a place in a JSON document."""
    return "$" + "".join(f".{part}" if isinstance(part, str) and part.isidentifier() else f"[{part!r}]" for part in place)


def _rebuild(node: Schema, change: Callable[[Schema, Place], Schema], place: Place = ()) -> Schema:
    """A copy in which every schema was changed, inner ones first."""
    copy = {key: dict(value) if key in _NAMED and isinstance(value, dict) else value for key, value in node.items()}
    copy = {key: list(value) if key in _LISTS and isinstance(value, list) else value for key, value in copy.items()}
    for inner, schema in subschemas(node):
        rebuilt = _rebuild(schema, change, place + inner)
        if len(inner) == 1:
            copy[str(inner[0])] = rebuilt
        else:
            copy[str(inner[0])][inner[1]] = rebuilt
    return change(copy, place)


def _as_any_of(node: Schema, root: Schema, place: Place) -> Schema:
    """oneOf is anyOf where no two alternatives can hold at once, and that is the only oneOf that can be generated."""
    alternatives = [_resolve(item, root) for item in node["oneOf"] if isinstance(item, dict)]
    for i, one in enumerate(alternatives):
        for j, other in enumerate(alternatives[:i]):
            if not disjoint(one, other, root):
                where = pointer((*place, "oneOf"))
                raise GrammarError(
                    f"{where}: alternatives {j} and {i} may hold at the same time; give them different types or a required "
                    "property with different const values, or use anyOf"
                )
    rest = {key: value for key, value in node.items() if key not in ("oneOf", "discriminator")}
    if "anyOf" in rest:
        raise GrammarError(f"{pointer(place)}: oneOf and anyOf cannot be combined")
    return {**rest, "anyOf": node["oneOf"]}


def disjoint(one: Schema, other: Schema, root: Schema) -> bool:
    """Is it plain that nothing satisfies both?"""
    types, others = _types(one), _types(other)
    if types and others and not _overlap(types, others):
        return True
    values, other_values = _values(one), _values(other)
    if values is not None and other_values is not None:
        return not values & other_values
    if types != {"object"} or others != {"object"}:
        return False
    for name in set(one.get("required", ())) & set(other.get("required", ())):
        mine, theirs = (_resolve(schema.get("properties", {}).get(name, {}), root) for schema in (one, other))
        if disjoint(mine, theirs, root):
            return True
    return False


def _types(schema: Schema) -> set[str]:
    kinds = schema.get("type", ())
    return {kinds} if isinstance(kinds, str) else set(kinds)


def _overlap(types: set[str], others: set[str]) -> bool:
    wide = [kinds | ({"number"} if "integer" in kinds else set()) for kinds in (types, others)]
    return bool(wide[0] & wide[1])


def _values(schema: Schema) -> set[str] | None:
    """The values it names, as text; None if it names none."""
    named = [schema["const"]] if "const" in schema else schema.get("enum")
    return None if named is None else {json.dumps(value, sort_keys=True) for value in named}


def _resolve(schema: Any, root: Schema) -> Schema:
    """Follows references within the schema; what cannot be followed is left to the library."""
    for _ in range(8):
        reference = schema.get("$ref") if isinstance(schema, dict) else None
        if not isinstance(reference, str) or not reference.startswith("#/"):
            break
        target: Any = root
        for part in reference[2:].split("/"):
            target = target.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(target, dict) else None
        if not isinstance(target, dict):
            break
        schema = target
    return schema if isinstance(schema, dict) else {}
