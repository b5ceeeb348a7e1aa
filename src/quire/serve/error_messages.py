"""Errors in the words of the request: they name the field that the client sent.

of a grammar                 structured_outputs: $.items.properties.parameters.properties.a: Invalid type
as a chat request has it     tools[0].function.parameters: $.properties.a: Invalid type
as its protocol has it       tools[0].input_schema: $.properties.a: Invalid type
"""

import re
from dataclasses import dataclass

from quire.serve.protocol import GenerationFields
from quire.serve.tools import ToolUse
from quire.types.errors import RequestError
from quire.types.structured import FIELD

Terms = tuple[tuple[str, str], ...]  # patterns of fields as a chat request has them, and what they are called instead

# places in the schema that makes a model call some tool (`ToolUse.answer_schema`)
_TOOL = re.compile(r"\$\.items(?:\.anyOf\[(\d+)\])?\.properties\.parameters\b")
_DEFINITION = re.compile(r"\$\['\$defs'\]\['tool(\d+)[.:]([^']*)'\]")


@dataclass(frozen=True)
class FieldNames:
    field: str = FIELD  # where the grammar of the request came from, in full
    parameter: str = FIELD  # as OpenAI's `param` has it: not in full in a chat
    terms: Terms = ()

    def of(self, error: RequestError) -> RequestError:
        message, parameter = str(error), error.parameter
        if parameter == FIELD:
            message, parameter = self._placed(re.sub(rf"^{FIELD}(\.(json|structural_tag))?\b", "", message))
        for field, own in self.terms:
            pattern = re.compile(rf"{field}(?![\w-])")
            message = pattern.sub(own, message, count=1) if pattern.match(message) else message
            parameter = pattern.sub(own, parameter, count=1) if parameter and pattern.match(parameter) else parameter
        return type(error)(message, parameter)

    def _placed(self, rest: str) -> tuple[str, str]:
        """`rest` of a message, behind the name of the field."""
        place = (_TOOL.search(rest) or _DEFINITION.search(rest)) if self.field == "tools" else None
        if place is None:
            return self.field + rest, self.parameter
        field, root = f"tools[{place[1] or 0}].function.parameters", "$"
        if place.re is _DEFINITION:
            root = f"$['$defs']['{place[2]}']"
        return f"{field}{rest[: place.start()]}{root}{rest[place.end() :]}", field


def field_names_of(request: GenerationFields, use: ToolUse | None = None, terms: Terms = ()) -> FieldNames:
    if use is not None and use.forced:
        field = "tools"
        if use.name is not None:
            field = f"tools[{list(use.schemas or ()).index(use.name)}].function.parameters"
        return FieldNames(field, field, terms)
    form = request.response_format
    if form is None or request.structured_outputs is not None:
        return FieldNames(terms=terms)
    field = "response_format.json_schema.schema" if form.get("type") == "json_schema" else "response_format"
    return FieldNames(field, field if terms else "response_format", terms)
