"""/v1/chat/completions: a conversation goes on."""

from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request, Response

from quire.serve.beam import search_beams
from quire.serve.body import JSONRoute
from quire.serve.disconnect import unless_gone
from quire.serve.errors import json_response
from quire.serve.generation import Job, collect, make_job, raise_failure, run
from quire.serve.limits import check_work
from quire.serve.logprobs import TokenNames, chat_logprobs, prompt_logprobs
from quire.serve.prompts import check_tools, render_messages, text_of, truncate
from quire.serve.protocol.chat import ChatChunkChoice, ChatCompletion, ChatLogprobs, ChatMessage, ChatRequest, Delta
from quire.serve.protocol.errors import ErrorBody
from quire.serve.sampling import check_request
from quire.serve.server import Server, server_of
from quire.serve.sse import Events, open_stream
from quire.serve.stream import StreamUsage
from quire.serve.usage import timing_of, usage_of
from quire.types.outputs import CompletionOutput, RequestOutput

router = APIRouter(route_class=JSONRoute, tags=["OpenAI"])


@router.post(
    "/v1/chat/completions", responses={200: {"model": ChatCompletion}, 400: {"model": ErrorBody}, 404: {"model": ErrorBody}}
)
async def create_chat_completion(request: ChatRequest, raw: Request) -> Response:
    server = server_of(raw)
    job = await unless_gone(raw.receive, _prepare(server, raw, request))
    reply = _Reply(server, job, request)
    if request.stream:
        return await open_stream(reply.stream(), raw.receive)
    gather = search_beams(server, job, request) if request.use_beam_search else collect(server, job)
    [output] = await unless_gone(raw.receive, gather)
    return json_response(reply.answer(output))


async def _prepare(server: Server, raw: Request, request: ChatRequest) -> Job:
    model = server.check(request)
    check_request(request)
    check_tools(request, request.tool_choice)
    check_work(1, request.n or 1, server.limits)
    prompt = await render_messages(server, request, request.messages, request.documents)
    return make_job(server, raw, request, "chatcmpl", model, [truncate(server, request, prompt)])


class _Reply:
    """One answer, whole or in chunks."""

    def __init__(self, server: Server, job: Job, request: ChatRequest) -> None:
        self._server = server
        self._job = job
        self._request = request
        as_ids = request.return_tokens_as_token_ids
        as_ids = server.settings.return_tokens_as_token_ids if as_ids is None else as_ids
        self._names = TokenNames(server.llm.tokenizer, as_ids)
        last = request.messages[-1]
        self._role = server.settings.response_role if request.add_generation_prompt else str(last["role"])
        self._echo = text_of(last) if request.echo and last["role"] == self._role else ""

    def answer(self, output: RequestOutput) -> dict[str, Any]:
        choices = [
            {
                "index": choice.index,
                "message": self._message(self._echo + choice.text),
                "logprobs": self._logprobs(choice),
                "finish_reason": choice.finish_reason,
                "stop_reason": choice.stop_reason,
                "token_ids": list(choice.token_ids) if self._request.return_token_ids else None,
            }
            for choice in output.outputs
        ]
        job = self._job
        generated = sum(len(choice.token_ids) for choice in output.outputs)
        asked = self._request.prompt_logprobs is not None
        return {
            **self._head("chat.completion"),
            "choices": choices,
            "service_tier": None,
            "system_fingerprint": self._server.fingerprint,
            "usage": usage_of(job.prompt_tokens, generated, self._server.told_cached(output.num_cached_tokens)),
            "prompt_logprobs": prompt_logprobs(output.prompt_logprobs) if asked else None,
            "prompt_token_ids": self._prompt().get("prompt_token_ids"),
            "prompt_text": self._prompt().get("prompt_text"),
            "metrics": timing_of(output.metrics) if job.timed and job.n == 1 else None,
        }

    async def stream(self) -> Events:
        job = self._job
        usage = StreamUsage(self._server, job, self._request.stream_options)
        tokens = [0] * job.n
        head = self._head("chat.completion.chunk")
        begun = False
        async with aclosing(run(self._server, job)) as outputs:
            async for _, output in outputs:
                raise_failure(output)
                usage.note(0, output)
                if not begun:
                    begun = True
                    for opening in self._openings():
                        yield usage.mark({**head, "choices": [opening], **self._prompt()}, 0, 0, finished=False)
                for part in output.outputs:
                    tokens[part.index] += len(part.token_ids)
                    finished = part.finish_reason is not None
                    yield usage.mark({**head, "choices": [self._chunk(part)]}, 0, tokens[part.index], finished)
        if usage.wanted:
            yield {**head, "choices": [], **usage.final(sum(tokens))}

    def _openings(self) -> list[ChatChunkChoice]:
        """Every choice begins with its role and no text; an echoed message follows."""
        deltas: list[Delta] = [{"role": self._role, "content": ""}]
        if self._echo:
            deltas.append({"content": self._echo})
        return [
            {"index": i, "delta": delta, "logprobs": None, "finish_reason": None}
            for delta in deltas
            for i in range(self._job.n)
        ]

    def _chunk(self, part: CompletionOutput) -> ChatChunkChoice:
        choice: ChatChunkChoice = {
            "index": part.index,
            "delta": {"content": part.text},
            "logprobs": self._logprobs(part),
            "finish_reason": part.finish_reason,
        }
        if part.finish_reason is not None:
            choice["stop_reason"] = part.stop_reason
        if self._request.return_token_ids:
            choice["token_ids"] = list(part.token_ids)
        return choice

    def _message(self, content: str) -> ChatMessage:
        return {
            "role": self._role,
            "content": content,
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
            "tool_calls": [],
            "reasoning": None,
        }

    def _logprobs(self, choice: CompletionOutput) -> ChatLogprobs | None:
        if not self._request.logprobs or choice.logprobs is None:
            return None
        top = -1 if self._request.logprob_token_ids else self._request.top_logprobs or 0
        return chat_logprobs(choice.token_ids, choice.logprobs, self._names, top)

    def _prompt(self) -> dict[str, Any]:
        """What the answer tells of the prompt, if asked to."""
        prompt = self._job.prompts[0]
        told: dict[str, Any] = {}
        if self._request.return_token_ids:
            told["prompt_token_ids"] = prompt.ids
        if self._request.return_prompt_text:
            told["prompt_text"] = prompt.text
        return told

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._job.id, "object": kind, "created": self._job.created, "model": self._job.model}
