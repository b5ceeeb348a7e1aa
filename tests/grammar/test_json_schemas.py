"""JSON schemas: which are closed, which keywords are held to, and what is told of the others."""

import datetime
import decimal
import enum
import ipaddress
import json
import pathlib
import re
import time
import uuid
from functools import cache
from typing import Annotated, Any, Literal

import jsonschema
import numpy as np
import pydantic
import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from quire.features.structured.grammar.backend import GrammarError
from quire.features.structured.grammar.llguidance import LIMITS, to_source
from quire.features.structured.grammar.schema import Preparation, unenforced
from quire.types.errors import InvalidParameter
from quire.types.structured import StructuredOutputsParams


class Bytes:
    tokens = [bytes([i]) for i in range(256)] + [b"<end>"]
    eos_token_id, bos_token_id, special_token_ids = 256, None, [256]

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


@cache
def tokenizer() -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(Bytes()), eos_token=[256])


def matcher(schema, **options) -> LLMatcher:
    source = to_source(StructuredOutputsParams(json=schema, disable_any_whitespace=True, **options))
    made = LLMatcher(tokenizer(), source, log_level=0, limits=LIMITS)
    assert not made.is_error(), (schema, source, made.get_error())
    return made


def accepts(schema, value, **options) -> bool:
    made = matcher(schema, **options)
    text = list(json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode())
    return made.try_consume_tokens(text) == len(text) and made.is_accepting()


def walk(schema, seed: int) -> Any:
    """A random instance; None: it did not end."""
    made, tokens, choose = matcher(schema), [], np.random.default_rng(seed)
    for _ in range(400):
        options = np.flatnonzero(np.unpackbits(np.frombuffer(made.compute_bitmask(), np.uint8), bitorder="little"))
        ending = [i for i in options if i in (*b'"}],.', 256)]
        token = int(choose.choice(ending if ending and choose.random() < 0.5 else options))
        if token == 256:
            return json.loads(bytes(tokens))
        tokens.append(token)
        assert made.consume_token(token)
    return None


def told(schema, **options) -> list[str]:
    return unenforced(StructuredOutputsParams(json=schema, **options))


# ---- Pydantic's own


class Color(enum.StrEnum):
    RED = "red"
    BLUE = "blue"


class Cat(pydantic.BaseModel):
    kind: Literal["cat"]
    lives: int = 9


class Dog(pydantic.BaseModel):
    kind: Literal["dog"]
    color: Color | None = None


class Tree(pydantic.BaseModel):
    value: int
    children: "list[Tree]" = []


Field = pydantic.Field
PYDANTIC = {
    "Path": pathlib.Path,
    "bytes": bytes,
    "SecretStr": pydantic.SecretStr,
    "UUID": uuid.UUID,
    "UUID4": pydantic.UUID4,
    "IPvAnyAddress": pydantic.IPvAnyAddress,
    "IPv6Network": ipaddress.IPv6Network,
    "set[bool]": set[bool],
    "set[Enum]": set[Color],
    "dict[Enum]": dict[Color, int],
    "dict[int]": dict[int, str],
    "dict[pattern]": dict[pydantic.constr(pattern="^a+$"), int],
    "dict of some": Annotated[dict[str, int], Field(min_length=1, max_length=2)],
    "Decimal": decimal.Decimal,
    "datetime": datetime.datetime,
    "date": datetime.date,
    "time": datetime.time,
    "timedelta": datetime.timedelta,
    "Url": pydantic.HttpUrl,
    "Dsn": pydantic.PostgresDsn,
    "conlist": pydantic.conlist(int, min_length=1, max_length=3),
    "union": Annotated[Cat | Dog, Field(discriminator="kind")],
    "recursive": Tree,
    "Literal": Literal["a", 1, None],
    "tuple": tuple[int, str],
    "tuple of any length": tuple[bool, ...],
    "Optional": Cat | None,
    "Annotated int": Annotated[int, Field(gt=0, multiple_of=3)],
    "Annotated float": Annotated[float, Field(ge=0, lt=1)],
    "constr": pydantic.constr(pattern="^a+$", min_length=2),
    "Json": pydantic.Json[list[int]],
    "Pattern": re.Pattern,
    "Base64": pydantic.Base64Bytes,
    "ByteSize": pydantic.ByteSize,
}


@pytest.mark.parametrize("name", PYDANTIC)
def test_schemas_of_pydantic_compile_and_are_held_to(name):
    schema = pydantic.TypeAdapter(PYDANTIC[name]).json_schema()
    assert told(schema) == []
    complete = 0
    for seed in range(4):
        value = walk(schema, seed)
        if value is not None:
            jsonschema.validate(value, schema)
            complete += 1
    assert complete or name in ("Annotated int", "recursive", "tuple of any length"), "some of them end"


@pytest.mark.parametrize("kind", [set[int], frozenset[str], list[set[str]]])
def test_sets_of_anything_are_told_of(kind):
    schema = pydantic.TypeAdapter(kind).json_schema()
    assert told(schema) == ["uniqueItems"] and isinstance(walk(schema, 1), list | None)


# ---- held to

UUID = "123e4567-e89b-42d3-a456-426614174000"
A_OR_B = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
KINDS = {
    "type": "object",
    "properties": {"kind": {"enum": ["a", "b", "c"]}, "x": {"type": "integer"}, "y": {"type": "integer"}},
}
HELD = [
    ({"type": "array", "items": {"enum": ["a", "b", "c"]}, "uniqueItems": True}, [[], ["a"], ["c", "a"]], [["a", "a"]]),
    ({"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True, "minItems": 2}, [[1, 2], [2, 1]], [[], [1], [1, 1]]),
    ({"type": "array", "uniqueItems": True, "maxItems": 1}, [[], [3]], [[3, 3]]),
    ({"type": "array", "items": {"type": "integer"}, "uniqueItems": False}, [[1, 1]], [["a"]]),
    ({"type": "array", "items": {"type": ["integer", "null"]}, "contains": {"type": "integer"}, "maxItems": 3},
     [[1], [None, 1], [None, None, 2], [1, 2, 3]], [[], [None], [None, None, None], [None, None, None, 1]]),
    ({"type": "array", "items": {"type": "integer"}, "contains": True, "minContains": 2}, [[1, 2]], [[1]]),
    ({"type": "array", "items": {"type": "integer"}, "contains": {"const": 1}, "minContains": 0}, [[], [2]], [["a"]]),
    ({"type": "object", "propertyNames": {"enum": ["x", "y"]}, "additionalProperties": {"type": "integer"}},
     [{}, {"x": 1}, {"x": 1, "y": 2}], [{"z": 1}, {"x": "a"}]),
    ({"type": "object", "propertyNames": {"pattern": "^x+$"}}, [{}, {"xx": [1]}], [{"y": 1}]),
    ({**A_OR_B, "minProperties": 1}, [{"a": 1}, {"b": 1}, {"a": 1, "b": 2}], [{}]),
    ({**A_OR_B, "maxProperties": 1}, [{}, {"a": 1}, {"b": 1}], [{"a": 1, "b": 2}]),
    ({**A_OR_B, "dependentRequired": {"a": ["b"]}}, [{}, {"b": 1}, {"a": 1, "b": 2}], [{"a": 1}]),
    ({**A_OR_B, "dependentSchemas": {"a": {"required": ["b"]}}}, [{}, {"b": 1}, {"a": 1, "b": 2}], [{"a": 1}]),
    ({**A_OR_B, "dependencies": {"b": ["a"]}}, [{}, {"a": 1}, {"a": 1, "b": 2}], [{"b": 1}]),
    ({**A_OR_B, "not": {"required": ["a"]}}, [{}, {"b": 1}], [{"a": 1}]),
    ({"enum": ["a", "b", 1], "not": {"const": "b"}}, ["a", 1], ["b"]),
    ({"not": {"type": ["object", "array", "number"]}}, ["a", None, True], [1, 2.5, {}, []]),
    ({**A_OR_B, "unevaluatedProperties": False}, [{"a": 1}], [{"c": 1}]),
    ({"type": "array", "prefixItems": [{"const": 1}], "unevaluatedItems": False}, [[1], []], [[1, 2]]),
    ({"oneOf": [True, False]}, [1, "a"], []),
    ({"oneOf": [False, {"type": "string"}]}, ["a"], [1]),
    ({"anyOf": [False, {"type": "integer"}]}, [1], ["a"]),
    ({"oneOf": [{"const": "a"}, {"const": "b"}], "anyOf": [{"const": "b"}, {"const": "c"}]}, ["b"], ["a", "c"]),
    ({"type": "string", "format": "uuid4"}, [UUID], [UUID.replace("-4", "-1"), "x"]),
    ({"type": "string", "format": "ipvanyaddress"}, ["127.0.0.1", "::1"], ["localhost"]),
    ({"type": "string", "format": "of my own"}, ["anything"], [1]),
    ({"$schema": "mine", "type": "integer"}, [1], ["a"]),
    ({"type": "integer", "if": {"minimum": 3}}, [1], ["a"]),
    ({**KINDS, "if": {"properties": {"kind": {"const": "a"}}}, "then": {"required": ["x"]}, "else": {"required": ["y"]}},
     [{"x": 1}, {"kind": "a", "x": 1}, {"kind": "b", "y": 1}, {"kind": "c", "y": 1}, {"kind": "b", "x": 1, "y": 2}],
     [{}, {"y": 1}, {"kind": "a"}, {"kind": "a", "y": 1}, {"kind": "b"}, {"kind": "b", "x": 1}, {"kind": "a", "x": 1, "z": 1}]),
    ({**KINDS, "if": {"properties": {"kind": {"enum": ["a", "b"]}}, "required": ["kind"]},
      "then": {"properties": {"x": {"const": 5}}}},
     [{}, {"x": 1}, {"kind": "a"}, {"kind": "a", "x": 5}, {"kind": "c", "x": 1}],
     [{"kind": "a", "x": 1}, {"kind": "b", "x": 4}]),
    ({**KINDS, "if": {"required": ["x"]}, "then": {"required": ["y"]}, "else": {"properties": {"y": False}}},
     [{}, {"kind": "a"}, {"x": 1, "y": 1}], [{"x": 1}, {"y": 1}]),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "good", "bad"), HELD, ids=lambda part: str(part)[:60])
def test_what_can_be_put_in_other_words_is_held_to(schema, good, bad):
    assert all(accepts(schema, value) for value in good)
    assert not any(accepts(schema, value) for value in bad)
    assert told(schema) == []
    matcher(schema, strict=True)
    for value in good:
        jsonschema.validate(value, {**schema, "$schema": "https://json-schema.org/draft/2020-12/schema"})


NOT_HELD = [
    ("uniqueItems", {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}),
    ("contains", {"type": "array", "contains": {"type": "integer"}}),
    ("propertyNames", {"type": "object", "propertyNames": {"minLength": 3}}),
    ("not", {"type": "string", "not": {"pattern": "a"}}),
    ("if", {"if": {"type": "string"}, "then": {"minLength": 2}}),
    ("if", {**KINDS, "if": {"properties": {"x": {"const": 1}}}, "then": {"required": ["y"]}}),
    ("if", {**KINDS, "if": {"properties": {"kind": {"pattern": "a"}}}, "then": {"required": ["y"]}}),
    ("minProperties", {**A_OR_B, "additionalProperties": True, "minProperties": 1}),
    ("dependentRequired", {**A_OR_B, "dependentRequired": {str(i): ["a"] for i in range(9)}}),
    ("oneOf", {"oneOf": [{"type": "string"}, {"minLength": 2}]}),
    ("unevaluatedProperties", {"allOf": [A_OR_B], "unevaluatedProperties": False}),
    ("$dynamicRef", {"$dynamicRef": "#x"}),
]


@pytest.mark.parametrize(("keyword", "schema"), NOT_HELD, ids=lambda part: str(part)[:30])
def test_what_cannot_be_held_to_is_told_or_refused(keyword, schema):
    inner = {"type": "object", "properties": {"x": {"anyOf": [schema, {"type": "null"}]}}, "required": ["x"]}
    assert told(schema) == told(inner) == [keyword]
    matcher(schema)
    with pytest.raises(GrammarError, match=re.escape(f"$.properties.x.anyOf[0]: {keyword} ")):
        matcher(inner, strict=True)
    tag = {"structures": [{"begin": "<a>", "schema": inner, "end": "</a>"}], "triggers": ["<a"]}
    assert unenforced(StructuredOutputsParams(structural_tag=tag)) == [keyword]
    with pytest.raises(InvalidParameter, match="strict is for json"):
        StructuredOutputsParams(regex="a", strict=True)


# ---- closed


def test_objects_have_no_keys_but_those_they_name():
    inner = {"type": "object", "properties": {"b": {"type": "integer"}}}
    schema = {
        "type": "object",
        "properties": {"a": {"type": "array", "items": inner}, "o": {"anyOf": [inner, {"type": "null"}]}},
    }
    assert accepts(schema, {"a": [{"b": 1}], "o": {"b": 2}}) and accepts(schema, {})
    for wrong in ({"z": 1}, {"a": [{"z": 1}]}, {"o": {"z": 1}}):
        assert not accepts(schema, wrong) and accepts(schema, wrong, disable_additional_properties=False)
    assert accepts({"type": "object"}, {"z": 1}) and accepts({}, {"z": 1}), "one that names no keys may have any"
    assert accepts({**inner, "additionalProperties": True}, {"z": 1})
    assert not accepts({"type": "object", "properties": {}}, {"z": 1})
    assert not accepts({"type": "array", "prefixItems": [{"type": "integer"}]}, [1, 2])


def test_what_open_objects_are_not_held_to_is_told():
    schema = {"type": "object", "properties": {"a": {}, "b": {}}, "minProperties": 1}
    assert not accepts(schema, {}) and told(schema) == []
    assert accepts(schema, {}, disable_additional_properties=False)
    assert told(schema, disable_additional_properties=False) == ["minProperties"]
    silent = StructuredOutputsParams(json=schema)
    assert unenforced(silent, closed=False) == ["minProperties"]
    with pytest.raises(GrammarError, match="minProperties"):
        matcher(schema, strict=True, disable_additional_properties=False)


def test_who_speaks_of_one_object_closes_it_together():
    base = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    more = {"properties": {"b": {"type": "integer"}}, "required": ["b"]}
    schemas = [
        {"allOf": [base, more]},
        {**base, "allOf": [more]},
        {"$defs": {"base": base}, "allOf": [{"$ref": "#/$defs/base"}, more]},
        {"$defs": {"base": base}, "$ref": "#/$defs/base", **more},
        {**base, "anyOf": [more, {"properties": {"c": {"type": "integer"}}, "required": ["c"]}]},
    ]
    for schema in schemas:
        assert accepts(schema, {"a": 1, "b": 2}), schema
        assert not accepts(schema, {"a": 1, "b": 2, "z": 3}) and not accepts(schema, {"a": 1}), schema
    alone = {**schemas[2], "type": "object", "properties": {"self": {"$ref": "#/$defs/base"}}}
    assert accepts(alone, {"a": 1, "b": 2, "self": {"a": 1}}) and not accepts(alone, {"a": 1, "b": 2, "self": {"a": 1, "b": 2}})
    assert Preparation(alone).make() == Preparation(json.loads(json.dumps(alone))).make(), "and the user's schema is left alone"


def test_deep_schemas_are_refused_and_no_more():
    schema: dict[str, Any] = {}
    for _ in range(5000):
        schema = {"items": schema}
    with pytest.raises(GrammarError, match="nested too deeply"):
        to_source(StructuredOutputsParams(json=schema))
    assert told(schema) == []


def test_hostile_schemas_are_looked_over_in_no_time():
    """It is done in the server's own process."""
    node = {
        "type": "object",
        "required": ["x"],
        "properties": {"x": {"$ref": "#/$defs/n"}},
        "oneOf": [{"$ref": "#/$defs/n"}] * 60,
    }
    cyclic = {"$defs": {"n": node}, "$ref": "#/$defs/n"}
    many = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}], "properties": {f"p{i}": {}}} for i in range(600)}
    wide = {"$defs": many, "properties": {f"q{i}": {"$ref": "#/$defs/d0", "properties": {"z": {}}} for i in range(600)}}
    nested: dict[str, Any] = {"type": "integer"}
    for _ in range(40):
        nested = {"type": "array", "items": nested, "contains": {"minItems": 1}, "maxItems": 16}
    odd = {
        "required": 3,
        "properties": [],
        "type": 7,
        "enum": 5,
        "oneOf": [{"required": 1, "type": "object"}] * 2,
        "minProperties": 1,
    }
    begun = time.process_time()
    for schema in (cyclic, wide, nested, odd, {"not": {"required": 1}, "type": "object"}, {"allOf": 3, "properties": {"a": 1}}):
        told(schema)
    assert time.process_time() - begun < 60  # what grows exponentially takes hours
