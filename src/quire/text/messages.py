"""The messages of a conversation, made ready for a chat template. No function here changes what it was given."""

from collections.abc import Mapping, Sequence
from typing import Any

from quire.types.errors import InvalidParameter, NotSupported
from quire.types.json_text import read_json

Messages = Sequence[Mapping[str, Any]]

_TEXT_KEYS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal", "thinking": "thinking"}
_MARKER = "\ue000the model goes on here\ue001"  # private-use characters: no real content has this


def validate(messages: Any) -> None:
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise InvalidParameter(
            f"messages must be a list of {{'role': ..., 'content': ...}} dicts, got {type(messages).__name__}", "messages"
        )
    if not messages:
        raise InvalidParameter("messages must not be empty", "messages")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise InvalidParameter(
                f"messages[{i}] must be a dict with 'role' and 'content', got {type(message).__name__}", f"messages[{i}]"
            )
        if not isinstance(message.get("role"), str) or not message["role"]:
            raise InvalidParameter(
                f"messages[{i}] needs a 'role' such as 'user', got {message.get('role')!r}", f"messages[{i}].role"
            )
        _validate_content(i, message.get("content"))


def _validate_content(i: int, content: Any) -> None:
    where = f"messages[{i}].content"
    if content is None or isinstance(content, str):
        return
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise InvalidParameter(f"{where} must be a string or a list of parts, got {type(content).__name__}", where)
    for k, part in enumerate(content):
        if not isinstance(part, str) and not (isinstance(part, Mapping) and isinstance(part.get("type"), str)):
            raise InvalidParameter(
                f"{where}[{k}] must be a string or a part such as {{'type': 'text', 'text': ...}}, got {part!r:.100}", where
            )


def flatten_parts(messages: Messages) -> list[dict[str, Any]]:
    """For templates that expect strings: the text parts of a message become lines of one string."""
    out = []
    for i, message in enumerate(messages):
        content = message.get("content")
        if content is not None and not isinstance(content, str):
            text = "\n".join(_text_of(part, f"messages[{i}].content") for part in content)
            message = {**message, "content": text}
        out.append(dict(message))
    return out


def as_parts(messages: Messages) -> list[dict[str, Any]]:
    """For templates that expect parts: every content is a list of them, and all text is of type text."""
    out = []
    for message in messages:
        content = message.get("content")
        parts = [content] if isinstance(content, str) else content or []
        out.append({**message, "content": [_text_part(part) for part in parts]})
    return out


def _text_part(part: str | Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    key = _TEXT_KEYS.get(part["type"])
    return dict(part) if key is None or not isinstance(part.get(key), str) else {"type": "text", "text": part[key]}


def _text_of(part: str | Mapping[str, Any], where: str) -> str:
    if isinstance(part, str):
        return part
    key = _TEXT_KEYS.get(part["type"])
    if key is None:
        raise NotSupported(f"{where}: this model's chat template takes text only, not a part of type {part['type']!r}", where)
    if not isinstance(part.get(key), str):
        raise InvalidParameter(f"{where}: a part of type {part['type']!r} needs a string {key!r}, got {part.get(key)!r}", where)
    return str(part[key])


def parse_tool_arguments(messages: Messages) -> list[dict[str, Any]]:
    """OpenAI clients send the arguments of a call as a JSON string; templates expect what it says."""
    out = []
    for i, message in enumerate(messages):
        calls = message.get("tool_calls")
        if message["role"] == "assistant" and isinstance(calls, Sequence) and not isinstance(calls, str):
            message = {
                **message,
                "tool_calls": [_parsed_call(call, f"messages[{i}].tool_calls[{k}]") for k, call in enumerate(calls)],
            }
        out.append(dict(message))
    return out


def _parsed_call(call: Any, where: str) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = read_json(function["arguments"] or "{}")
    except ValueError as error:  # not JSON, a number too long, or too deep
        raise InvalidParameter(
            f"{where}.function.arguments is not valid JSON, or none that can be read: {error}", where
        ) from None
    return {**call, "function": {**function, "arguments": arguments}}


def with_content(messages: Messages) -> list[dict[str, Any]]:
    """Most templates cannot do without, but where there are calls."""
    return [dict(m) if m.get("tool_calls") or m.get("content") is not None else {**m, "content": ""} for m in messages]


def mark_final(messages: Messages) -> tuple[list[dict[str, Any]], str, str]:
    """The messages with a marker behind the last one's content, that content, and the marker."""
    *before, last = messages
    content = last.get("content")
    if isinstance(content, str):
        return [*map(dict, before), {**last, "content": content + _MARKER}], content, _MARKER
    if content:
        *parts, final = content
        if isinstance(final, str):
            return [*map(dict, before), {**last, "content": [*parts, final + _MARKER]}], final, _MARKER
        key = _TEXT_KEYS.get(final["type"])
        if key is not None and isinstance(final.get(key), str):
            marked = {**final, key: final[key] + _MARKER}
            return [*map(dict, before), {**last, "content": [*parts, marked]}], str(final[key]), _MARKER
    raise InvalidParameter("continue_final_message needs a last message whose content is text", "continue_final_message")
