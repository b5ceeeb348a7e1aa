"""Tool calls: what a request asks for, the JSON schema that forces a call, and the format in which the model writes calls.

The formats of tool calls and reasoning are chosen once, by the settings or by the chat template.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

from quire.config.server_args import ServerArgs
from quire.serve.limits import refuse_more
from quire.text.parse.format import Format, Thinking
from quire.text.parse.registry import Use, detect, find_format, load_plugins
from quire.text.tokenizer import Tokenizer
from quire.text.tool_prompt import GENERIC, ignores_tools
from quire.types.errors import ConfigError, InvalidParameter, NotSupported

LONGEST_NAME = 256
_DEFINITIONS = {"$defs": ".", "definitions": ":"}  # where a schema keeps what it refers to, and a mark for each
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}

Mode = Literal["none", "auto", "required", "named"]


@dataclass(frozen=True)
class ToolUse:
    """`schemas`: the parameters of every tool, by name. `name`: the tool that must be called, if one was named.

    Schemas of tools in `strict` are refused if they have keywords that the grammar cannot enforce.
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


# ---- how the served model writes tool calls and reasoning

logger = logging.getLogger(__name__)

AUTO = "auto"
LONGEST_SUFFIX = 64  # characters


@dataclass(frozen=True)
class ModelFormats:
    """None: such things are not parsed. `specials` are the strings that detokenization leaves out."""

    tools: Format | None = None
    reasoning: Format | None = None
    specials: frozenset[str] = frozenset()
    begin_ids: tuple[int, ...] = ()  # of the mark that begins the reasoning
    end_id: int | None = None  # of the one that ends it; None: it is not a single token, or there is none
    opening: str = ""  # text that opens the reasoning; "": its mark
    forced_ids: tuple[int, ...] = ()  # end the reasoning when its budget is spent; none: end_id
    describe_tools: bool = False  # the template does not read tools: the prompt describes them

    @property
    def thinking(self) -> Thinking | None:
        return None if self.reasoning is None else self.reasoning.thinking


def check_parsers(settings: ServerArgs, require_plugins: bool) -> None:
    """Raises ConfigError for a file that fails or an unknown name, before anything is loaded."""
    files = (name for name in (settings.tool_parser_plugin, settings.reasoning_parser_plugin) if name)
    load_plugins(files, require_plugins)
    for name, use in _asked(settings):
        if name != AUTO:
            find_format(name, use)


def choose_formats(settings: ServerArgs, tokenizer: Tokenizer | None, generates: bool = True) -> ModelFormats:
    """generates: the model writes text that may contain them."""
    if not generates:
        return ModelFormats()
    template = None if tokenizer is None else tokenizer.chat_template
    chosen: dict[Use, Format] = {}
    describe_tools = False
    for name, use in _asked(settings):
        found = detect(template, use) if name == AUTO else name
        if use == "tool calls" and found in (None, GENERIC):
            found = GENERIC
            describe_tools = ignores_tools(template)
        if found is None:
            logger.warning("the chat template shows no known way to write %s: nothing of it is parsed", use)
            continue
        how = "" if name != AUTO else " (the chat template shows no other)" if found == GENERIC else " (by the chat template)"
        note = "; tools are described in the prompt" if describe_tools and use == "tool calls" else ""
        logger.info("%s: parsed as %s%s%s", use, found, how, note)
        chosen[use] = find_format(found, use, _suffix(tokenizer))
    formats = ModelFormats(chosen.get("tool calls"), chosen.get("reasoning"), describe_tools=describe_tools)
    if tokenizer is None:
        return formats
    formats = replace(formats, specials=frozenset(tokenizer.all_special_tokens))
    if formats.thinking is None:
        return formats
    begin, end = (
        tokenizer.encode(marks[0], add_special_tokens=False) for marks in (formats.thinking.begin, formats.thinking.end)
    )
    formats = replace(formats, begin_ids=tuple(begin), end_id=end[0] if len(end) == 1 else None)
    return _with_own_texts(formats, settings.reasoning_config, tokenizer) if settings.reasoning_config else formats


def _with_own_texts(formats: ModelFormats, config: Mapping[str, object], tokenizer: Tokenizer) -> ModelFormats:
    """`reasoning_config`: the texts contain the parser's marks, so that the answer is still parsed."""
    assert formats.thinking is not None
    opening, closing = str(config.get("reasoning_start_str") or ""), str(config.get("reasoning_end_str") or "")
    if opening and not opening.rstrip().endswith(formats.thinking.begin):
        raise ConfigError(
            f"reasoning_config.reasoning_start_str must end with {' or '.join(formats.thinking.begin)}; got {opening!r}"
        )
    ids = tuple(tokenizer.encode(closing, add_special_tokens=False)) if closing else ()
    if closing and (not closing.rstrip().endswith(formats.thinking.end) or formats.end_id not in ids):
        raise ConfigError(
            f"reasoning_config.reasoning_end_str must end with {formats.thinking.end[0]}, a single token; got {closing!r}"
        )
    return replace(formats, opening=opening, forced_ids=ids)


def _suffix(tokenizer: Tokenizer | None) -> str:
    suffix = None if tokenizer is None else tokenizer.init_kwargs.get("token_suffix")
    return suffix if isinstance(suffix, str) and len(suffix) <= LONGEST_SUFFIX else ""


def _asked(settings: ServerArgs) -> list[tuple[str, Use]]:
    """Tool calls are always parsed: a request that has tools may be answered with calls, on any server."""
    parsers: list[tuple[str, Use]] = [
        (settings.tool_call_parser or AUTO, "tool calls"),
        (settings.reasoning_parser, "reasoning"),
    ]
    return [(name, use) for name, use in parsers if name]


@lru_cache(maxsize=256)
def special_marks(form: Format, specials: frozenset[str]) -> tuple[bool, frozenset[str]]:
    """Are some of the markers special tokens? And the other special tokens, which are left out of answers."""
    marks = form.marks
    used = frozenset(special for special in specials if special and any(special in mark for mark in marks))
    return bool(used), frozenset(special for special in specials - used if special)
