"""/v1/responses: create, retrieve, list the input, cancel, delete.

The stream sends items and parts as they open, grow and close.
"""

import asyncio
import time
import uuid
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import replace
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response

from quire.serve.body import JSONRoute
from quire.serve.chat_stream import ChoiceDelta, Turn, TurnDelta, prepare_turn, reasoning_tokens, run_turn, stream_turn
from quire.serve.errors import ErrorBody, HttpError, describe, json_response, request_id_of
from quire.serve.events import Change, Item, ItemClosed, ItemGrown, ItemOpened, Items, TextLogprobs
from quire.serve.logprobs import TokenNames
from quire.serve.protocol import ChatRequest, ChatToken, ResponsesRequest
from quire.serve.response_objects import (
    TERMS,
    Status,
    StoredItem,
    StoredResponse,
    event_logprobs,
    input_items,
    messages_of,
    new_id,
    output_item,
    part_of,
    said_before,
    settings_of,
    to_chat,
    wants_logprobs,
)
from quire.serve.server import Server, server_of
from quire.serve.sse import NAMED, Events, EventStream
from quire.text.pacing import Pace
from quire.types.errors import InvalidParameter, NotSupported

router = APIRouter(route_class=JSONRoute, tags=["OpenAI"])
stored_router = APIRouter(tags=["OpenAI"])  # without bodies

_ERRORS: dict[int | str, dict[str, Any]] = {400: {"model": ErrorBody}, 404: {"model": ErrorBody}}
_DELTAS = {
    "text": "response.output_text",
    "reasoning": "response.reasoning_text",
    "call": "response.function_call_arguments",
}


@router.post("/v1/responses", responses=_ERRORS)
async def create_response(request: ResponsesRequest, raw: Request) -> Response:
    server = server_of(raw)
    await server.check(request)
    server.check_stored(request)
    if request.background and (request.stream or request.store is False):
        raise InvalidParameter("background needs a response that is stored and not streamed", "background")
    if request.background and not server.responses.may_run(_tenant(raw), server.limits.background_responses):
        raise HttpError(429, "too many responses run in the background; wait until one has finished", "background")
    history = _history(server, raw, request)
    chat = to_chat(request, [*said_before(history), *messages_of(request)])
    turn = await prepare_turn(server, raw, chat, "resp", "call_", TERMS)
    # ids are the store's keys: clients cannot choose them
    turn = replace(turn, job=replace(turn.job, id=f"resp_{uuid.uuid4().hex}"))
    reply = _ResponseReply(server, turn, request, chat, [*history, *input_items(request)], _tenant(raw))
    if request.stream:
        return EventStream(reply.stream(), NAMED, refusable=turn.job.refusable)
    if request.background:
        return json_response(reply.start(request_id_of(raw.scope)))
    return json_response(await reply.answer())


@stored_router.get("/v1/responses/{response_id}", responses=_ERRORS)
async def retrieve_response(response_id: str, raw: Request, stream: bool = False) -> Response:
    if stream:
        raise NotSupported("stream cannot be used here: a stored response cannot be streamed", "stream")
    return json_response(_find(server_of(raw), raw, response_id).response)


@stored_router.get("/v1/responses/{response_id}/input_items", responses=_ERRORS)
async def list_input_items(
    response_id: str,
    raw: Request,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
    after: str | None = None,
) -> Response:
    """What the response was made from: the items of earlier responses, then those of its own input."""
    items = _find(server_of(raw), raw, response_id).items
    if order == "desc":
        items = items[::-1]
    if after is not None:
        place = next((i for i, item in enumerate(items) if item["id"] == after), None)
        if place is None:
            raise InvalidParameter(f"after: the response has no input item {after!r:.100}", "after")
        items = items[place + 1 :]
    page = items[:limit]
    ids = [item["id"] for item in page] or [None]
    return json_response(
        {"object": "list", "data": page, "first_id": ids[0], "last_id": ids[-1], "has_more": len(items) > limit}
    )


@stored_router.post("/v1/responses/{response_id}/cancel", responses=_ERRORS)
async def cancel_response(response_id: str, raw: Request) -> Response:
    stored = _find(server_of(raw), raw, response_id)
    if not stored.response["background"]:
        raise HttpError(400, "only a response in the background can be cancelled: hang up on others", "response_id")
    await stored.cancel()
    return json_response(stored.response)


@stored_router.delete("/v1/responses/{response_id}", responses=_ERRORS)
async def delete_response(response_id: str, raw: Request) -> Response:
    server = server_of(raw)
    stored = _find(server, raw, response_id)
    await stored.cancel()
    server.responses.drop(response_id)
    return json_response({"id": response_id, "object": "response", "deleted": True})


def _tenant(raw: Request) -> str | None:
    return getattr(raw.state, "tenant", None)


def _find(server: Server, raw: Request, name: str) -> StoredResponse:
    stored = server.responses.get(name, _tenant(raw))
    if stored is None:
        raise HttpError(404, f"there is no response {name[:100]!r}: it was not stored, or is no longer", "response_id")
    return stored


def _history(server: Server, raw: Request, request: ResponsesRequest) -> list[StoredItem]:
    name = request.previous_response_id
    if name is None:
        return []
    stored = server.responses.get(name, _tenant(raw))
    if stored is None:
        raise HttpError(404, f"there is no response {name[:100]!r}: it was not stored, or is no longer", "previous_response_id")
    if stored.response["status"] not in ("completed", "incomplete"):
        raise HttpError(400, f"the previous response is {stored.response['status']}", "previous_response_id")
    return [*stored.items, *stored.response["output"]]


class _ResponseReply:
    """One response, whole, streamed or in the background."""

    def __init__(
        self,
        server: Server,
        turn: Turn,
        request: ResponsesRequest,
        chat: ChatRequest,
        items: list[StoredItem],
        tenant: str | None,
    ) -> None:
        self._server, self._turn, self._chat = server, turn, chat
        self._items = Items()
        self._ids: list[str] = []
        self._tokens = 0
        self._number = 0
        self._logprobs: dict[int, list[ChatToken]] = {}  # by item
        self._text_logprobs: TextLogprobs | None = None
        if wants_logprobs(request):
            names = TokenNames(server.tokenizer_of(turn.job.prompts[0]), server.settings.return_tokens_as_token_ids)
            self._text_logprobs = TextLogprobs(names, request.top_logprobs or 0)
        self._stored = StoredResponse({}, items, tenant)
        self._store = request.store is not False and server.stores_responses
        self._response: dict[str, Any] = {
            "id": turn.job.id,
            "object": "response",
            "created_at": turn.job.created,
            "status": "in_progress",
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            "model": turn.job.model,
            "output": [],
            **settings_of(request),
            "store": self._store,
            "usage": None,
        }

    # ---- three ways to answer

    async def answer(self) -> dict[str, Any]:
        step = await run_turn(self._server, self._turn, self._chat)
        [choice] = step.choices
        await self._note(choice, Pace())
        await self._complete(step, choice)
        return self._response

    async def stream(self) -> Events:
        """Begins with the first output: what is refused before that is an HTTP error."""
        begun, pace = False, Pace()
        async with aclosing(stream_turn(self._server, self._turn)) as steps:
            async for step in steps:
                if not begun:
                    begun = True
                    for kind in ("response.created", "response.in_progress"):
                        yield self._event(kind, response=dict(self._response))
                for choice in step.choices:
                    pace.begin()
                    for change, tokens in await self._note(choice, pace):
                        for event in self._events_of(change, tokens):
                            yield event
                    if choice.finish_reason is not None:
                        await self._complete(step, choice)
        yield self._event(f"response.{self._response['status']}", response=self._response)

    def start(self, request_id: str) -> dict[str, Any]:
        """Run in the background; the store has the current state."""
        self._response["status"] = "queued"
        self._stored.response = self._response
        self._stored.work = asyncio.create_task(self._run(request_id))
        self._server.responses.put(self._stored)
        return dict(self._response)

    async def _run(self, request_id: str) -> None:
        self._response["status"] = "in_progress"
        try:
            await self.answer()
        except Exception as error:
            failure = describe(error, request_id)["error"]
            self._response |= {"status": "failed", "error": {"code": "server_error", "message": failure["message"]}}
        self._stored.work = None
        self._server.responses.put(self._stored)

    # ---- what has become of it

    async def _note(self, choice: ChoiceDelta, pace: Pace) -> list[tuple[Change, list[ChatToken]]]:
        """Return the changes, each with the logprobs of its tokens if the request asks for them."""
        self._tokens += len(choice.part.token_ids)
        changes = self._items.add(choice.events)
        logprobs: dict[int, list[ChatToken]] = {}
        if self._text_logprobs is not None:
            grown = [change for change in changes if isinstance(change, ItemGrown)]
            for piece, tokens in zip(grown, await self._text_logprobs.take(choice.part, grown, pace), strict=True):
                self._logprobs.setdefault(piece.index, []).extend(tokens)
                logprobs[id(piece)] = tokens
        if choice.finish_reason is not None:
            changes += self._items.cut() if choice.finish_reason == "length" else self._items.close()
        self._ids += [new_id(item) for item in self._items.items[len(self._ids) :]]
        return [(change, logprobs.get(id(change), [])) for change in changes]

    async def _complete(self, step: TurnDelta, choice: ChoiceDelta) -> None:
        cut = choice.finish_reason == "length"
        reasoned = await reasoning_tokens(self._server, self._items.reasoning, choice.reasoning_tokens)
        cached = self._server.reported_cached(step.output.num_cached_tokens) or 0
        created = self._server.reported_cached(step.output.num_cache_creation_tokens) or 0
        self._response |= {
            "status": "incomplete" if cut else "completed",
            "completed_at": int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": [self._output_item(i, item) for i, item in enumerate(self._items.items)],
            "usage": {
                "input_tokens": self._turn.job.prompt_tokens,
                "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": created},
                "output_tokens": self._tokens,
                "output_tokens_details": {"reasoning_tokens": min(reasoned, self._tokens)},
                "total_tokens": self._turn.job.prompt_tokens + self._tokens,
            },
        }
        if self._store:
            self._stored.response = self._response
            self._server.responses.put(self._stored)

    def _output_item(self, index: int, item: Item, status: Status | None = None) -> dict[str, Any]:
        status = status or ("completed" if item.complete else "incomplete")
        return output_item(item, self._ids[index], status, self._logprobs.get(index, ()))

    # ---- the stream

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        event = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return event

    def _events_of(self, change: Change, tokens: list[ChatToken]) -> Iterator[dict[str, Any]]:
        place: dict[str, Any] = {"item_id": self._ids[change.index], "output_index": change.index}
        item, call = change.item, change.item.kind == "call"
        if not call:
            place["content_index"] = 0
        match change:
            case ItemOpened(index):
                opened = self._output_item(index, item, "in_progress")
                yield self._event("response.output_item.added", output_index=index, item=opened)
                if not call:
                    yield self._event("response.content_part.added", **place, part=part_of(item, ""))
            case ItemGrown(_, _, piece):
                yield self._event(f"{_DELTAS[item.kind]}.delta", **place, delta=piece, **_logprobs_field(item, tokens))
            case ItemClosed(index):
                tokens = self._logprobs.get(index, [])
                whole = {"arguments": item.text, "name": item.name} if call else {"text": item.text}
                yield self._event(f"{_DELTAS[item.kind]}.done", **place, **whole, **_logprobs_field(item, tokens))
                if not call:
                    yield self._event("response.content_part.done", **place, part=part_of(item, logprobs=tokens))
                yield self._event("response.output_item.done", output_index=index, item=self._output_item(index, item))


def _logprobs_field(item: Item, tokens: list[ChatToken]) -> dict[str, Any]:
    return {"logprobs": event_logprobs(tokens)} if item.kind == "text" else {}
