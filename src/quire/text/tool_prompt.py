"""Tools for models whose chat template does not read them: the prompt describes them and asks for <tool_call>{...}</tool_call>.

What the model is asked to write is what the format `generic` reads (`parse/formats.py`).
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from quire.text.chat import Messages, compile_template, parse_tool_arguments, validate
from quire.text.parse.registry import detect
from quire.types.errors import RequestError
from quire.types.media import MODALITIES

GENERIC = "generic"
Place = Literal["system", "user"]  # the message that describes the tools: one of its own, or the first question

_INSTRUCTIONS = """You can call tools. These are they, one JSON object per line:
{tools}

To call one, write its name and its arguments like this, once for every call, and then stop:
<tool_call>
{{"name": "name of the tool", "arguments": {{"parameter": "value"}}}}
</tool_call>
What it returns will be given to you between <tool_response> and </tool_response>. If no tool is of use, just answer."""


def ignores_tools(template: str | Mapping[str, str] | None) -> bool:
    """Return whether a template does not read tools, from its syntax tree."""
    if isinstance(template, Mapping):
        template = template.get("tool_use", template.get("default"))
    try:
        return template is not None and not compile_template(template).reads_tools
    except RequestError:  # requests report what is wrong with it
        return False


def wants_words(template: str | Mapping[str, str] | None) -> bool:
    """Return whether the template neither reads tools nor has another format of calls."""
    return detect(template, "tool calls") in (None, GENERIC) and ignores_tools(template)


def describe_tools(messages: Messages, tools: Sequence[Mapping[str, Any]] | None, place: Place) -> list[dict[str, Any]]:
    """The conversation with the tools described, and with calls and results as text."""
    validate(messages)
    out: list[dict[str, Any]] = []
    results = False  # did the last message hold results of tools?
    for message in parse_tool_arguments(messages):
        if message["role"] == "tool":
            response = {"role": "user", "content": _response(message.get("content"))}
            out[-1:] = [_joined(out[-1], response)] if results else [*out[-1:], response]
            results = True
        else:
            follows = results and message["role"] == "user"  # many templates want turns to alternate
            out[-1:] = [_joined(out[-1], message)] if follows else [*out[-1:], _without_calls(message)]
            results = False
    return _described(out, instructions(tools), place) if tools else out


def render_described(render: Callable[[Messages], str], messages: Messages, tools: Sequence[Mapping[str, Any]] | None) -> str:
    """Render a conversation with a description of the tools. Templates without a system role leave the description out or
    raise: then the first user message begins with it.
    """
    try:
        text = render(describe_tools(messages, tools, "system"))
        if not tools or instructions(tools) in text:
            return text
    except RequestError:
        if not tools:
            raise
    return render(describe_tools(messages, tools, "user"))


def instructions(tools: Sequence[Mapping[str, Any]]) -> str:
    lines = [json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools]
    return _INSTRUCTIONS.format(tools="\n".join(lines))


def _described(messages: list[dict[str, Any]], text: str, place: Place) -> list[dict[str, Any]]:
    described = {"role": place, "content": text}
    for i, message in enumerate(messages):
        if message["role"] != place:
            continue
        both = _joined(message, described) if place == "system" else _joined(described, message)
        return [*messages[:i], both, *messages[i + 1 :]]
    return [described, *messages]


def _response(content: Any) -> str | list[Any]:
    """Return the result of a tool as the content of a message, with the images that it has."""
    if isinstance(content, Sequence) and any(isinstance(part, Mapping) and part.get("type") in MODALITIES for part in content):
        return [*_parts("<tool_response>"), *content, *_parts("</tool_response>")]
    return f"<tool_response>\n{_text(content)}\n</tool_response>"


def _joined(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    one, other = first.get("content") or "", second.get("content") or ""
    if isinstance(one, str) and isinstance(other, str):
        return {**first, "content": f"{one}\n\n{other}"}
    return {**first, "content": [*_parts(one), *_parts(other)]}


def _parts(content: Any) -> list[Any]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content)


def _without_calls(message: Mapping[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if message["role"] != "assistant" or not isinstance(calls, Sequence) or isinstance(calls, str) or not calls:
        return dict(message)
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    written = [f"<tool_call>\n{json.dumps(_call(call), ensure_ascii=False)}\n</tool_call>" for call in calls]
    return {**rest, "content": "\n".join([*filter(None, [_text(message.get("content"))]), *written])}


def _call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    return {"name": function.get("name"), "arguments": function.get("arguments") or {}}


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part if isinstance(part, str) else str(part.get("text", "")) for part in content)
