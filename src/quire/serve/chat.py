"""/v1/chat/completions: chat requests of OpenAI's protocol, streamed or whole."""

from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request, Response

from quire.serve.body import JSONRoute
from quire.serve.chat_stream import ChoiceDelta, Turn, prepare_turn, reasoning_tokens, run_turn, stream_turn
from quire.serve.errors import ErrorBody, json_response
from quire.serve.events import Message
from quire.serve.generation import StreamUsage, timing_of, usage_of
from quire.serve.inputs import text_of
from quire.serve.logprobs import FEW, TokenNames, chat_logprobs, few, prompt_logprobs
from quire.serve.protocol import ChatChunkChoice, ChatCompletion, ChatLogprobs, ChatMessage, ChatRequest, Delta
from quire.serve.server import Server, server_of
from quire.serve.sse import Events, EventStream, Large
from quire.text.parse.events import Event, Reasoning, Text, ToolArguments, ToolStart
from quire.types.outputs import CompletionOutput

router = APIRouter(route_class=JSONRoute, tags=["OpenAI"])


@router.post(
    "/v1/chat/completions", responses={200: {"model": ChatCompletion}, 400: {"model": ErrorBody}, 404: {"model": ErrorBody}}
)
async def create_chat_completion(request: ChatRequest, raw: Request) -> Response:
    server = server_of(raw)
    turn = await prepare_turn(server, raw, request, "chatcmpl")
    reply = _ChatReply(server, turn, request)
    if request.stream:
        return EventStream(reply.stream(), refusable=turn.job.refusable)
    return json_response(await reply.answer())


class _ChatReply:
    """One answer, whole or in chunks."""

    def __init__(self, server: Server, turn: Turn, request: ChatRequest) -> None:
        self._server = server
        self._turn = turn
        self._job = turn.job
        self._request = request
        as_ids = request.return_tokens_as_token_ids
        as_ids = server.settings.return_tokens_as_token_ids if as_ids is None else as_ids
        self._names = TokenNames(server.tokenizer_of(self._job.prompts[0]), as_ids)
        last = request.messages[-1]
        self._role = server.settings.response_role if request.add_generation_prompt else str(last["role"])
        self._echo = text_of(last) if request.echo and last["role"] == self._role else ""

    async def answer(self) -> dict[str, Any]:
        step = await run_turn(self._server, self._turn, self._request)
        messages = [Message().add(choice.events) for choice in step.choices]
        job, output = self._job, step.output
        generated = sum(len(choice.token_ids) for choice in output.outputs)
        reasoned = await self._reasoning_tokens(messages, [choice.reasoning_tokens for choice in step.choices])
        asked = self._request.prompt_logprobs is not None
        cached = self._server.reported_cached(output.num_cached_tokens)
        return {
            **self._head("chat.completion"),
            "choices": few(
                (self._choice(choice, one) for choice, one in zip(step.choices, messages, strict=True)), generated + job.n
            ),
            "service_tier": None,
            "system_fingerprint": self._server.fingerprint,
            "usage": usage_of(job.prompt_tokens, generated, cached, reasoned, job.media_tokens),
            "prompt_logprobs": prompt_logprobs(output.prompt_logprobs) if asked else None,
            "prompt_token_ids": self._prompt().get("prompt_token_ids"),
            "prompt_text": self._prompt().get("prompt_text"),
            "metrics": timing_of(output.metrics, self._server.speculates) if job.timed and job.n == 1 else None,
        }

    def _choice(self, choice: ChoiceDelta, message: Message) -> dict[str, Any]:
        part = choice.part
        return {
            "index": part.index,
            "message": self._message(message),
            "logprobs": self._logprobs(part),
            "finish_reason": choice.finish_reason,
            "stop_reason": part.stop_reason,
            "token_ids": list(part.token_ids) if self._request.return_token_ids else None,
        }

    async def stream(self) -> Events:
        job = self._job
        usage = StreamUsage(self._server, job, self._request.stream_options)
        tokens = [0] * job.n
        messages = [Message() for _ in range(job.n)]
        counts: list[int | None] = [None] * job.n
        head = self._head("chat.completion.chunk")
        begun = False
        async with aclosing(stream_turn(self._server, self._turn)) as steps:
            async for step in steps:
                usage.note(0, step.output)
                if not begun:
                    begun = True
                    for opening in self._openings():
                        yield usage.mark({**head, "choices": [opening], **self._prompt()}, 0, 0, finished=False)
                for choice in step.choices:
                    index = choice.part.index
                    messages[index].add(event for event in choice.events if isinstance(event, Reasoning))
                    counts[index] = choice.reasoning_tokens
                    tokens[index] += len(choice.part.token_ids)
                    for chunk in self._chunks(choice):
                        event: dict[str, Any] = {**head, "choices": [chunk]}
                        if len(choice.part.token_ids) > FEW:  # its logprobs are made when they are written
                            event = Large(event)
                        yield usage.mark(event, 0, tokens[index], chunk["finish_reason"] is not None)
        if usage.include_usage:
            yield {**head, "choices": [], **usage.final(sum(tokens), await self._reasoning_tokens(messages, counts))}

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

    def _chunks(self, choice: ChoiceDelta) -> list[ChatChunkChoice]:
        """One chunk per event. The last one carries what belongs to the tokens, even if its delta is empty."""
        part = choice.part
        deltas = [delta for event in choice.events if (delta := _delta(event)) is not None]
        if not deltas and self._turn.reading.form is None:
            deltas = [{"content": ""}]
        elif not deltas:
            if choice.finish_reason is None and not self._request.logprobs and not self._request.return_token_ids:
                return []
            deltas = [{}]
        chunks: list[ChatChunkChoice] = [
            {"index": part.index, "delta": delta, "logprobs": None, "finish_reason": None} for delta in deltas
        ]
        last = chunks[-1]
        last["logprobs"] = self._logprobs(part)
        last["finish_reason"] = choice.finish_reason
        if choice.finish_reason is not None:
            last["stop_reason"] = part.stop_reason
        if self._request.return_token_ids:
            last["token_ids"] = list(part.token_ids)
        return chunks

    def _message(self, message: Message) -> ChatMessage:
        content: str | None = self._echo + message.text
        answer: ChatMessage = {
            "role": self._role,
            "content": None if not content and (message.calls or message.reasoning) else content,
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
            "reasoning": message.reasoning or None,
        }
        if message.calls:
            answer["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in message.calls
            ]
        return answer

    async def _reasoning_tokens(self, messages: Sequence[Message], counts: Sequence[int | None]) -> int | None:
        """Count reasoning tokens; None where no reasoning is parsed."""
        if self._server.formats.reasoning is None:
            return None
        answers = zip(messages, counts, strict=True)
        return sum([await reasoning_tokens(self._server, one.reasoning, known) for one, known in answers])

    def _logprobs(self, choice: CompletionOutput) -> ChatLogprobs | None:
        if not self._request.logprobs or choice.logprobs is None:
            return None
        top = -1 if self._request.logprob_token_ids else self._request.top_logprobs or 0
        return chat_logprobs(choice.token_ids, choice.logprobs, self._names, top)

    def _prompt(self) -> dict[str, Any]:
        """Return the prompt's ids and text, as far as the request asks for them."""
        prompt = self._job.prompts[0]
        fields: dict[str, Any] = {}
        if self._request.return_token_ids:
            fields["prompt_token_ids"] = prompt.ids
        if self._request.return_prompt_text:
            fields["prompt_text"] = prompt.text
        return fields

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._job.id, "object": kind, "created": self._job.created, "model": self._job.model}


def _delta(event: Event) -> Delta | None:
    match event:
        case Text(text):
            return {"content": text}
        case Reasoning(text):
            return {"reasoning": text}
        case ToolStart(index, name, call_id):
            function: Any = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]}
        case ToolArguments(index, piece):
            return {"tool_calls": [{"index": index, "function": {"arguments": piece}}]}
    return None  # OpenAI's chunks do not mark the end of a call
