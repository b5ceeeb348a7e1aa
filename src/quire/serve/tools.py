"""The tools of a request: what was asked for, and the JSON schema that makes a model call them."""

from dataclasses import dataclass
from typing import Any, Literal

from quire.serve.limits import refuse_more
from quire.types.errors import InvalidParameter, NotSupported

LONGEST_NAME = 256
_DEFINITIONS = {"$defs": ".", "definitions": ":"}  # where a schema keeps what it refers to, and a mark for each
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}

Mode = Literal["none", "auto", "required", "named"]


@dataclass(frozen=True)
class ToolUse:
    """`schemas`: the parameters of every tool, by name. `name`: the one to be called, if that was said.

    Those of the tools in `strict` are refused if they say more than a grammar can hold to.
    """

    mode: Mode = "none"
    schemas: dict[str, dict[str, Any]] | None = None
    name: str | None = None
    parallel: bool = True
    strict: frozenset[str] = frozenset()

    @property
    def forced(self) -> bool:
        return self.mode in ("required", "named")

    def answer_schema(self) -> dict[str, Any]:
        """What the whole answer must be when tools must be called."""
        schemas = self.schemas or {}
        if self.name is not None:
            return schemas[self.name]
        calls, definitions = [], dict[str, Any]()
        for i, (name, schema) in enumerate(schemas.items()):
            part, needed = _as_part(schema, f"tool{i}")
            definitions |= needed
            calls.append(
                {
                    "type": "object",
                    "properties": {"name": {"const": name}, "parameters": part},
                    "required": ["name", "parameters"],
                    "additionalProperties": False,
                }
            )
        answer: dict[str, Any] = {"type": "array", "minItems": 1, "items": calls[0] if len(calls) == 1 else {"anyOf": calls}}
        if not self.parallel:
            answer["maxItems"] = 1
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
    strict = frozenset(tool["function"]["name"] for tool in tools if tool["function"].get("strict") is True)
    if choice in ("none", "auto", "required"):
        return ToolUse(choice, schemas, parallel=together, strict=strict)
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
    return ToolUse("named", schemas, name, parallel=together, strict=strict)


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


def _as_part(schema: dict[str, Any], key: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A tool's schema as a part of a larger one, and what that has to have in its $defs, under names that begin with `key`.

    References point to the root of a document, so what they point to must move there with them.
    """
    own = {name: value for name, value in schema.items() if name not in (*_DEFINITIONS, "$schema", "$id")}
    part = _moved(own, key)
    definitions = {
        f"{key}{mark}{name}": _moved(definition, key)
        for word, mark in _DEFINITIONS.items()
        for name, definition in schema.get(word, {}).items()
    }
    return part, {key: part, **definitions} if _refers_to(f"#/$defs/{key}", [part, definitions]) else definitions


def _moved(value: Any, key: str) -> Any:
    if isinstance(value, list):
        return [_moved(item, key) for item in value]
    if not isinstance(value, dict):
        return value
    out = {name: _moved(item, key) for name, item in value.items()}
    reference = out.get("$ref")
    if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
        out["$ref"] = f"#/$defs/{key}{reference[1:]}"
        for word, mark in _DEFINITIONS.items():
            if reference.startswith(f"#/{word}/"):
                out["$ref"] = f"#/$defs/{key}{mark}{reference.removeprefix(f'#/{word}/')}"
    return out


def _refers_to(target: str, value: Any) -> bool:
    """Is there a reference to this, or to something in it?"""
    if isinstance(value, list):
        return any(_refers_to(target, item) for item in value)
    if not isinstance(value, dict):
        return False
    reference = value.get("$ref")
    found = isinstance(reference, str) and (reference == target or reference.startswith(f"{target}/"))
    return found or any(_refers_to(target, item) for item in value.values())
