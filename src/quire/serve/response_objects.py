"""/v1/responses without HTTP: requests as chat requests, items as output items, and the store of responses.

Stored responses live in memory within limits; none survives a restart. A response belongs to the tenant whose key made it; for
others it does not exist. When there are too many, those of the tenant with the most are removed first, least recently used
first, so a tenant with few never loses one to a tenant with many.
"""

import asyncio
import uuid
from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from quire.features.media.inputs import PART_PATH, PartPath
from quire.serve.body import stop
from quire.serve.errors import Terms
from quire.serve.events import Item
from quire.serve.protocol import ChatRequest, ChatToken, ResponsesRequest, SamplingFields, TokenChance, chat_request, given
from quire.types.errors import InvalidParameter, NotSupported

Status = Literal["completed", "incomplete", "in_progress"]
MessageDict = dict[str, Any]
StoredItem = dict[str, Any]  # of an input or an output

TERMS: Terms = (
    (r"response_format(\.json_schema)?", "text.format"),
    (r"(tools\[\d+\])\.function", r"\1"),
    ("reasoning_effort", "reasoning.effort"),
    ("max_completion_tokens", "max_output_tokens"),
    ("messages", "input"),
    ("logprobs", "top_logprobs"),
)
_SAME = (
    "model", "stream", "temperature", "top_p", "parallel_tool_calls", "stop", "thinking_token_budget", "chat_template",
    "chat_template_kwargs", "user",
)  # fmt: skip
_MEDIA = ("input_image", "input_video")
_TEXT_PARTS = ("input_text", "output_text", "text", "refusal")
_PREFIXES = {"text": "msg", "reasoning": "rs", "call": "fc"}
_INPUT_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}


def to_chat(request: ResponsesRequest, messages: list[MessageDict]) -> ChatRequest:
    """`messages`: the conversation, without the instructions."""
    if request.instructions:
        messages = [{"role": "system", "content": request.instructions}, *messages]
    body = {name: getattr(request, name) for name in _SAME} | given(request, SamplingFields)
    body |= {"messages": messages, "max_completion_tokens": request.max_output_tokens}
    body |= {"logprobs": wants_logprobs(request), "top_logprobs": request.top_logprobs}
    if request.tools:
        body["tools"] = [_tool(tool, i) for i, tool in enumerate(request.tools)]
        body["tool_choice"] = _choice(request.tool_choice)
    elif request.tool_choice not in (None, "auto", "none"):
        raise InvalidParameter("tool_choice needs tools", "tool_choice")
    if request.reasoning is not None:
        body["reasoning_effort"] = request.reasoning.effort
    if request.truncation == "auto":
        body.setdefault("truncate_prompt_tokens", -1)
    if request.text is not None and request.text.format is not None:
        body["response_format"] = _format(request.text.format)
    return chat_request(body)


def wants_logprobs(request: ResponsesRequest) -> bool:
    return bool(request.top_logprobs) or "message.output_text.logprobs" in (request.include or ())


def messages_of(request: ResponsesRequest) -> list[MessageDict]:
    """The request's own input as messages."""
    if isinstance(request.input, str):
        return [{"role": "user", "content": request.input}]
    if not request.input:
        raise InvalidParameter("input must not be empty", "input")
    return join_turns([_message(item, f"input[{i}]") for i, item in enumerate(request.input)])


def join_turns(messages: list[MessageDict]) -> list[MessageDict]:
    """Join the items of one turn (reasoning, text and calls) to one message of the assistant."""
    out: list[MessageDict] = []
    for message in messages:
        last = out[-1] if out else None
        if last is None or message["role"] != "assistant" or last["role"] != "assistant":
            out.append(dict(message))
            continue
        last["content"] = "\n".join(text for text in (last.get("content"), message.get("content")) if text)
        if message.get("reasoning"):
            last["reasoning"] = "\n".join(text for text in (last.get("reasoning"), message["reasoning"]) if text)
        if message.get("tool_calls"):
            last["tool_calls"] = [*last.get("tool_calls", ()), *message["tool_calls"]]
    return out


def said_before(items: list[StoredItem]) -> list[MessageDict]:
    """Return an earlier conversation as messages, without incomplete calls: these have no answer."""
    complete = [item for item in items if item["type"] != "function_call" or item["status"] == "completed"]
    return join_turns([_message(item, "previous_response_id") for item in complete])


def input_items(request: ResponsesRequest) -> list[StoredItem]:
    """Return the request's own input as it is stored: every item has an id, every message its content in parts."""
    given = [{"role": "user", "content": request.input}] if isinstance(request.input, str) else request.input
    return [_stored(item) for item in given]


def _stored(item: dict[str, Any]) -> StoredItem:
    kind = item.get("type", "message")
    own = item.get("id")
    stored = {"id": own if isinstance(own, str) else f"{_INPUT_PREFIXES[kind]}_{uuid.uuid4().hex}", "type": kind}
    stored |= {"status": "completed"} | {key: value for key, value in item.items() if key not in stored and value is not None}
    if kind == "message" and isinstance(item.get("content"), str):
        part = {"type": "output_text", "annotations": []} if item["role"] == "assistant" else {"type": "input_text"}
        stored["content"] = [part | {"text": item["content"]}]
    return stored


def new_id(item: Item) -> str:
    return f"{_PREFIXES[item.kind]}_{uuid.uuid4().hex}"


def output_item(item: Item, item_id: str, status: Status, logprobs: Sequence[ChatToken] = ()) -> dict[str, Any]:
    begun = status != "in_progress"
    match item.kind:
        case "text":
            content = [part_of(item, logprobs=logprobs)] if begun else []
            return {"id": item_id, "type": "message", "role": "assistant", "status": status, "content": content}
        case "reasoning":
            content = [part_of(item)] if begun else []
            return {"id": item_id, "type": "reasoning", "summary": [], "content": content, "status": status}
        case "call":
            arguments = item.text if begun else ""
            return {
                "id": item_id, "type": "function_call", "call_id": item.id, "name": item.name, "arguments": arguments,
                "status": status,
            }  # fmt: skip


def part_of(item: Item, text: str | None = None, logprobs: Sequence[ChatToken] = ()) -> dict[str, Any]:
    content = item.text if text is None else text
    if item.kind == "reasoning":
        return {"type": "reasoning_text", "text": content}
    return {"type": "output_text", "text": content, "annotations": [], "logprobs": list(logprobs)}


def event_logprobs(tokens: Sequence[ChatToken]) -> list[dict[str, Any]]:
    """Return logprobs in the shape of stream events, which have no bytes."""
    return [{**_chance(token), "top_logprobs": [_chance(other) for other in token["top_logprobs"]]} for token in tokens]


def _chance(token: TokenChance) -> dict[str, Any]:
    return {"token": token["token"], "logprob": token["logprob"]}


def settings_of(request: ResponsesRequest) -> dict[str, Any]:
    """Return the settings of the request that a response repeats."""
    form = request.text.format if request.text is not None and request.text.format is not None else {"type": "text"}
    reasoning = request.reasoning
    return {
        "background": bool(request.background),
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": None,
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": request.previous_response_id,
        "reasoning": {"effort": reasoning.effort if reasoning else None, "summary": None},
        "service_tier": "default",
        "store": request.store is not False,
        "temperature": request.temperature,
        "text": {"format": form},
        "tool_choice": request.tool_choice or "auto",
        "tools": request.tools or [],
        "top_logprobs": request.top_logprobs or 0,
        "top_p": request.top_p,
        "truncation": request.truncation or "disabled",
        "user": request.user,
    }


# ---- items of the input


def _message(item: dict[str, Any], where: str) -> MessageDict:
    match item.get("type", "message"):
        case "message":
            role = item.get("role")
            if not isinstance(role, str) or role not in ("user", "assistant", "system", "developer"):
                raise InvalidParameter(f"{where}.role must be user, assistant, system or developer, got {role!r:.80}", "input")
            known = "system" if role == "developer" else role
            read = _text if known == "assistant" else _content
            return {"role": known, "content": read(item.get("content"), f"{where}.content")}
        case "function_call":
            for name in ("call_id", "name", "arguments"):
                if not isinstance(item.get(name), str):
                    raise InvalidParameter(f"{where}: a function_call needs a string {name}", "input")
            return _called(item["call_id"], item["name"], item["arguments"])
        case "function_call_output":
            if not isinstance(item.get("call_id"), str):
                raise InvalidParameter(f"{where}: a function_call_output needs the call_id it belongs to", "input")
            return {"role": "tool", "tool_call_id": item["call_id"], "content": _content(item.get("output"), f"{where}.output")}
        case "reasoning":
            parts = item.get("content") or item.get("summary") or []
            texts = [str(part.get("text", "")) for part in parts if isinstance(part, dict)]
            return {"role": "assistant", "content": "", "reasoning": "\n".join(texts)}
        case kind:
            raise NotSupported(
                f"{where}: items are messages, function calls, their outputs and reasoning, not {kind!r:.80}", "input"
            )


def _called(call_id: str, name: str, arguments: str) -> MessageDict:
    call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _content(content: Any, where: str) -> str | list[dict[str, Any]]:
    """Return a text, or parts if there are images or videos among them."""
    if not isinstance(content, list) or not any(isinstance(part, dict) and part.get("type") in _MEDIA for part in content):
        return _text(content, where)
    return [
        {**part, PART_PATH: PartPath(f"{where}[{k}]")}
        if isinstance(part, dict) and part.get("type") in _MEDIA
        else {"type": "text", "text": _text([part], where)}
        for k, part in enumerate(content)
    ]


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidParameter(f"{where} must be a string or a list of text parts", "input")
    texts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") not in _TEXT_PARTS:
            kind = part.get("type") if isinstance(part, dict) else part
            raise NotSupported(f"{where}: parts are texts, and images of users and tools, not {kind!r:.80}", "input")
        texts.append(str(part.get("text", part.get("refusal", ""))))
    return "\n".join(texts)


# ---- options


def _tool(tool: dict[str, Any], i: int) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise NotSupported(f"tools[{i}]: tools are functions here, not {tool.get('type')!r:.80}", "tools")
    function = {key: tool[key] for key in ("name", "description", "parameters", "strict") if tool.get(key) is not None}
    return {"type": "function", "function": function}


def _choice(choice: Any) -> Any:
    if choice is None or choice in ("none", "auto", "required"):
        return choice
    if isinstance(choice, dict) and choice.get("type") == "function" and isinstance(choice.get("name"), str):
        return {"type": "function", "function": {"name": choice["name"]}}
    raise InvalidParameter(
        f'tool_choice must be "none", "auto", "required" or {{"type": "function", "name": ...}}, got {choice!r:.200}',
        "tool_choice",
    )


def _format(form: dict[str, Any]) -> dict[str, Any]:
    if form.get("type") != "json_schema":
        return form
    if not isinstance(form.get("schema"), dict):
        raise InvalidParameter(
            'text.format of type json_schema needs a schema: {"type": "json_schema", "name": "...", "schema": {...}}',
            "text.format.schema",
        )
    schema = {key: form[key] for key in ("name", "description", "schema", "strict") if key in form}
    return {"type": "json_schema", "json_schema": schema}


def size_of(value: Any) -> int:
    """Estimate the bytes of an object in the store without reading every character."""
    size, rest = 0, [value]
    while rest:
        item = rest.pop()
        if isinstance(item, dict):
            size += 2 * len(item) + sum(map(len, item))
            rest += item.values()
        elif isinstance(item, list):
            size += 2 + len(item)
            rest += item
        else:
            size += len(item) * (1 if item.isascii() else 2) + 2 if isinstance(item, str) else 8
    return size


# ---- stored responses


@dataclass
class StoredResponse:
    response: dict[str, Any]
    items: list[StoredItem]  # the conversation up to this response, without instructions
    tenant: str | None
    work: "asyncio.Task[None] | None" = None  # of one in the background, while it runs
    bytes: int = field(default=0)

    async def cancel(self) -> None:
        """Cancel the work on the response if it still runs."""
        work, self.work = self.work, None
        if work is not None:
            await stop(work)
            if self.response["status"] in ("queued", "in_progress"):
                self.response["status"] = "cancelled"


class ResponseStore:
    def __init__(self, most: int, most_bytes: int) -> None:
        self._most, self._most_bytes = most, most_bytes
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._stored)

    def may_run(self, tenant: str | None, most: int) -> bool:
        """Return whether this tenant may run one more in the background, which leaves at least as many for other tenants."""
        running = Counter(stored.tenant for stored in self._stored.values() if stored.work is not None)
        left = most - running.total()
        return left > 0 and (tenant is None or running[tenant] < left)

    def put(self, stored: StoredResponse) -> None:
        """Store a response or its new state. A response larger than the store is not stored."""
        name = stored.response["id"]
        self.drop(name)
        stored.bytes = size_of(stored.response) + size_of(stored.items)
        if stored.bytes > self._most_bytes and stored.work is None:
            return
        self._stored[name] = stored
        self.bytes += stored.bytes
        if len(self._stored) > self._most or self.bytes > self._most_bytes:
            self._make_room()

    def _make_room(self) -> None:
        count, size = Counter[str | None](), Counter[str | None]()  # by tenant
        idle: dict[str | None, deque[StoredResponse]] = {}  # oldest first
        for one in self._stored.values():
            count[one.tenant] += 1
            size[one.tenant] += one.bytes
            if one.work is None:
                idle.setdefault(one.tenant, deque()).append(one)
        while idle and (len(self._stored) > self._most or self.bytes > self._most_bytes):
            held = size if self.bytes > self._most_bytes else count
            tenant = max(idle, key=lambda each: held[each])
            oldest = idle[tenant].popleft()
            count[tenant] -= 1
            size[tenant] -= oldest.bytes
            self.drop(oldest.response["id"])
            if not idle[tenant]:
                del idle[tenant]

    def get(self, name: str, tenant: str | None) -> StoredResponse | None:
        stored = self._stored.get(name)
        if stored is None or stored.tenant != tenant:
            return None
        self._stored.move_to_end(name)
        return stored

    def drop(self, name: str) -> None:
        stored = self._stored.pop(name, None)
        if stored is not None:
            self.bytes -= stored.bytes
