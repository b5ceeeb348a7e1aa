"""vLLM's /inference/v1/generate (token ids in, token ids out) and /abort_requests, for developers.

A request is one of /v1/completions with a prompt of token ids: its checks, limits and sampling defaults apply.
"""

from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request, Response
from pydantic import Field

from quire.async_llm import AsyncLLM
from quire.serve.body import JSONRoute
from quire.serve.completions import prepare
from quire.serve.errors import json_response
from quire.serve.generation import GenerationJob, answer_of, collect, log_delta, raise_failure, run
from quire.serve.logprobs import TokenNames, chat_logprobs, prompt_logprobs
from quire.serve.protocol import CompletionRequest, RequestBody, StreamOptions
from quire.serve.server import Server, server_of
from quire.serve.sse import Events, EventStream
from quire.types.errors import InvalidParameter
from quire.types.outputs import CompletionOutput
from quire.types.sampling import SamplingParams

PREFIX = "generate"
# sampling parameters that a completion has as well; the others are refused
KNOWN = frozenset(CompletionRequest.model_fields) & frozenset(SamplingParams.__struct_fields__)
MAX_ABORTED = 1024  # ids in one request

token_router = APIRouter(route_class=JSONRoute, include_in_schema=False)


class GenerateRequest(RequestBody):
    token_ids: list[int] = Field(min_length=1)
    sampling_params: dict[str, Any] = Field(default_factory=dict)
    request_id: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    priority: int = 0

    def as_completion(self) -> CompletionRequest:
        for name in self.sampling_params:
            if name not in KNOWN:
                message = f"sampling_params.{name:.80} is not supported here. There are {', '.join(sorted(KNOWN))}"
                raise InvalidParameter(message, f"sampling_params.{name:.80}")
        own = self.model_dump(exclude={"token_ids", "sampling_params"}, exclude_unset=True)
        return CompletionRequest.model_validate({**self.sampling_params, **own, "prompt": self.token_ids})


@token_router.post("/inference/v1/generate")
async def generate(request: GenerateRequest, raw: Request) -> Response:
    server = server_of(raw)
    completion = request.as_completion()
    job = await prepare(server, raw, completion, PREFIX)
    if request.stream:
        return EventStream(_stream(server, job), refusable=job.refusable)
    [output] = await collect(server, job)
    answer = {
        "request_id": _shown(job),
        "choices": [_choice(server, job, choice) for choice in output.outputs],
        "prompt_logprobs": prompt_logprobs(output.prompt_logprobs),
        "kv_transfer_params": None,
    }
    return json_response(answer)


async def _stream(server: Server, job: GenerationJob) -> Events:
    async with aclosing(run(server, job)) as outputs:
        async for _, output in outputs:
            raise_failure(output)
            log_delta(server, job, output)
            yield {"request_id": _shown(job), "choices": [_choice(server, job, choice) for choice in output.outputs]}


def _choice(server: Server, job: GenerationJob, choice: CompletionOutput) -> dict[str, Any]:
    logprobs = None
    if choice.logprobs is not None:
        names = TokenNames(server.tokenizer_of(job.prompts[0]), as_ids=True)
        logprobs = chat_logprobs(choice.token_ids, choice.logprobs, names, job.params[0].logprobs or 0)
    return {
        "index": choice.index,
        "logprobs": logprobs,
        "finish_reason": choice.finish_reason,
        "token_ids": list(choice.token_ids),
    }


def _shown(job: GenerationJob) -> str:
    return job.id.removeprefix(f"{PREFIX}-")


class AbortRequest(RequestBody):
    request_ids: list[str] = Field(max_length=MAX_ABORTED)


@token_router.post("/abort_requests")
async def abort_requests(request: AbortRequest, raw: Request) -> Response:
    """End requests of all API processes by the ids of their answers."""
    server = server_of(raw)
    aborted = await abort_answers(server.llm, request.request_ids)
    if server.abort_in_others is not None:
        aborted += await server.abort_in_others(request.request_ids)
    return json_response({"aborted": aborted})


async def abort_answers(llm: AsyncLLM, answers: list[str]) -> int:
    """End requests of this process by the ids of their answers, with or without the protocol's prefix; return how many."""
    wanted, found = set(answers), []
    for engine_id in llm.open_ids:
        answer_id, _ = answer_of(engine_id)
        if answer_id in wanted or answer_id.partition("-")[2] in wanted:
            found.append(engine_id)
    await llm.abort(found)
    return len(found)
