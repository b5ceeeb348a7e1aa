"""Requests to /api/chat and /api/generate as chat requests."""

import itertools
from collections.abc import Sequence
from typing import Any

from quire.features.media.inputs import PART_PATH, PartPath, field_of
from quire.serve.ollama.protocol import OllamaChatRequest, OllamaGenerateRequest, OllamaGenerationFields, Options
from quire.serve.ollama.requests import answer_fields, sampling_fields
from quire.serve.protocol import ChatRequest, chat_request
from quire.serve.server import Server
from quire.types.errors import InvalidParameter


def to_chat(server: Server, model: str, request: OllamaChatRequest, options: Options) -> ChatRequest:
    body = _common(server, model, request, options) | {"messages": read_messages(request.messages or ())}
    if request.tools:
        body["tools"] = request.tools
    return chat_request(body)


def generate_to_chat(server: Server, model: str, request: OllamaGenerateRequest, options: Options) -> ChatRequest:
    messages: list[dict[str, Any]] = [{"role": "system", "content": request.system}] if request.system else []
    messages.append({"role": "user", "content": _with_images(request.prompt or "", request.images, "images")})
    return chat_request(_common(server, model, request, options) | {"messages": messages})


def _common(server: Server, model: str, request: OllamaGenerationFields, options: Options) -> dict[str, Any]:
    body = {"model": model, **sampling_fields(options, "max_completion_tokens"), **answer_fields(request)}
    if request.logprobs:
        body |= {"logprobs": True, "top_logprobs": request.top_logprobs or 0}
    if request.think is None:
        return body
    thinks = request.think is not False
    if thinks and server.formats.reasoning is None:
        message = "think requires a model that reasons and a server started with --reasoning-parser"
        got = str(request.think).lower()
        raise InvalidParameter(f"{message}; got {got}. Leave it out, or start the server with --reasoning-parser auto", "think")
    body |= {"chat_template_kwargs": {"enable_thinking": thinks, "thinking": thinks}, "include_reasoning": thinks}
    if isinstance(request.think, str):
        body["reasoning_effort"] = request.think
    return body


# ---- messages


class _Calls:
    """The calls of the last message that has some, which wait for their results."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}  # by id
        self._ids: dict[str, dict[str, None]] = {}  # by name, in order
        self._made = itertools.count()

    def begin(self) -> None:
        self._names, self._ids = {}, {}

    def add(self, call_id: str | None, name: str) -> str:
        """Return the call's id; older clients send none."""
        call_id = call_id or f"call{next(self._made):05d}"  # some templates want 9 characters
        self._names[call_id] = name
        self._ids.setdefault(name, {})[call_id] = None
        return call_id

    def answer(self, call_id: str | None, name: str | None) -> tuple[str | None, str | None]:
        """Return the id and the name of the call that a result is for: of this id, else the first of this name or of all."""
        if not call_id:
            call_id = next(iter(self._ids.get(name, ()) if name else self._names), None)
        if call_id is None or call_id not in self._names:
            return call_id, name
        found = self._names.pop(call_id)
        del self._ids[found][call_id]
        return call_id, name or found


def read_messages(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return OpenAI's form of the messages. Calls and results without ids get some."""
    calls = _Calls()
    return [_message(message, f"messages[{i}]", calls) for i, message in enumerate(messages)]


def _message(message: dict[str, Any], where: str, calls: _Calls) -> dict[str, Any]:
    if not isinstance(message.get("role"), str):
        kind = _kind(message.get("role"))
        raise InvalidParameter(f"{where}.role must be system, user, assistant or tool; got {kind}", "messages")
    for name in ("content", "thinking", "tool_name", "tool_call_id"):
        if not isinstance(message.get(name), str | None):
            raise InvalidParameter(f"{where}.{name} must be a string; got {_kind(message[name])}", "messages")
    out = {name: value for name, value in message.items() if name not in _REWRITTEN}
    out["content"] = _with_images(message.get("content") or "", message.get("images"), f"{where}.images")
    if message.get("thinking"):
        out["reasoning"] = message["thinking"]
    if message.get("tool_calls"):
        out["tool_calls"] = _tool_calls(message["tool_calls"], f"{where}.tool_calls", calls)
    if message["role"] == "tool":
        found = calls.answer(message.get("tool_call_id"), message.get("tool_name"))
        out |= {name: value for name, value in zip(("tool_call_id", "name"), found, strict=True) if value}
    return out


def _with_images(text: str, images: Any, where: str) -> str | list[dict[str, Any]]:
    """Return the content of a message: the images, which are texts in base64, and the text after them."""
    if images is None or images == []:
        return text
    if not isinstance(images, list):
        raise InvalidParameter(f"{where} must be a list of images in base64; got {_kind(images)}", field_of(where))
    parts: list[dict[str, Any]] = []
    for i, image in enumerate(images):
        place = PartPath(f"{where}[{i}]")
        if not isinstance(image, str):
            raise InvalidParameter(f"{place} must be an image in base64; got {_kind(image)}", field_of(place))
        parts.append({"type": "image_url", "image_url": f"data:image/*;base64,{image}", PART_PATH: place})
    return [*parts, {"type": "text", "text": text}]


_REWRITTEN = ("images", "thinking", "tool_calls", "tool_name", "tool_call_id")


def _tool_calls(given: Any, where: str, calls: _Calls) -> list[dict[str, Any]]:
    if not isinstance(given, list):
        raise InvalidParameter(f"{where} must be a list of calls; got {_kind(given)}", "messages")
    calls.begin()
    out: list[dict[str, Any]] = []
    for i, call in enumerate(given):
        function = call.get("function") if isinstance(call, dict) else None
        name, arguments = (function.get("name"), function.get("arguments")) if isinstance(function, dict) else (None, None)
        if not isinstance(name, str) or not isinstance(arguments, dict | str | None):
            raise InvalidParameter(f"{where}[{i}] must have a function with a name and arguments, an object", "messages")
        own_id = call.get("id")
        call_id = calls.add(own_id if isinstance(own_id, str) else None, name)
        out.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments or {}}})
    return out


def _kind(value: Any) -> str:
    """Name the type, as JSON calls it: the value may be large."""
    names = ((bool, "a boolean"), (int | float, "a number"), (str, "a string"), (dict, "an object"), (list, "an array"))
    return next((name for kind, name in names if isinstance(value, kind)), "nothing")
