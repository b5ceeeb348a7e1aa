"""/v1/messages and /v1/messages/count_tokens: Anthropic's protocol over the same turns."""

from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request, Response

from quire.serve.anthropic import TERMS, block_of, delta_of, empty_block_of, in_anthropics_words, stop_reason, to_chat
from quire.serve.body import JSONRoute
from quire.serve.errors import json_response
from quire.serve.items import Change, ItemClosed, ItemGrown, ItemOpened, Items
from quire.serve.protocol.chat import ChatRequest
from quire.serve.protocol.errors import AnthropicErrorBody
from quire.serve.protocol.messages import CountTokensRequest, MessagesRequest
from quire.serve.server import Server, server_of
from quire.serve.sse import ANTHROPIC, Events, EventStream
from quire.serve.turn import Turn, TurnDelta, prepare_turn, render_turn, run_turn, stream_turn
from quire.types.errors import PromptTooLong

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
        raise in_anthropics_words(error) from None
    reply = _MessageReply(server, turn, chat)
    if request.stream:
        return EventStream(reply.stream(), ANTHROPIC, refusable=turn.job.has_grammar)
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
        """Prompt tokens from the cache, and those that it has now, are counted apart from the others."""
        cached = self._server.told_cached(step.output.num_cached_tokens) or 0
        created = self._server.told_cached(step.output.num_cache_creation_tokens) or 0
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
