"""/v1/messages: Anthropic requests as chat requests, and items as Anthropic content blocks."""

import json
import re
from contextlib import aclosing
from typing import Any

import pydantic_core
from fastapi import APIRouter, Request, Response

from quire.features.media.inputs import PART_PATH, PartPath
from quire.serve.body import JSONRoute
from quire.serve.chat_stream import Turn, TurnDelta, prepare_turn, render_turn, run_turn, stream_turn
from quire.serve.errors import AnthropicErrorBody, Terms, json_response
from quire.serve.events import Change, Item, ItemClosed, ItemGrown, ItemOpened, Items
from quire.serve.protocol import (
    ChatRequest,
    CountTokensRequest,
    InputMessage,
    MessagesRequest,
    SamplingFields,
    chat_request,
    given,
)
from quire.serve.server import Server, server_of
from quire.serve.sse import ANTHROPIC, Events, EventStream
from quire.types.errors import InvalidParameter, NotSupported, PromptTooLong

_TOO_LONG = re.compile(r"maximum context length is (\d+) tokens.*? requested (?:at least )?(\d+) .*?prompt has (\d+) tokens")

TERMS: Terms = (
    (r"response_format(\.json_schema)?", "output_config.format"),
    (r"(tools\[\d+\])\.function\.parameters", r"\1.input_schema"),
    (r"(tools\[\d+\])\.function", r"\1"),
    ("reasoning_effort", "output_config.effort"),
    ("thinking_token_budget", "thinking.budget_tokens"),
    ("max_completion_tokens", "max_tokens"),
    ("stop", "stop_sequences"),
)
# values that ask for nothing, and why others are not supported
_TOOL_OPTIONS: dict[str, tuple[tuple[Any, ...], str]] = {
    "defer_loading": ((False,), "all tools are shown to the model"),
    "allowed_callers": (([], ["direct"]), "the server runs no code that could call tools"),
    "input_examples": (([],), "put examples into the description"),
}
Content = str | list[dict[str, Any]]
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def to_chat(request: CountTokensRequest, thinks: bool) -> ChatRequest:
    """The same request in OpenAI's terms. `thinks`: there is reasoning that can have a budget."""
    messages = _messages(request)
    goes_on = messages[-1]["role"] == "assistant"  # the answer continues the last message
    body: dict[str, Any] = {
        "model": request.model,
        "messages": messages,
        "add_generation_prompt": not goes_on,
        "continue_final_message": goes_on,
        **_tools(request),
        **_thinking(request, thinks),
    }
    if isinstance(request, MessagesRequest):
        body |= {
            "max_completion_tokens": request.max_tokens,
            "stop": request.stop_sequences,
            "stream": request.stream,
            "temperature": request.temperature,
            "top_p": request.top_p,
            **given(request, SamplingFields),
        }
    kwargs = {**body.get("chat_template_kwargs", {}), **(request.chat_template_kwargs or {})}
    body["chat_template_kwargs"] = kwargs or None
    return chat_request(body)


def as_anthropic_error(error: PromptTooLong) -> PromptTooLong:
    """Return the error in Anthropic's words, by which clients decide to shorten the conversation."""
    found = _TOO_LONG.search(str(error))
    if found is None:
        return PromptTooLong(f"prompt is too long: {error}", error.parameter)
    longest, asked, prompt = map(int, found.groups())
    if prompt < longest:
        message = f"input length and `max_tokens` exceed context limit: {prompt} + {asked} > {longest}, decrease one of them"
    else:
        message = f"prompt is too long: {prompt} tokens > {longest} maximum"
    return PromptTooLong(message, None)


def block_of(item: Item) -> dict[str, Any]:
    match item.kind:
        case "text":
            return {"type": "text", "text": item.text, "citations": None}
        case "reasoning":
            return {"type": "thinking", "thinking": item.text, "signature": ""}
        case "call":
            return {"type": "tool_use", "id": item.id, "name": item.name, "input": _input(item)}


def empty_block_of(item: Item) -> dict[str, Any]:
    """The block as a stream opens it."""
    return block_of(Item(item.kind, "", item.name, item.id))


def delta_of(item: Item, piece: str) -> dict[str, Any]:
    match item.kind:
        case "text":
            return {"type": "text_delta", "text": piece}
        case "reasoning":
            return {"type": "thinking_delta", "thinking": piece}
        case "call":
            return {"type": "input_json_delta", "partial_json": piece}


def stop_reason(finish: str | None, stopped_by: int | str | None, called: bool) -> tuple[str, str | None]:
    """Anthropic's reason, and the stop sequence if one was it."""
    if finish == "length":
        return "max_tokens", None
    if called:
        return "tool_use", None
    return ("stop_sequence", stopped_by) if isinstance(stopped_by, str) else ("end_turn", None)


def _input(item: Item) -> dict[str, Any]:
    """Arguments as an object. Of a call that was cut off, what came whole."""
    if not item.text:
        return {}
    value: dict[str, Any] = pydantic_core.from_json(item.text, allow_partial=not item.complete)
    return value


# ---- messages


def _messages(request: CountTokensRequest) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = []
    if request.system:
        blocks = request.system if isinstance(request.system, list) else [{"type": "text", "text": request.system}]
        out.append({"role": "system", "content": "\n".join(_text(block, "system") for block in blocks)})
    if not request.messages:
        raise InvalidParameter("messages must not be empty", "messages")
    for i, message in enumerate(request.messages):
        where = f"messages[{i}].content"
        if isinstance(message.content, str):
            out.append({"role": message.role, "content": message.content})
        elif message.role == "assistant":
            out.append(_assistant(message, where))
        else:
            out += _user(message, where)
    return out


def _user(message: InputMessage, where: str) -> list[dict[str, Any]]:
    """Results of tools are messages of their own; what is between them stays where it is."""
    out: list[dict[str, Any]] = []
    parts: list[dict[str, Any]] = []
    for k, block in enumerate(message.content):
        assert isinstance(block, dict)
        if block.get("type") != "tool_result":
            parts.append(_part(block, f"{where}[{k}]"))
            continue
        if parts:
            out.append({"role": message.role, "content": _joined(parts)})
            parts = []
        if not isinstance(block.get("tool_use_id"), str):
            raise InvalidParameter(f"{where}: a tool_result needs the tool_use_id it belongs to", where)
        out.append({"role": "tool", "tool_call_id": block["tool_use_id"], "content": _result(block, f"{where}[{k}]")})
    if parts or not out:
        out.append({"role": message.role, "content": _joined(parts)})
    return out


def _result(block: dict[str, Any], where: str) -> Content:
    content = block.get("content") or ""
    blocks = content if isinstance(content, list) else [{"type": "text", "text": content}]
    parts = [_part(one, f"{where}.content[{k}]") for k, one in enumerate(blocks)]
    if not block.get("is_error"):
        return _joined(parts)
    joined = _joined(parts)
    return f"Error: {joined}" if isinstance(joined, str) else [{"type": "text", "text": "Error:"}, *joined]


def _part(block: Any, where: str) -> dict[str, Any]:
    """Return a block of a user or a tool as a part of a chat message."""
    if not isinstance(block, dict) or block.get("type") != "image":
        return {"type": "text", "text": _text(block, where)}
    source = block.get("source")
    kind = source.get("type") if isinstance(source, dict) else None
    if isinstance(source, dict) and kind == "url" and isinstance(source.get("url"), str):
        return {"type": "image_url", "image_url": source["url"], PART_PATH: PartPath(where)}
    if (
        isinstance(source, dict)
        and kind == "base64"
        and all(isinstance(source.get(key), str) for key in ("media_type", "data"))
    ):
        url = f"data:{source['media_type']};base64,{source['data']}"
        return {"type": "image_url", "image_url": url, PART_PATH: PartPath(where)}
    raise InvalidParameter(
        f"{where}: the source of an image must have type base64 with media_type and data, or type url with url", "messages"
    )


def _joined(parts: list[dict[str, Any]]) -> Content:
    """Return the texts as one, or all parts if there are images among them."""
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts


def _assistant(message: InputMessage, where: str) -> dict[str, Any]:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for block in message.content:
        assert isinstance(block, dict)
        match block.get("type"):
            case "thinking":
                thoughts.append(str(block.get("thinking", "")))
            case "redacted_thinking":
                pass  # no chat template reads it
            case "tool_use":
                if not isinstance(block.get("name"), str) or not isinstance(block.get("input", {}), dict):
                    raise InvalidParameter(f"{where}: a tool_use needs a name and an input, which is an object", where)
                function = {"name": block["name"], "arguments": json.dumps(block.get("input", {}), ensure_ascii=False)}
                calls.append({"id": str(block.get("id", "")), "type": "function", "function": function})
            case _:
                texts.append(_text(block, where))
    out: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
    if thoughts:
        out["reasoning"] = "\n".join(thoughts)
    if calls:
        out["tool_calls"] = calls
    return out


def _text(block: Any, where: str) -> str:
    if not isinstance(block, dict) or block.get("type") != "text":
        kind = block.get("type") if isinstance(block, dict) else block
        raise NotSupported(f"{where}: this server takes text, image, tool_use and tool_result blocks, not {kind!r:.80}", where)
    if not isinstance(block.get("text"), str):
        raise InvalidParameter(f"{where}: a text block needs a text", where)
    return str(block["text"])


# ---- options


def _tools(request: CountTokensRequest) -> dict[str, Any]:
    tools = []
    for i, tool in enumerate(request.tools or ()):
        if tool.get("type", "custom") != "custom":
            raise NotSupported(f"tools[{i}]: the server has no tools of its own such as {tool['type']!r:.80}", "tools")
        _check_tool(tool, f"tools[{i}]")
        function = {"name": tool.get("name"), "parameters": tool.get("input_schema")}
        if tool.get("description") is not None:
            function["description"] = tool["description"]
        if tool.get("strict") is not None:
            function["strict"] = tool["strict"]
        tools.append({"type": "function", "function": function})
    choice = request.tool_choice
    if not tools:
        if choice is not None and choice.type != "none":
            raise InvalidParameter("tool_choice needs tools", "tool_choice")
        return {}
    out: dict[str, Any] = {"tools": tools}
    if choice is not None:
        if choice.type == "tool" and choice.name is None:
            raise InvalidParameter('tool_choice of type "tool" needs the name of a tool', "tool_choice")
        if choice.type == "tool":
            out["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
        else:
            out["tool_choice"] = _CHOICES[choice.type]
        out["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    return out


def _check_tool(tool: dict[str, Any], where: str) -> None:
    for name, (neutral, why) in _TOOL_OPTIONS.items():
        if tool.get(name) not in (None, *neutral):
            raise NotSupported(f"{where}.{name} cannot be used: {why}", "tools")


def _thinking(request: CountTokensRequest, thinks: bool) -> dict[str, Any]:
    out: dict[str, Any] = {}
    thinking, config = request.thinking, request.output_config
    if thinking is not None:
        out["include_reasoning"] = thinking.type != "disabled" and thinking.display != "omitted"
    if thinking is not None and thinking.type != "adaptive":
        on = thinking.type == "enabled"
        out["chat_template_kwargs"] = {"enable_thinking": on, "thinking": on}
        if on and thinks and thinking.budget_tokens is not None:
            out["thinking_token_budget"] = thinking.budget_tokens
    if config is not None and config.effort is not None:
        out["reasoning_effort"] = config.effort
    form = config.format if config is not None and config.format is not None else request.output_format
    if form is not None:
        if form.get("type") != "json_schema" or not isinstance(form.get("schema"), dict):
            raise InvalidParameter('output_config.format must be {"type": "json_schema", "schema": {...}}', "output_config")
        schema = {"name": "answer", "schema": form["schema"]}
        out["response_format"] = {"type": "json_schema", "json_schema": schema}
    return out


# ---- endpoints

router = APIRouter(route_class=JSONRoute, tags=["Anthropic"])

_ERRORS: dict[int | str, dict[str, Any]] = {400: {"model": AnthropicErrorBody}, 404: {"model": AnthropicErrorBody}}


@router.post("/v1/messages", responses=_ERRORS)
async def create_message(request: MessagesRequest, raw: Request) -> Response:
    server = server_of(raw)
    await server.check(request)
    chat = to_chat(request, thinks=server.formats.end_id is not None)
    try:
        turn = await prepare_turn(server, raw, chat, "msg", "toolu_", TERMS)
    except PromptTooLong as error:
        raise as_anthropic_error(error) from None
    reply = _MessageReply(server, turn, chat)
    if request.stream:
        return EventStream(reply.stream(), ANTHROPIC, refusable=turn.job.refusable)
    return json_response(await reply.answer())


@router.post("/v1/messages/count_tokens", responses=_ERRORS)
async def count_tokens(request: CountTokensRequest, raw: Request) -> Response:
    server = server_of(raw)
    await server.check(request)
    rendered = await render_turn(server, to_chat(request, thinks=server.formats.end_id is not None), TERMS)
    return json_response({"input_tokens": len(rendered.prompt.ids)})


class _MessageReply:
    def __init__(self, server: Server, turn: Turn, request: ChatRequest) -> None:
        self._server, self._turn, self._request = server, turn, request
        self._items = Items()

    async def answer(self) -> dict[str, Any]:
        step = await run_turn(self._server, self._turn, self._request)
        [choice] = step.choices
        self._items.add(choice.events)
        reason, sequence = stop_reason(choice.finish_reason, choice.part.stop_reason, self._items.calls)
        return {
            **self._head(step, len(choice.part.token_ids)),
            "content": [block_of(item) for item in self._items.items],
            "stop_reason": reason,
            "stop_sequence": sequence,
        }

    async def stream(self) -> Events:
        tokens, begun = 0, False
        async with aclosing(stream_turn(self._server, self._turn)) as steps:
            async for step in steps:
                if not begun:
                    begun = True
                    message = {**self._head(step, 0), "content": [], "stop_reason": None, "stop_sequence": None}
                    yield {"type": "message_start", "message": message}
                for choice in step.choices:
                    tokens += len(choice.part.token_ids)
                    for change in self._items.add(choice.events):
                        yield _event(change)
                    if choice.finish_reason is not None:
                        for change in self._items.close():
                            yield _event(change)
                        yield self._last_delta(step, choice.finish_reason, choice.part.stop_reason, tokens)
        yield {"type": "message_stop"}

    def _last_delta(self, step: TurnDelta, finish: str, stopped_by: int | str | None, tokens: int) -> dict[str, Any]:
        reason, sequence = stop_reason(finish, stopped_by, self._items.calls)
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        return {"type": "message_delta", "delta": delta, "usage": self._usage(step, tokens)}

    def _head(self, step: TurnDelta, tokens: int) -> dict[str, Any]:
        return {
            "id": self._turn.job.id,
            "type": "message",
            "role": "assistant",
            "model": self._turn.job.model,
            "usage": self._usage(step, tokens),
        }

    def _usage(self, step: TurnDelta, tokens: int) -> dict[str, int]:
        """Return the usage; prompt tokens read from the cache and written to it are not part of input_tokens."""
        cached = self._server.reported_cached(step.output.num_cached_tokens) or 0
        created = self._server.reported_cached(step.output.num_cache_creation_tokens) or 0
        return {
            "input_tokens": self._turn.job.prompt_tokens - cached - created,
            "cache_creation_input_tokens": created,
            "cache_read_input_tokens": cached,
            "output_tokens": tokens,
        }


def _event(change: Change) -> dict[str, Any]:
    match change:
        case ItemOpened(index, item):
            return {"type": "content_block_start", "index": index, "content_block": empty_block_of(item)}
        case ItemGrown(index, item, piece):
            return {"type": "content_block_delta", "index": index, "delta": delta_of(item, piece)}
        case ItemClosed(index, _):
            return {"type": "content_block_stop", "index": index}
