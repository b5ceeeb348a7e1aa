"""Rewrite JSON schemas into what llguidance can enforce.

`Rewriting` expresses keywords that the library does not know by others. A keyword that cannot be expressed is left out and
reported, or refused with `strict`. Objects are closed: they have only the keys that they name, unless additionalProperties or
unevaluatedProperties is given. Where several schemas describe one object (allOf, $ref next to properties ...), one more schema
that names all keys closes it.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations, permutations
from math import comb, perm
from typing import Any

from quire.features.structured.grammar.backend import GrammarError
from quire.types.errors import InvalidParameter
from quire.types.structured import StructuredOutputsParams, read_object

Schema = dict[str, Any]

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
MAX_ARRANGED = 100  # ways to put different values in a row, or to choose keys
MAX_PLACES = 16  # of an array in which something must be contained
MAX_DEPENDENT = 4
MAX_ALTERNATIVES = 64  # of oneOf that are compared, and keys of each
MAX_COMPARED = 1  # objects in each other
_NOTES = ("title", "description")
_DIALECT = re.compile(r"https?://json-schema\.org/")


@dataclass
class Rewriting:
    """Of one schema whose inner ones are rewritten already. `root` is the whole as the user gave it."""

    node: Schema
    root: Schema
    unheld: list[str] = field(default_factory=list)  # keywords that are left out
    reasons: dict[str, str] = field(default_factory=dict)  # for some of them

    def make(self) -> Schema:
        if self.node.keys() & _REWRITES.keys():
            self.node = dict(self.node)
            for keyword, change in _REWRITES.items():
                if keyword in self.node and not change(self, self.node.pop(keyword)):
                    self.unheld.append(keyword)
        return self.node

    # ---- one method for each keyword: it was removed from the schema; return whether it could be expressed by other keywords

    def format(self, value: Any) -> bool:
        """One that is not known is a note to the reader, as the standard has it."""
        if value in FORMATS:
            self.node["format"] = value
        elif isinstance(value, str) and re.fullmatch("uuid[1-8]", value):
            self.node["format"] = "uuid"
            self._also({"pattern": f"^[0-9a-fA-F]{{8}}-[0-9a-fA-F]{{4}}-{value[-1]}"})
        elif value == "ipvanyaddress":
            self._also({"anyOf": [{"format": "ipv4"}, {"format": "ipv6"}]})
        return True

    def dialect(self, value: Any) -> bool:
        if isinstance(value, str) and _DIALECT.match(value):
            self.node["$schema"] = value
        return True

    def one_of(self, value: Any) -> bool:
        """It is anyOf where no two alternatives can hold at once."""
        self.node.pop("discriminator", None)
        self._also({"anyOf": value})
        if not isinstance(value, list):
            return True
        numbered = [(i, {} if item is True else resolve(item, self.root)) for i, item in enumerate(value) if item is not False]
        for (i, one), (j, other) in combinations(numbered[:MAX_ALTERNATIVES], 2):
            if not disjoint(one, other, self.root):
                self.reasons["oneOf"] = (
                    f"cannot be distinguished from anyOf: alternatives {i} and {j} may hold at the same time; give them "
                    "different types or a required property with different const values, use anyOf, or leave out strict"
                )
                return False
        return len(numbered) <= MAX_ALTERNATIVES

    def unique_items(self, value: Any) -> bool:
        node = self.node
        least, most = node.get("minItems", 0), node.get("maxItems")
        if value is not True or most in (0, 1):
            return True
        values = finite(node.get("items"), self.root) if "prefixItems" not in node else None
        if values is None or not isinstance(least, int) or not isinstance(most, int | None):
            return False
        lengths = range(least, min(len(values), len(values) if most is None else most) + 1)
        if len(values) > MAX_ARRANGED or sum(perm(len(values), n) for n in lengths) > MAX_ARRANGED:
            return False
        for word in ("items", "minItems", "maxItems"):
            node.pop(word, None)
        self._also({"anyOf": [_row(row) for n in lengths for row in permutations(values, n)]})
        return True

    def contains(self, value: Any) -> bool:
        node = self.node
        least, most = node.pop("minContains", 1), node.pop("maxContains", None)
        if least == 0 and most is None:
            return True
        if not isinstance(least, int) or not isinstance(most, int | None):
            return False
        if value in (True, {}):
            node["minItems"] = max(least, node.get("minItems", 0))
            if most is not None:
                node["maxItems"] = min(most, node.get("maxItems", most))
            return True
        items, longest = node.get("items", True), node.get("maxItems")
        if not isinstance(longest, int) or longest > MAX_PLACES or (least, most) != (1, None) or "prefixItems" in node:
            return False
        found = {"allOf": [items, value]}
        self._also({"anyOf": [{"prefixItems": [items] * i + [found], "minItems": i + 1} for i in range(longest)]})
        return True

    def property_names(self, value: Any) -> bool:
        if value in (True, {}, {"type": "string"}):
            return True
        node, names, properties = self.node, resolve(value, self.root), self._properties
        values, others = finite(names, self.root), node.get("additionalProperties", True)
        if "patternProperties" in node:
            return False
        if values is not None:
            keys = [key for key in values if isinstance(key, str)]
            node["properties"] = dict.fromkeys(keys, others) | {k: v if k in keys else False for k, v in properties.items()}
        elif set(names) - {"type", "title", "description"} == {"pattern"} and not properties:
            node["patternProperties"] = {names["pattern"]: others}
        else:
            return False
        node["additionalProperties"] = False
        return True

    def min_properties(self, value: Any) -> bool:
        """The library can count keys only where all that are named are required."""
        optional = self._optional
        if not isinstance(value, int) or not optional:
            self.node["minProperties"] = value
            return True
        missing = value - len(self._required)
        if missing <= 0:
            return True
        if self.node.get("additionalProperties") is not False or comb(len(optional), missing) > MAX_ARRANGED:
            return False
        self._also({"anyOf": [{"required": list(names)} for names in combinations(optional, missing)]})
        return True

    def max_properties(self, value: Any) -> bool:
        optional = self._optional
        if not isinstance(value, int) or not optional:
            self.node["maxProperties"] = value
            return True
        absent = len(self._properties) - value  # that many of them must be
        if self.node.get("additionalProperties") is not False or comb(len(optional), max(absent, 0)) > MAX_ARRANGED:
            return False
        if absent > 0:
            self._also({"anyOf": [{"properties": dict.fromkeys(names, False)} for names in combinations(optional, absent)]})
        return True

    def negation(self, value: Any) -> bool:
        if value is False:
            return True
        node, wrong = self.node, resolve(value, self.root)
        words = set(wrong) - {"title", "description"}
        values, mine = finite(wrong, self.root), finite(node, self.root)
        if values is not None and mine is not None and words <= {"enum", "const"}:
            written = {json.dumps(item, sort_keys=True) for item in values}
            node.pop("const", None)
            node["enum"] = [item for item in mine if json.dumps(item, sort_keys=True) not in written]
        elif words == {"type"}:
            kinds, all_kinds = types(wrong), types(node) or set(TYPES) - {"integer"}
            if "integer" in kinds and "number" not in kinds and "number" in all_kinds:
                return False
            node["type"] = sorted(all_kinds - kinds - ({"integer"} if "number" in kinds else set()))
        elif words == {"required"} and types(node) == {"object"} and len(wrong["required"]) == 1:
            self._also({"properties": {wrong["required"][0]: False}})
        else:
            return False
        return True

    def dependencies(self, value: Any) -> bool:
        if value == {}:
            return True
        if not isinstance(value, dict) or len(value) > MAX_DEPENDENT or types(self.node) != {"object"}:
            return False
        for name, needed in value.items():
            then = {"required": [name, *needed]} if isinstance(needed, list) else {"required": [name], "allOf": [needed]}
            self._also({"anyOf": [{"properties": {name: False}}, then]})
        return True

    def unevaluated_properties(self, value: Any) -> bool:
        """If all evaluated properties are named here, it equals additionalProperties."""
        if value is True:
            return True
        if self.node.keys() & {"allOf", "anyOf", "$ref", "additionalProperties"}:
            return False
        self.node["additionalProperties"] = value
        return True

    def unevaluated_items(self, value: Any) -> bool:
        if value is not True and self.node.keys() & {"allOf", "anyOf", "$ref"}:
            return False
        self.node.setdefault("items", value)
        return True

    def condition(self, value: Any) -> bool:
        """Write `if` as two alternatives: the condition and `then`, or its negation and `else`."""
        holds, fails = (self.node.pop(word, True) for word in ("then", "else"))
        if value is None or (holds in (True, {}) and fails in (True, {})):
            return True
        others = self._negations(value)
        if others is None:
            return False
        self._also({"anyOf": [{"allOf": [value, holds]}, *({"allOf": [other, fails]} for other in others)]})
        return True

    def _negations(self, value: Any) -> list[Schema] | None:
        """Return the negation of a schema if it can be expressed: a property has another of its values."""
        if types(self.node) != {"object"} or not isinstance(value, dict) or types(value) - {"object"}:
            return None
        tested, needed = _dict(value.get("properties")), _names(value.get("required"))
        if not value.keys() <= {"type", "properties", "required", *_NOTES} or len(tested) > MAX_DEPENDENT:
            return None
        ways: list[Schema] = [{"properties": {name: False}} for name in needed if name not in tested]
        for name, test in tested.items():
            mine, expected = finite(self._properties.get(name), self.root), finite(test, self.root)
            if mine is None or expected is None or not test.keys() <= {"const", "enum", *_NOTES}:
                return None
            if any(isinstance(item, float | list | dict) for item in (*mine, *expected)):
                return None  # 1.0 is 1
            written = {json.dumps(item) for item in expected}
            rest = [item for item in mine if json.dumps(item) not in written]
            if name in needed:
                ways.append({"properties": {name: {"enum": rest} if rest else False}})
            elif rest:
                ways.append({"properties": {name: {"enum": rest}}, "required": [name]})
        return ways

    # ---- the properties known so far

    @property
    def _properties(self) -> Schema:
        return _dict(self.node.get("properties"))

    @property
    def _required(self) -> list[str]:
        return _names(self.node.get("required"))

    @property
    def _optional(self) -> list[str]:
        return [name for name in self._properties if name not in self._required]

    def _also(self, more: Schema) -> None:
        """Adds what must hold, too."""
        if more.keys() & self.node.keys():
            self.node["allOf"] = [*self.node.get("allOf", ()), more]
        else:
            self.node |= more


def _says_nothing(*_: Any) -> bool:
    """Without the keyword that it belongs to."""
    return True


def _cannot_be_held(*_: Any) -> bool:
    return False


# in this order: some leave words that later ones take up
_REWRITES: dict[str, Callable[[Rewriting, Any], bool]] = {
    "$schema": Rewriting.dialect,
    "format": Rewriting.format,
    "oneOf": Rewriting.one_of,
    "if": Rewriting.condition,
    "then": _says_nothing,
    "else": _says_nothing,
    "contains": Rewriting.contains,
    "minContains": _says_nothing,
    "maxContains": _says_nothing,
    "uniqueItems": Rewriting.unique_items,
    "unevaluatedItems": Rewriting.unevaluated_items,
    "unevaluatedProperties": Rewriting.unevaluated_properties,
    "propertyNames": Rewriting.property_names,
    "minProperties": Rewriting.min_properties,
    "maxProperties": Rewriting.max_properties,
    "not": Rewriting.negation,
    "dependentRequired": Rewriting.dependencies,
    "dependentSchemas": Rewriting.dependencies,
    "dependencies": Rewriting.dependencies,
    "$dynamicRef": _cannot_be_held,
    "$recursiveRef": _cannot_be_held,
}


def _row(values: Sequence[Any]) -> Schema:
    items = [{"const": value} for value in values]
    return {"prefixItems": items, "items": False, "minItems": len(items), "maxItems": len(items)} if items else {"maxItems": 0}


# ---- keywords of schemas


def disjoint(one: Schema, other: Schema, root: Schema, depth: int = 0) -> bool:
    """Is it plain that nothing satisfies both?"""
    kinds, others = types(one), types(other)
    if kinds and others and not _overlap(kinds, others):
        return True
    values, other_values = _written_values(one), _written_values(other)
    if values is not None and other_values is not None:
        return not values & other_values
    if kinds != {"object"} or others != {"object"} or depth > MAX_COMPARED:
        return False
    both = set(_names(one.get("required"))) & set(_names(other.get("required")))
    for name in sorted(both)[:MAX_ALTERNATIVES]:
        mine, theirs = (resolve(_dict(schema.get("properties")).get(name, {}), root) for schema in (one, other))
        if disjoint(mine, theirs, root, depth + 1):
            return True
    return False


def _names(value: Any) -> list[str]:
    return [name for name in value if isinstance(name, str)] if isinstance(value, list) else []


def _dict(value: Any) -> Schema:
    return value if isinstance(value, dict) else {}


def types(schema: Schema) -> set[str]:
    kinds = schema.get("type", ())
    return {kinds} if isinstance(kinds, str) else {kind for kind in kinds if isinstance(kind, str)}


def _overlap(types: set[str], others: set[str]) -> bool:
    wide = [kinds | ({"number"} if "integer" in kinds else set()) for kinds in (types, others)]
    return bool(wide[0] & wide[1])


def _written_values(schema: Schema) -> set[str] | None:
    """The values it names, as text; None if it names none."""
    named = [schema["const"]] if "const" in schema else schema.get("enum")
    return None if not isinstance(named, list) else {json.dumps(value, sort_keys=True) for value in named}


def finite(schema: Any, root: Schema) -> list[Any] | None:
    """All values there are, each once; None if they are not listed."""
    resolved = resolve(schema, root)
    if "const" in resolved:
        return [resolved["const"]]
    if isinstance(resolved.get("enum"), list):
        return list({json.dumps(value, sort_keys=True): value for value in resolved["enum"]}.values())
    plain = {"type", "title", "description"}
    if resolved.get("type") in ("boolean", "null") and set(resolved) <= plain:
        return [True, False] if resolved["type"] == "boolean" else [None]
    return None


def resolve(schema: Any, root: Schema) -> Schema:
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
MAX_VISITS = 20_000  # to schemas, to find out who speaks of one object; the rest stays open
Place = tuple[str | int, ...]


@dataclass
class Preparation:
    """Of one schema. `dropped` are the keywords that were left out, each with its place."""

    root: Schema
    closed: bool = True
    strict: bool = False
    dropped: list[tuple[Place, str]] = field(default_factory=list)
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
            self.dropped.append((place, keyword))
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
        names, patterns, constrains = self._keys(node, set())
        if constrains or not names:
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
        if not isinstance(node, dict) or self._visits > MAX_VISITS:
            return [], [], self._visits > MAX_VISITS
        names, patterns = list(_dict(node.get("properties"))), list(_dict(node.get("patternProperties")))
        constrains = "properties" in node and not isinstance(node["properties"], dict)
        constrains = constrains or any(word in node for word in _SAID)
        inner = [part for word in ("allOf", "anyOf", "oneOf") for part in _list(node.get(word))]
        inner += [node.get("then"), node.get("else"), *_dict(node.get("dependentSchemas")).values()]
        reference = node.get("$ref")
        if isinstance(reference, str) and reference not in seen:
            seen.add(reference)
            inner.append(resolve({"$ref": reference}, self.root))
        empty = "properties" in node and not names
        for part in inner:
            more, others, other_constrains = self._keys(part, seen)
            names, patterns, constrains = names + more, patterns + others, constrains or other_constrains
        return names or ([""] if empty else []), patterns, constrains


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
    closed_by = params.disable_additional_properties
    closed = params.json is None or (closed if closed_by is None else closed_by)
    found: dict[str, None] = {}
    for schema in _schemas(params):
        preparation = Preparation(schema, closed)
        try:
            preparation.make()
        except GrammarError:
            continue
        found |= dict.fromkeys(keyword for _, keyword in preparation.dropped)
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
