"""response_format and structured_outputs → what the answer must look like."""

from typing import Any

from quire.serve.protocol.fields import GenerationFields
from quire.types.errors import InvalidParameter
from quire.types.structured import StructuredOutputsParams, as_structured_outputs

FORMATS = ("text", "json_object", "json_schema", "structural_tag")


def structured_outputs(request: GenerationFields) -> StructuredOutputsParams | None:
    """None: the answer is free."""
    wanted = None if request.response_format is None else from_response_format(request.response_format)
    if request.structured_outputs is None:
        return wanted
    if wanted is not None:
        raise InvalidParameter(
            "response_format and structured_outputs both constrain the answer: leave one out", "response_format"
        )
    return as_structured_outputs(request.structured_outputs)


def from_response_format(given: dict[str, Any]) -> StructuredOutputsParams | None:
    match given.get("type"):
        case "text":
            return None
        case "json_object":
            return StructuredOutputsParams(json_object=True)
        case "json_schema":
            wrapper = given.get("json_schema")
            schema = wrapper.get("schema") if isinstance(wrapper, dict) else None
            if not isinstance(schema, dict):
                raise InvalidParameter(
                    "response_format of type json_schema needs the schema, an object, at json_schema.schema: "
                    '{"type": "json_schema", "json_schema": {"name": "...", "schema": {...}}}',
                    "response_format",
                )
            return StructuredOutputsParams(json=schema)
        case "structural_tag":
            return StructuredOutputsParams(structural_tag=given)
        case other:
            raise InvalidParameter(
                f"response_format.type must be one of {', '.join(FORMATS)}; got {other!r}", "response_format"
            )
