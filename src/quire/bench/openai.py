"""The OpenAI protocol from the client's side: bodies of requests, and what a stream of chunks tells."""

import json
from collections.abc import Mapping
from typing import Any

from quire.bench.client import EventReader
from quire.bench.record import Record
from quire.bench.samples import Sample
from quire.types.errors import ConfigError

MAX_ERROR = 2000
FAILED_ENDINGS = {"error": "the server ended the answer with an error", "abort": "the server aborted the request"}


def request_body(sample: Sample, *, chat: bool, model: str, fields: Mapping[str, Any]) -> bytes:
    """`fields` are the sampling parameters and whatever else the user wants said; they win."""
    body: dict[str, Any] = {"model": model}
    if chat:
        if sample.messages is None and not isinstance(sample.prompt, str):
            raise ConfigError("a chat endpoint takes text, not token ids; use --prompt-format text or --backend openai")
        body["messages"] = sample.messages or [{"role": "user", "content": sample.prompt}]
        body["max_completion_tokens"] = sample.output_tokens
    else:
        if sample.prompt is None:
            raise ConfigError("the data set holds chat messages; use --backend openai-chat")
        body["prompt"] = sample.prompt if isinstance(sample.prompt, str) else sample.prompt.tolist()
        body["max_tokens"] = sample.output_tokens
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    return json.dumps(body | dict(fields), separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogatepass")


class StreamReceiver:
    """Takes the streamed answer to one request and writes it into its record."""

    def __init__(self, record: Record, keep_text: bool = False) -> None:
        self.record = record
        self._keep_text = keep_text
        self._events = EventReader()
        self._status = 0
        self._refusal = b""  # the body, where it is not a stream
        self._usage: Mapping[str, Any] | None = None
        self._empty_end: float | None = None  # when a chunk came with nothing but the finish reason
        self._streamed_ids: int | None = None  # token ids in the chunks, where the server sends them
        self._finish: str | None = None
        self._done = 0.0

    def head(self, status: int, headers: Mapping[str, str]) -> None:
        self._status = status
        kind = headers.get("content-type", "")
        if status == 200 and not kind.startswith("text/event-stream"):
            self.record.error = f"the server did not stream: it answered with content-type {kind or 'none'}"

    def body(self, data: bytes, now: float) -> None:
        if self._status != 200 or self.record.error is not None:
            self._refusal = (self._refusal + data)[:MAX_ERROR]
            return
        for event in self._events.feed(data):
            if event == b"[DONE]":
                self._done = now
            else:
                self._take(event, now)

    def _take(self, event: bytes, now: float) -> None:
        try:
            chunk = json.loads(event)
            if chunk.get("error"):
                self.record.error = error_text(chunk, "error in the stream")
                return
            if chunk.get("usage"):
                self._usage = chunk["usage"]
            for choice in chunk.get("choices") or ():
                self._choose(choice, now)
        except (ValueError, TypeError, AttributeError):
            self.record.error = f"the stream holds something that is no chunk: {event[:80].decode('utf-8', 'replace')}"

    def _choose(self, choice: Mapping[str, Any], now: float) -> None:
        delta = choice.get("delta")
        if delta is None:
            text = choice.get("text") or ""
            content: Any = text
            opening = False
        else:
            text = delta.get("content") or ""
            content = text or delta.get("reasoning") or delta.get("reasoning_content") or delta.get("tool_calls")
            opening = "role" in delta and not content  # it says who speaks, and no token has come
        ids = choice.get("token_ids")
        if ids:
            self._streamed_ids = (self._streamed_ids or 0) + len(ids)
        finish = choice.get("finish_reason")
        if finish is not None:
            self._finish = finish
        if content or ids or (finish is None and not opening):  # half a character is a token without text
            self.record.arrivals.append(now)
        elif finish is not None:
            self._empty_end = now
        if self._keep_text and text:
            self.record.text += text

    def finish(self, now: float) -> None:
        """The response has ended: settles the record. `now` counts where the stream did not say that it is done."""
        record, usage = self.record, self._usage
        record.end = self._done or now
        if usage is not None:
            record.output_tokens = int(usage.get("completion_tokens") or 0)
            record.prompt_tokens = int(usage.get("prompt_tokens") or 0) or record.prompt_tokens
            record.cached_tokens = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
        if self._empty_end is not None and record.output_tokens > len(record.arrivals):
            record.arrivals.append(self._empty_end)  # a last token without text
        record.counted = usage is not None
        if usage is None or record.output_tokens < len(record.arrivals):
            record.output_tokens = len(record.arrivals)
        record.error = record.error or self._complaint()

    def _complaint(self) -> str | None:
        record = self.record
        if self._status != 200:
            return error_text(_json(self._refusal), f"HTTP {self._status}", self._refusal)
        if self._finish in FAILED_ENDINGS:
            return FAILED_ENDINGS[self._finish]
        if not self._done and self._finish is None:
            return f"the stream was cut after {record.output_tokens} tokens"
        if not record.arrivals:
            return "the stream held no token"
        if self._streamed_ids is not None and record.counted and self._streamed_ids != record.output_tokens:
            return f"the stream carried {self._streamed_ids} tokens, its usage says {record.output_tokens}"
        return None


def error_text(said: Any, prefix: str, raw: bytes = b"") -> str:
    """`{"error": {"message": ...}}` and its relatives in one line."""
    error = said.get("error", said) if isinstance(said, dict) else said
    if isinstance(error, dict):
        error = error.get("message") or error.get("detail") or error
    text = str(error) if error else raw.decode("utf-8", "replace")
    text = " ".join(text.split())[:400]
    return f"{prefix}: {text}" if text else prefix


def _json(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        return None
