"""The tools of a request: what was asked for, and the JSON schema that makes a model call them."""

from dataclasses import dataclass
from typing import Any, Literal

from quire.serve.limits import refuse_more
from quire.types.errors import InvalidParameter, NotSupported

LONGEST_NAME = 256
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}

Mode = Literal["none", "auto", "required", "named"]


@dataclass(frozen=True)
class ToolUse:
    """`schemas`: the parameters of every tool, by name. `name`: the one to be called, if that was said."""

    mode: Mode = "none"
    schemas: dict[str, dict[str, Any]] | None = None
    name: str | None = None
    parallel: bool = True

    @property
    def forced(self) -> bool:
        return self.mode in ("required", "named")

    def answer_schema(self) -> dict[str, Any]:
        """What the whole answer must be when tools must be called."""
        schemas = self.schemas or {}
        if self.name is not None:
            return schemas[self.name]
        calls = [
            {
                "type": "object",
                "properties": {"name": {"const": name}, "parameters": _without_definitions(schema)},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
            for name, schema in schemas.items()
        ]
        answer: dict[str, Any] = {"type": "array", "minItems": 1, "items": calls[0] if len(calls) == 1 else {"anyOf": calls}}
        if not self.parallel:
            answer["maxItems"] = 1
        definitions = _definitions(schemas)
        return {**answer, "$defs": definitions} if definitions else answer


def read_tool_use(tools: Any, choice: Any, parallel: bool | None) -> ToolUse:
    """Checks `tools` and `tool_choice` of a chat request."""
    if tools == []:
        raise InvalidParameter("tools must not be empty: leave it out when there are none", "tools")
    if choice is None:
        choice = "auto" if tools else "none"
    if not tools:
        if choice != "none":
            raise InvalidParameter("tool_choice needs tools", "tool_choice")
        return ToolUse()
    schemas = read_schemas(tools)
    together = parallel is not False
    if choice in ("none", "auto", "required"):
        return ToolUse(choice, schemas, parallel=together)
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise InvalidParameter(
            'tool_choice must be "none", "auto", "required" or {"type": "function", "function": {"name": ...}}, '
            f"got {choice!r:.200}",
            "tool_choice",
        )
    if name not in schemas:
        raise InvalidParameter(f"tool_choice names {name!r:.100}, which is none of the tools", "tool_choice")
    return ToolUse("named", schemas, name, parallel=together)


def read_schemas(tools: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    schemas: dict[str, dict[str, Any]] = {}
    for i, tool in enumerate(tools):
        where = f"tools[{i}]"
        if tool.get("type", "function") != "function":
            raise NotSupported(f"{where}: tools are functions here, not {tool.get('type')!r:.80}", "tools")
        function = tool.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(function, dict) or not isinstance(name, str) or not name.strip():
            raise InvalidParameter(f"{where}.function needs a name", "tools")
        refuse_more(f"{where}.function.name", len(name), LONGEST_NAME, "characters")
        if name in schemas:
            raise InvalidParameter(f"{where}: there are two tools with the name {name!r:.100}", "tools")
        schemas[name] = _parameters(function.get("parameters"), where)
    return schemas


def _parameters(schema: Any, where: str) -> dict[str, Any]:
    if schema is None or schema == {}:
        return NO_PARAMETERS
    if not isinstance(schema, dict):
        raise InvalidParameter(f"{where}.function.parameters must be a JSON schema, got {schema!r:.100}", "tools")
    if schema.get("type", "object") != "object":
        raise InvalidParameter(f'{where}.function.parameters must have the type "object"', "tools")
    return {"type": "object", **schema}


def _definitions(schemas: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """References point to the root of a schema, so what they point to must move there with them."""
    found: dict[str, Any] = {}
    for schema in schemas.values():
        for name, definition in {**schema.get("definitions", {}), **schema.get("$defs", {})}.items():
            if found.setdefault(name, definition) != definition:
                raise InvalidParameter(
                    f"two tools define {name!r:.100} differently in $defs: give the definitions different names", "tools"
                )
    return found


def _without_definitions(schema: dict[str, Any]) -> dict[str, Any]:
    """A tool's schema as a part of a larger one."""
    kept = {key: value for key, value in schema.items() if key not in ("$defs", "definitions", "$schema", "$id")}
    moved: dict[str, Any] = _moved(kept)
    return moved


def _moved(value: Any) -> Any:
    if isinstance(value, list):
        return [_moved(item) for item in value]
    if not isinstance(value, dict):
        return value
    out = {key: _moved(item) for key, item in value.items()}
    reference = out.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/definitions/"):
        out["$ref"] = "#/$defs/" + reference.removeprefix("#/definitions/")
    return out
