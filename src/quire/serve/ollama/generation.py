"""/api/chat and /api/generate."""

import re
import time
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request, Response

from quire.serve.chat_stream import Turn, prepare_turn
from quire.serve.completions import prepare
from quire.serve.errors import OllamaErrorBody, Terms, field_names_of, json_response
from quire.serve.ollama.answers import OllamaReply, plain_turn, without_prompt
from quire.serve.ollama.chats import generate_to_chat, to_chat
from quire.serve.ollama.protocol import OllamaChatRequest, OllamaGenerateRequest, OllamaGenerationFields, Options
from quire.serve.ollama.requests import (
    GENERATE_TERMS,
    TERMS,
    OllamaRoute,
    answer_fields,
    check_request,
    find_model,
    sampling_fields,
)
from quire.serve.protocol import ChatRequest, CompletionRequest
from quire.serve.server import Server, server_of
from quire.serve.sse import OLLAMA, EventStream
from quire.types.errors import InvalidParameter, NotSupported, PromptTooLong, RequestError

router = APIRouter(route_class=OllamaRoute, tags=["Ollama"])
ERRORS: dict[int | str, dict[str, Any]] = {400: {"model": OllamaErrorBody}, 404: {"model": OllamaErrorBody}}
_GENERATE = "it belongs to /api/generate"
_OF_GENERATE = {
    "prompt": f"{_GENERATE}. Send messages", "system": "send a message of role system", "raw": _GENERATE,
    "images": "send them in a message",
}  # fmt: skip
_OF_CHAT = {"messages": "they belong to /api/chat. Send prompt and system", "tools": "they belong to /api/chat"}


@router.post("/api/chat", responses=ERRORS)
async def ollama_chat(request: OllamaChatRequest, raw: Request) -> Response:
    server, started = server_of(raw), time.monotonic_ns()
    model = await find_model(server, request)
    options = check_request(server, request, _OF_GENERATE)
    name = request.model or model
    if not request.messages:
        _check_stays(request)
        return json_response(without_prompt(name, "chat"))
    chat = to_chat(server, model, request, options)
    turn = await _prepare(server, raw, chat, TERMS)
    reply = OllamaReply("chat", server, name, turn.job, _top(request), started)
    if chat.stream:
        return EventStream(reply.stream(turn), OLLAMA, refusable=turn.job.refusable)
    return json_response(await reply.of_chat(turn, chat))


@router.post("/api/generate", responses=ERRORS)
async def ollama_generate(request: OllamaGenerateRequest, raw: Request) -> Response:
    server, started = server_of(raw), time.monotonic_ns()
    model = await find_model(server, request)
    options = check_request(server, request, _OF_CHAT)
    name = request.model or model
    if not request.prompt and not request.images:
        _check_stays(request)
        return json_response(without_prompt(name, "generate"))
    if await _is_bare(server, model, request):
        chat, turn = None, await _prepare_bare(server, raw, model, request, options)
    else:
        chat = generate_to_chat(server, model, request, options)
        turn = await _prepare(server, raw, chat, GENERATE_TERMS)
    reply = OllamaReply("generate", server, name, turn.job, _top(request), started)
    if request.stream is not False:
        return EventStream(reply.stream(turn), OLLAMA, refusable=turn.job.refusable)
    return json_response(await (reply.of_prompt() if chat is None else reply.of_chat(turn, chat)))


def _top(request: OllamaGenerationFields) -> int | None:
    return (request.top_logprobs or 0) if request.logprobs else None


def _check_stays(request: OllamaGenerationFields) -> None:
    """Without a prompt, Ollama loads the model, or unloads it."""
    if request.keep_alive is not None and not re.search("[1-9]", str(request.keep_alive)):
        raise NotSupported(
            "keep_alive=0 cannot unload the model, which is loaded while the server runs. Stop the server", "keep_alive"
        )


async def _prepare(server: Server, raw: Request, chat: ChatRequest, terms: Terms) -> Turn:
    """Prepare the turn. Where num_predict is more than what fits, the context ends the answer, as without it."""
    try:
        return await prepare_turn(server, raw, chat, "chatcmpl", "call_", terms)
    except PromptTooLong as error:
        if error.parameter != "options.num_predict":
            raise
        chat.max_completion_tokens = None
        return await prepare_turn(server, raw, chat, "chatcmpl", "call_", terms)


# ---- prompts without a chat template


async def _is_bare(server: Server, model: str, request: OllamaGenerateRequest) -> bool:
    """Is the prompt used as it is? So it is where the model has no chat template."""
    tokenizer = (await server.prompts(model))[0].tokenizer
    bare = bool(request.raw) or (tokenizer is not None and tokenizer.chat_template is None)
    for name, value in (("system", request.system), ("think", request.think), ("images", request.images)):
        if bare and value:
            raise InvalidParameter(
                f"{name} requires a chat template, which raw=true and base models do not use. Leave it out", name
            )
    return bare


async def _prepare_bare(server: Server, raw: Request, model: str, request: OllamaGenerateRequest, options: Options) -> Turn:
    body = {"model": model, "prompt": request.prompt, **sampling_fields(options, "max_tokens"), **answer_fields(request)}
    completion = CompletionRequest(**body, logprobs=_top(request))
    names = field_names_of(completion, terms=TERMS)
    try:
        try:
            job = await prepare(server, raw, completion)
        except PromptTooLong as error:
            if error.parameter != "max_tokens":
                raise
            completion.max_tokens = None
            job = await prepare(server, raw, completion)
    except RequestError as error:
        raise names.of(error) from error
    return plain_turn(replace(job, field_names=names))
