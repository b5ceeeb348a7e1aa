"""/v1/completions: completions of plain prompts, and SageMaker's /invocations."""

from collections.abc import Sequence
from contextlib import aclosing
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import Discriminator, Tag

from quire.serve.beam import search_beams
from quire.serve.body import JSONRoute
from quire.serve.chat import create_chat_completion
from quire.serve.errors import ErrorBody, HttpError, json_response
from quire.serve.generation import (
    GenerationJob,
    StreamUsage,
    collect,
    log_delta,
    make_job,
    raise_failure,
    run,
    timing_of,
    usage_of,
)
from quire.serve.inputs import check_request, only_echoes, read_prompts, report_unenforced
from quire.serve.logprobs import FEW, Joined, TextOffsets, TokenNames, completion_logprobs, few, prompt_logprobs
from quire.serve.protocol import ChatRequest, Completion, CompletionChoice, CompletionLogprobs, CompletionRequest
from quire.serve.server import Server, server_of
from quire.serve.sse import Events, EventStream, Large
from quire.types.outputs import CompletionOutput, RequestOutput, TokenLogprobs

router = APIRouter(route_class=JSONRoute, tags=["OpenAI"])


@router.post("/v1/completions", responses={200: {"model": Completion}, 400: {"model": ErrorBody}, 404: {"model": ErrorBody}})
async def create_completion(request: CompletionRequest, raw: Request) -> Response:
    server = server_of(raw)
    job = await prepare(server, raw, request)
    if request.stream:
        return EventStream(_stream(server, job, request), refusable=job.refusable)
    gather = search_beams(server, job, request) if request.use_beam_search else collect(server, job)
    outputs = await gather
    return json_response(_answer(server, job, request, outputs, await _echoes(server, job, request)))


async def prepare(server: Server, raw: Request, request: CompletionRequest, prefix: str = "cmpl") -> GenerationJob:
    """Return the work of a checked request. prefix: of the answer's id"""
    model = await server.check(request)
    check_request(request)
    job = make_job(server, raw, request, prefix, model, await read_prompts(server, request))
    await report_unenforced(raw, job.params[0].structured_outputs)
    return job


class _CompletionChoice:
    """One choice of the answer: what was sent of it, and the offsets of its text."""

    def __init__(self, server: Server, job: GenerationJob, request: CompletionRequest, prompt: int, echoed: str) -> None:
        """`echoed`: the prompt's text, if it is echoed."""
        self._request = request
        self._echoed = echoed
        self._prompt = job.prompts[prompt]
        self._silent = only_echoes(request)
        self._echo = bool(request.echo)
        as_ids = request.return_tokens_as_token_ids
        tokenizer = server.tokenizer_of(self._prompt)
        self._tokenizer = tokenizer
        self._names = TokenNames(tokenizer, server.settings.return_tokens_as_token_ids if as_ids is None else as_ids)
        self._params = job.params[prompt]
        self._offsets: TextOffsets | None = None
        self.tokens = 0
        self.begun = False

    def show(self, index: int, output: CompletionOutput, prompt: RequestOutput) -> CompletionChoice:
        """The next part of the choice: all of it, or a delta."""
        text, tokens, positions = output.text, output.token_ids, output.logprobs
        if self._silent:
            text, tokens, positions = "", [], []
        shown: Sequence[int] = tokens
        if self._echo and not self.begun:
            text = self._echoed + text
            shown = [*self._prompt.ids, *tokens]
            positions = Joined(prompt.prompt_logprobs or (), positions or ())
        choice: CompletionChoice = {
            "index": index,
            "text": text,
            "logprobs": self._logprobs(shown, positions),
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
        }
        if self._request.return_token_ids:
            if not self.begun:
                choice["prompt_token_ids"] = self._prompt.ids
            choice["token_ids"] = list(tokens)
        self.tokens += len(tokens)
        self.begun = True
        return choice

    def _logprobs(self, tokens: Sequence[int], positions: Sequence[TokenLogprobs | None] | None) -> CompletionLogprobs | None:
        if self._request.logprobs is None or positions is None:
            return None
        if self._offsets is None:
            ids = self._prompt.ids
            if self._echo:  # a text is shown as it came, without what was added to it
                self._offsets = TextOffsets(self._tokenizer, (), self._params, ids, self._prompt.text is not None)
            else:
                self._offsets = TextOffsets(self._tokenizer, ids, self._params)
        return completion_logprobs(tokens, positions, self._names, self._offsets)


async def _echoes(server: Server, job: GenerationJob, request: CompletionRequest) -> list[str]:
    """The texts of the prompts, if they are echoed."""
    out: list[str] = []
    for prompt in job.prompts if request.echo else ():
        text = prompt.text
        if text is None and server.llm.tokenizer is not None:
            text = await server.llm.prompts.of(prompt.extras).decode(prompt.ids, skip_special_tokens=False)
        out.append(text or "")
    return out or [""] * len(job.prompts)


def _answer(
    server: Server, job: GenerationJob, request: CompletionRequest, outputs: Sequence[RequestOutput], echoes: Sequence[str]
) -> dict[str, Any]:
    parts = [(i, part) for i, output in enumerate(outputs) for part in output.outputs]
    scored = request.prompt_logprobs is not None

    def show(index: int) -> CompletionChoice:
        i, part = parts[index]
        shown = _CompletionChoice(server, job, request, i, echoes[i]).show(index, part, outputs[i])
        shown.setdefault("token_ids", None)
        shown.setdefault("prompt_token_ids", None)
        shown["prompt_logprobs"] = prompt_logprobs(outputs[i].prompt_logprobs) if scored else None
        return shown

    generated = 0 if only_echoes(request) else sum(len(part.token_ids) for _, part in parts)
    cached = sum(output.num_cached_tokens for output in outputs)
    single = len(parts) == 1
    return {
        **_head(job),
        "choices": few(map(show, range(len(parts))), generated + len(parts)),
        "service_tier": None,
        "system_fingerprint": server.fingerprint,
        "usage": usage_of(job.prompt_tokens, generated, server.reported_cached(cached)),
        "metrics": timing_of(outputs[0].metrics, server.speculates) if job.timed and single else None,
    }


async def _stream(server: Server, job: GenerationJob, request: CompletionRequest) -> Events:
    usage = StreamUsage(server, job, request.stream_options)
    echoes = await _echoes(server, job, request)
    choices = [_CompletionChoice(server, job, request, i // job.n, echoes[i // job.n]) for i in range(len(job.prompts) * job.n)]
    head = _head(job)
    async with aclosing(run(server, job)) as outputs:
        async for prompt, output in outputs:
            raise_failure(output)
            log_delta(server, job, output)
            usage.note(prompt, output)
            for part in output.outputs:
                index = prompt * job.n + part.index
                choice = choices[index]
                first = request.echo and not choice.begun
                chunk: dict[str, Any] = {**head, "choices": [choice.show(index, part, output)]}
                if first or len(part.token_ids) > FEW:
                    chunk = Large(chunk)
                yield usage.mark(chunk, prompt, choice.tokens, part.finish_reason is not None)
    if usage.include_usage:
        yield {**head, "choices": [], **usage.final(sum(choice.tokens for choice in choices))}


def _head(job: GenerationJob) -> dict[str, Any]:
    return {"id": job.id, "object": "text_completion", "created": job.created, "model": job.model}


# ---- SageMaker's /invocations: one path for chats and completions, distinguished by their fields

invocations_router = APIRouter(route_class=JSONRoute, tags=["SageMaker"])


def _kind(body: Any) -> str:
    for field in ("messages", "prompt"):
        if isinstance(body, dict) and field in body:
            return field
    raise HttpError(400, "the body must have messages, for a chat completion, or a prompt, for a completion", "body")


Invocation = Annotated[
    Annotated[ChatRequest, Tag("messages")] | Annotated[CompletionRequest, Tag("prompt")], Discriminator(_kind)
]


@invocations_router.post("/invocations", responses={400: {"model": ErrorBody}, 404: {"model": ErrorBody}})
async def invoke(request: Invocation, raw: Request) -> Response:
    if isinstance(request, ChatRequest):
        return await create_chat_completion(request, raw)
    return await create_completion(request, raw)
