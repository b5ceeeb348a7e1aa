"""response_format and structured_outputs → what the answer must look like."""

import asyncio
from typing import Any

from starlette.requests import Request

from quire.features.structured.grammar.backend import GrammarError
from quire.features.structured.grammar.schema import Preparation, unenforced
from quire.serve.protocol import GenerationFields
from quire.serve.server import server_of
from quire.serve.tools import ToolUse
from quire.types.errors import InvalidParameter
from quire.types.structured import MOST_GRAMMAR_BYTES, StructuredOutputsParams, as_structured_outputs

UNENFORCED = b"x-quire-schema-unenforced"
SMALL = 1 << 14  # bytes of a schema that is looked over in no time
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


async def tell_unenforced(raw: Request, wanted: StructuredOutputsParams | None, use: ToolUse | None = None) -> None:
    """Puts into the answer's headers what the grammar does not hold to. Raises InvalidParameter for a strict tool's schema."""
    if wanted is None or wanted.size > MOST_GRAMMAR_BYTES:
        return
    closed = server_of(raw).llm.config.args.structured_outputs_config.get("disable_additional_properties", True)
    if wanted.size <= SMALL:
        keywords = _look_over(wanted, use, closed)
    else:
        keywords = await asyncio.to_thread(_look_over, wanted, use, closed)
    if keywords:
        raw.state.told = [(UNENFORCED, ", ".join(keywords).encode("ascii", "replace"))]


def _look_over(wanted: StructuredOutputsParams, use: ToolUse | None, closed: bool) -> list[str]:
    for i, (name, schema) in enumerate((use.schemas or {}).items() if use is not None and use.forced else ()):
        if use is not None and name in use.strict and use.name in (None, name):
            try:
                Preparation(schema, strict=True).make()
            except GrammarError as error:
                field = f"tools[{i}].function.parameters"
                raise InvalidParameter(f"{field}: {error}", field) from None
    return unenforced(wanted, closed)


def from_response_format(given: dict[str, Any]) -> StructuredOutputsParams | None:
    match given.get("type"):
        case "text":
            return None
        case "json_object":
            return StructuredOutputsParams(json_object=True)
        case "json_schema":
            wrapper = given.get("json_schema")
            schema = wrapper.get("schema") if isinstance(wrapper, dict) else None
            if not isinstance(wrapper, dict) or not isinstance(schema, dict):
                raise InvalidParameter(
                    "response_format of type json_schema needs the schema, an object, at json_schema.schema: "
                    '{"type": "json_schema", "json_schema": {"name": "...", "schema": {...}}}',
                    "response_format",
                )
            return StructuredOutputsParams(json=schema, strict=wrapper.get("strict") is True)
        case "structural_tag":
            return StructuredOutputsParams(structural_tag=given)
        case other:
            raise InvalidParameter(
                f"response_format.type must be one of {', '.join(FORMATS)}; got {other!r}", "response_format"
            )
