"""JSON schemas as the library takes them: what it does not know is put in other words where there are some (`keywords.py`).

What cannot be put otherwise is left out and told of, or refused where the user wants it held to by all means. Objects have no
keys but those they name, unless they speak of others. Where several schemas speak of one object (allOf, $ref beside properties
...) they are closed together: by one that names the keys of all of them.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from quire.grammar.backend import GrammarError
from quire.grammar.keywords import Rewriting, resolve
from quire.types.errors import InvalidParameter
from quire.types.structured import StructuredOutputsParams, read_object

# one space or so, or a line break with an indentation: a model cannot go on with blanks for ever
WHITESPACE = r"[ ]{0,2}|\r?\n[ \t]{0,40}"
STRICT = "is more than a grammar can hold to, and strict asks for all of it: leave it out, or leave out strict"

# where a JSON schema holds other schemas: alone, in a list, by name
_ALONE = ("items", "additionalProperties", "additionalItems", "contains", "not", "if", "then", "else", "propertyNames")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
# those whose schemas always speak of the same value, and those that make others speak of the same object
_SAME = ("allOf", "not", "if", "then", "else", "dependentSchemas", "dependencies")
_OF_OBJECTS = ("properties", "patternProperties", "additionalProperties", "allOf", "$ref")
_SAID = ("additionalProperties", "unevaluatedProperties")
MOST_VISITS = 20_000  # to schemas, to find out who speaks of one object; the rest stays open
Place = tuple[str | int, ...]
Schema = dict[str, Any]


@dataclass
class Preparation:
    """Of one schema. `told` are the keywords that were left out, each with its place."""

    root: Schema
    closed: bool = True
    strict: bool = False
    told: list[tuple[Place, str]] = field(default_factory=list)
    _open: dict[str, str] = field(
        default_factory=dict
    )  # copies of referred schemas that others close: their names by reference
    _copies: Schema = field(default_factory=dict)
    _visits: int = 0

    def make(self) -> Schema:
        try:
            made = self._node(self.root, (), joint=False)
        except RecursionError:
            raise GrammarError("the schema is nested too deeply") from None
        return {**made, "$defs": {**made.get("$defs", {}), **self._copies}} if self._copies else made

    def _node(self, node: Any, place: Place, joint: bool) -> Any:
        """`joint`: another schema speaks of the same object, and closes it."""
        if not isinstance(node, dict):
            return node
        together = joint or any(word in node for word in _OF_OBJECTS)
        made = {key: self._inside(key, value, place, together) for key, value in node.items()}
        if isinstance(node.get("$ref"), str) and (joint or len(node.keys() & set(_OF_OBJECTS)) > 1):
            made["$ref"] = self._reference(node["$ref"])
        rewriting = Rewriting(made, self.root)
        try:
            rewriting.node = self._close(node, made) if self.closed and not joint else made
            made = rewriting.make()
        except (TypeError, ValueError, AttributeError, KeyError):
            return made  # what stands where something else should is the library's to refuse
        for keyword in rewriting.unheld:
            if self.strict:
                raise GrammarError(f"{pointer(place)}: {keyword} {rewriting.reasons.get(keyword, STRICT)}")
            self.told.append((place, keyword))
        return made

    def _inside(self, key: str, value: Any, place: Place, together: bool) -> Any:
        same = key in _SAME or (key in ("anyOf", "oneOf") and together)
        if key in _NAMED and isinstance(value, dict):
            return {name: self._node(inner, (*place, key, name), same) for name, inner in value.items()}
        if key in _LISTS and isinstance(value, list):
            return [self._node(inner, (*place, key, i), same) for i, inner in enumerate(value)]
        return self._node(value, (*place, key), same) if key in _ALONE else value

    def _reference(self, reference: str) -> str:
        """To a copy of the same schema that is left open."""
        target = resolve({"$ref": reference}, self.root)
        if not self.closed or not target or not reference.startswith("#") or target is self.root:
            return reference
        if reference not in self._open:
            name = f"open-{len(self._open)}"
            while any(name in self.root.get(word, ()) for word in ("$defs", "definitions")):
                name += "-"
            self._open[reference] = name
            self._copies[name] = self._node(target, ("$defs", name), joint=True)
        return f"#/$defs/{self._open[reference]}"

    def _close(self, node: Schema, made: Schema) -> Schema:
        items, least = node.get("prefixItems"), node.get("minItems", 0)
        if isinstance(items, list) and "items" not in node and isinstance(least, int) and least <= len(items):
            made = {**made, "items": False}
        words = node.keys() & {"properties", "allOf", "$ref"}
        if not words or words == {"$ref"}:
            return made  # alternatives and what is referred to are closed by themselves
        names, patterns, said = self._keys(node, set())
        if said or not names:
            return made
        if not node.keys() & {*_SAME, "anyOf", "oneOf", "$ref"}:
            return {**made, "additionalProperties": False}
        closing: Schema = {"properties": dict.fromkeys(names, True), "additionalProperties": False}
        if patterns:
            closing["patternProperties"] = dict.fromkeys(patterns, True)
        return {**made, "allOf": [*made.get("allOf", ()), closing]}

    def _keys(self, node: Any, seen: set[str]) -> tuple[list[str], list[str], bool]:
        """The keys that are named for one object by all who speak of it, and whether one of them speaks of the others."""
        self._visits += 1
        if not isinstance(node, dict) or self._visits > MOST_VISITS:
            return [], [], self._visits > MOST_VISITS
        names, patterns = list(_dict(node.get("properties"))), list(_dict(node.get("patternProperties")))
        said = "properties" in node and not isinstance(node["properties"], dict)
        said = said or any(word in node for word in _SAID)
        inner = [part for word in ("allOf", "anyOf", "oneOf") for part in _list(node.get(word))]
        inner += [node.get("then"), node.get("else"), *_dict(node.get("dependentSchemas")).values()]
        reference = node.get("$ref")
        if isinstance(reference, str) and reference not in seen:
            seen.add(reference)
            inner.append(resolve({"$ref": reference}, self.root))
        empty = "properties" in node and not names
        for part in inner:
            more, others, spoken = self._keys(part, seen)
            names, patterns, said = names + more, patterns + others, said or spoken
        return names or ([""] if empty else []), patterns, said


def _dict(value: Any) -> Schema:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def prepare_schema(schema: Schema, params: StructuredOutputsParams | None = None) -> Schema:
    """Raises GrammarError for what cannot be held to, if that is asked for."""
    closed = params is None or params.disable_additional_properties is not False
    strict = params is not None and params.strict
    changed = Preparation(schema, closed, strict).make()
    options: Schema = {"whitespace_pattern": WHITESPACE}
    if params is not None and params.disable_any_whitespace:
        options = {"whitespace_flexible": False}
    elif params is not None and params.whitespace_pattern is not None:
        options = {"whitespace_pattern": params.whitespace_pattern}
    return {**changed, "x-guidance": options}


def unenforced(params: StructuredOutputsParams, closed: bool = True) -> list[str]:
    """The keywords of its JSON schemas that the grammar does not hold the answer to. `closed`: are objects, if it is silent?"""
    said = params.disable_additional_properties
    closed = params.json is None or (closed if said is None else said)
    found: dict[str, None] = {}
    for schema in _schemas(params):
        preparation = Preparation(schema, closed)
        try:
            preparation.make()
        except GrammarError:
            continue
        found |= dict.fromkeys(keyword for _, keyword in preparation.told)
    return list(found)


def _schemas(params: StructuredOutputsParams) -> Iterator[Schema]:
    given, name = (params.json, "json") if params.json is not None else (params.structural_tag, "structural_tag")
    if given is None:
        return
    try:
        whole = read_object(name, given)
    except InvalidParameter:
        return
    todo: list[Any] = [whole]
    if name == "json":
        yield whole
        return
    while todo:
        piece = todo.pop()
        if isinstance(piece, dict):
            schemas = [piece.get("schema") if "begin" in piece else None, piece.get("json_schema")]
            yield from (schema for schema in schemas if isinstance(schema, dict))
            todo += [value for key, value in piece.items() if key not in ("schema", "json_schema")]
        elif isinstance(piece, list):
            todo += piece


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
