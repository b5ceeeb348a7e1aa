"""StructuredOutputsParams: what can be wrong with its form."""

import msgspec
import pytest

from quire import SamplingParams, StructuredOutputsParams
from quire.types.errors import InvalidParameter


class PersonType(type):
    """As Pydantic's models are made."""

    def model_json_schema(cls):
        return {}


class Person(metaclass=PersonType):
    pass


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "exactly one of json, regex, choice, grammar, json_object, structural_tag; got none"),
        ({"json": {}, "regex": "a"}, "got json and regex"),
        ({"json_object": False}, "got none"),
        ({"json": 3}, "structured_outputs.json must be a JSON schema"),
        ({"json": Person}, "got PersonType; give Person.model_json_schema()"),
        ({"regex": ["a"]}, "structured_outputs.regex"),
        ({"choice": []}, "structured_outputs.choice"),
        ({"choice": "yes"}, "structured_outputs.choice"),
        ({"choice": ["a", 1]}, "structured_outputs.choice"),
        ({"grammar": 1}, "structured_outputs.grammar"),
        ({"structural_tag": 1}, "structured_outputs.structural_tag"),
        ({"regex": "a", "disable_any_whitespace": True}, "disable_any_whitespace is for json"),
        ({"json": {}, "disable_any_whitespace": True, "whitespace_pattern": " "}, "leave one of them out"),
        ({"json": {}, "disable_additional_properties": "yes"}, "disable_additional_properties"),
        ({"regex": "a", "starts_after": []}, "starts_after"),
    ],
)
def test_what_is_wrong_is_named(fields, words):
    with pytest.raises(InvalidParameter) as caught:
        StructuredOutputsParams(**fields)
    assert words in str(caught.value) and caught.value.parameter == "structured_outputs"


def test_sampling_params_take_it_as_an_object_too():
    assert SamplingParams(structured_outputs={"choice": ["a"]}).structured_outputs == StructuredOutputsParams(choice=["a"])
    with pytest.raises(InvalidParameter, match="has no 'guided'"):
        SamplingParams(structured_outputs={"guided": 1})
    with pytest.raises(InvalidParameter, match="must be StructuredOutputsParams"):
        SamplingParams(structured_outputs="json")


def test_it_crosses_processes_unchanged():
    params = SamplingParams(structured_outputs=StructuredOutputsParams(json={"type": "object"}, starts_after=[3, 4]))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


def test_a_number_too_large_to_be_passed_on_is_refused_with_a_way_out():
    with pytest.raises(InvalidParameter, match=r"structured_outputs\.json .* give it as text"):
        _ = StructuredOutputsParams(json={"const": 10**30}).size
    assert StructuredOutputsParams(json='{"const": 1000000000000000000000000000000}').size > 0
