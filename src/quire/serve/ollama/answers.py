"""Answers of /api/chat and /api/generate: whole, or as lines of JSON, the last of which has counts and times."""

import time
from collections.abc import Iterable
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec

from quire.serve.chat_stream import ChoiceDelta, Turn, TurnDelta, run_turn, stream_turn
from quire.serve.events import Message, MessageCall, Reading
from quire.serve.generation import GenerationJob, collect
from quire.serve.logprobs import FEW, TokenNames, chat_logprobs
from quire.serve.protocol import ChatRequest
from quire.serve.server import Server
from quire.serve.sse import Events, Large
from quire.text.parse.events import Event, Reasoning, Text, ToolEnd
from quire.types.outputs import CompletionOutput, RequestOutput

Kind = Literal["chat", "generate"]


class OllamaReply:
    """One answer. name: the model's, as the request has it; top: alternatives per token, None: no logprobs."""

    def __init__(self, kind: Kind, server: Server, name: str, job: GenerationJob, top: int | None, started: int) -> None:
        self._kind, self._server, self._name, self._job, self._top, self._started = kind, server, name, job, top, started
        self._names = TokenNames(server.tokenizer_of(job.prompts[0]), server.settings.return_tokens_as_token_ids)

    async def of_chat(self, turn: Turn, request: ChatRequest) -> dict[str, Any]:
        return self._whole(await run_turn(self._server, turn, request))

    async def of_prompt(self) -> dict[str, Any]:
        [output] = await collect(self._server, self._job)
        [part] = output.outputs
        return self._whole(TurnDelta(output, [ChoiceDelta(part, [Text(part.text)], part.finish_reason, None)]))

    def _whole(self, step: TurnDelta) -> dict[str, Any]:
        [choice] = step.choices
        message = Message().add(choice.events)
        return {
            **self._head(),
            **self._content(message.text, message.reasoning, self._shown(enumerate(message.calls))),
            **self._logprobs(choice.part),
            **self._end(step.output, choice.finish_reason, len(choice.part.token_ids)),
        }

    async def stream(self, turn: Turn) -> Events:
        calls, tokens = Message(), 0
        async with aclosing(stream_turn(self._server, turn)) as steps:
            async for step in steps:
                for choice in step.choices:
                    tokens += len(choice.part.token_ids)
                    content = self._piece(choice.events, calls)
                    logprobs = self._logprobs(choice.part)
                    if content or logprobs:
                        line = {**self._head(), **(content or self._content("")), **logprobs, "done": False}
                        yield Large(line) if len(choice.part.token_ids) > FEW else line
                    if choice.finish_reason is not None:
                        yield {**self._head(), **self._content(""), **self._end(step.output, choice.finish_reason, tokens)}

    def _piece(self, events: Iterable[Event], calls: Message) -> dict[str, Any]:
        """Return the content that is new; nothing if there is none. Calls are sent when they are complete."""
        text, reasoning, ended = "", "", list[tuple[int, MessageCall]]()
        for event in events:
            match event:
                case Text(piece):
                    text += piece
                case Reasoning(piece):
                    reasoning += piece
                case _:
                    calls.add([event])
                    if isinstance(event, ToolEnd):
                        ended.append((event.index, calls.calls[event.index]))
        shown = self._shown(ended)
        return self._content(text, reasoning, shown) if text or reasoning or shown else {}

    def _shown(self, calls: Iterable[tuple[int, MessageCall]]) -> list[dict[str, Any]]:
        """A call that was cut off is left out: clients would call with what is left of the arguments."""
        return [
            {"id": call.id, "function": {"index": i, "name": call.name, "arguments": _raw(call.arguments)}}
            for i, call in calls
            if call.complete
        ]

    def _head(self) -> dict[str, Any]:
        return {"model": self._name, "created_at": now()}

    def _content(self, text: str, reasoning: str = "", calls: list[dict[str, Any]] | None = None) -> dict[str, Any]:
        thinking = {"thinking": reasoning} if reasoning else {}
        if self._kind == "generate":
            return {"response": text, **thinking}
        return {"message": {"role": "assistant", "content": text, **thinking, **({"tool_calls": calls} if calls else {})}}

    def _logprobs(self, part: CompletionOutput) -> dict[str, Any]:
        if self._top is None or part.logprobs is None or not part.token_ids:
            return {}
        return {"logprobs": chat_logprobs(part.token_ids, part.logprobs, self._names, self._top)["content"]}

    def _end(self, output: RequestOutput, finish: str | None, tokens: int) -> dict[str, Any]:
        metrics = output.metrics
        times = (0.0, 0.0, 0.0) if metrics is None else (metrics.scheduled_ts, metrics.first_token_ts, metrics.last_token_ts)
        return {
            "done": True,
            "done_reason": "length" if finish == "length" else "stop",
            "total_duration": time.monotonic_ns() - self._started,
            "load_duration": 0,
            "prompt_eval_count": self._job.prompt_tokens,
            "prompt_eval_duration": _nanoseconds(times[0], times[1]),
            "eval_count": tokens,
            "eval_duration": _nanoseconds(times[1], times[2]),
        }


def _raw(arguments: str) -> msgspec.Raw:
    """Return the arguments of a complete call, which are a JSON object, for a line: line ends are white space there."""
    return msgspec.Raw(arguments.replace("\n", " ").replace("\r", " ").encode())


def _nanoseconds(start: float, end: float) -> int:
    """Return the time between; at least 1, since clients divide by it."""
    return max(1, round((end - start) * 1e9)) if start and end else 1


def now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def without_prompt(name: str, kind: Kind) -> dict[str, Any]:
    """Return the answer to a request that only loads the model."""
    content = {"response": ""} if kind == "generate" else {"message": {"role": "assistant", "content": ""}}
    return {"model": name, "created_at": now(), **content, "done": True, "done_reason": "load"}


def plain_turn(job: GenerationJob) -> Turn:
    """Return the turn of a completion, whose answer is text."""
    return Turn(job, Reading())
