"""The OpenAI protocol from the client's side: request bodies, streamed answers, and queries before the load."""

import asyncio
import json
import time
from collections.abc import Mapping
from typing import Any, Literal

from quire.bench.client import Client, EventReader, WholeAnswer, reason
from quire.bench.metrics import Record
from quire.bench.samples import WORDS, Sample
from quire.types.errors import ConfigError, EngineError

MAX_ERROR = 2000
FAILED_ENDINGS = {"error": "the server ended the answer with an error", "abort": "the server aborted the request"}


Kind = Literal["completions", "chat", "embeddings", "rerank"]
QUERY_WORDS = 16  # of a prompt whose other words are the document that is ranked


def request_body(sample: Sample, *, kind: Kind, model: str, fields: Mapping[str, Any]) -> bytes:
    """Return the JSON body of a request. `fields` are sampling parameters and the user's own fields; they override others."""
    body: dict[str, Any] = {"model": model}
    if kind in ("embeddings", "rerank"):
        body |= _pooling_body(sample, kind)
        return json.dumps(body | dict(fields), separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogatepass")
    if kind == "chat":
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


def _pooling_body(sample: Sample, kind: Kind) -> dict[str, Any]:
    if sample.prompt is None:
        raise ConfigError(f"the data set holds chat messages, and {kind} requests take text")
    if kind == "embeddings":
        return {"input": sample.prompt if isinstance(sample.prompt, str) else sample.prompt.tolist()}
    if not isinstance(sample.prompt, str):
        raise ConfigError("rerank takes text, not token ids; use --prompt-format text")
    words = sample.prompt.split(" ")
    cut = min(QUERY_WORDS, len(words) // 2)
    return {"query": " ".join(words[:cut]) or words[0], "documents": [" ".join(words[cut:])], "return_documents": False}


class WholeReceiver:
    """Takes an answer that comes in one piece, and writes it into its record."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self._status = 0
        self._content = bytearray()

    def head(self, status: int, headers: Mapping[str, str]) -> None:  # noqa: ARG002
        self._status = status

    def body(self, data: bytes, now: float) -> None:  # noqa: ARG002
        self._content += data

    def finish(self, now: float) -> None:
        """The response has ended: settle the record."""
        record, said = self.record, _json(bytes(self._content))
        record.end = now
        record.arrivals.append(now)
        usage = said.get("usage") if isinstance(said, dict) else None
        record.counted = isinstance(usage, dict)
        if isinstance(usage, dict):
            record.prompt_tokens = int(usage.get("prompt_tokens") or usage.get("total_tokens") or 0) or record.prompt_tokens
            record.cached_tokens = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
        if self._status != 200:
            record.error = error_text(said, f"HTTP {self._status}", bytes(self._content[:MAX_ERROR]))
        elif not isinstance(said, dict):
            record.error = "the answer is not a JSON object"


class StreamReceiver:
    """Receives the streamed answer to one request and fills its record."""

    def __init__(self, record: Record, keep_text: bool = False) -> None:
        self.record = record
        self._keep_text = keep_text
        self._events = EventReader()
        self._status = 0
        self._refusal = b""  # the body, if it is not a stream
        self._usage: Mapping[str, Any] | None = None
        self._empty_end: float | None = None  # when a chunk came that has only the finish reason
        self._streamed_ids: int | None = None  # token ids in the chunks, if the server sends them
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
            opening = "role" in delta and not content  # it has the role only, and no token
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
        """Complete the record after the response. `now` is the end time if the stream had no [DONE]."""
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
        record.error = record.error or self._failure()

    def _failure(self) -> str | None:
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
            return f"the stream had {self._streamed_ids} token ids, but usage reports {record.output_tokens}"
        return None


def error_text(body: Any, prefix: str, raw: bytes = b"") -> str:
    """Return an error body such as `{"error": {"message": ...}}` in one line."""
    error = body.get("error", body) if isinstance(body, dict) else body
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


RETRY_S = 0.5
UNAUTHORIZED, UNAVAILABLE = 401, 503
CHARACTERS_PER_TOKEN = 4  # of English text, if the server cannot tokenize


def _probe() -> str:
    """Return words in many scripts, so that some of their tokens are near the end of any vocabulary."""
    scripts = ((0x0400, 0x0460), (0x05D0, 0x05EB), (0x0620, 0x0650), (0x0905, 0x0940), (0x3041, 0x30FF), (0xAC00, 0xB000))
    letters = "".join(chr(code) for first, last in scripts for code in range(first, last, 3))
    chinese = "".join(chr(code) for code in range(0x4E00, 0x9FA5, 61))
    names = " ".join(word.capitalize() + word + word.upper() for word in WORDS)
    return f"{' '.join(WORDS)} {names} {letters} {chinese}"


class MeasuredServer:
    """Queries before the load. It also counts tokens; without `/tokenize`, `estimated` is set and 4 characters are a token."""

    def __init__(self, client: Client, model: str | None = None) -> None:
        self.client = client
        self.model = model
        self.estimated = False

    async def wait_ready(self, seconds: float) -> None:
        """Wait until the server listens and does not answer 503, at most this long; with 0 it must listen now."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                await self.client.reach()
                if not seconds or (await self._ask("/v1/models")).status != UNAVAILABLE:
                    return
                problem = EngineError(f"the server at {self.client.origin} is not ready after {seconds:g} s")
            except EngineError as error:
                problem = error
            if time.monotonic() >= deadline:
                raise problem
            await asyncio.sleep(RETRY_S)

    async def first_model(self) -> str:
        answer = await self._ask("/v1/models")
        body = answer.json()
        if answer.status != 200:
            raise self._refused(answer)
        models = body.get("data") if isinstance(body, dict) else None
        name = models[0].get("id") if isinstance(models, list) and models and isinstance(models[0], dict) else None
        if not isinstance(name, str):
            raise EngineError(f"/v1/models of {self.client.origin} lists no model; give one with --model")
        return name

    async def check_key(self) -> None:
        """Check the API key once, before every request of the load fails with it."""
        answer = await self._ask("/v1/models")
        if answer.status == UNAUTHORIZED:
            raise self._refused(answer)

    def _refused(self, answer: WholeAnswer) -> EngineError:
        text = error_text(answer.json(), f"HTTP {answer.status}", answer.content)
        hint = "; give its key with --api-key or QUIRE_API_KEY" if answer.status == UNAUTHORIZED else ""
        return EngineError(f"/v1/models of {self.client.origin} answers {text}{hint}")

    async def _ask(self, endpoint: str) -> WholeAnswer:
        try:
            return await self.client.ask("GET", endpoint)
        except OSError as error:
            raise EngineError(f"{endpoint} of {self.client.origin}: {reason(error)}") from None

    async def vocab_size(self) -> int | None:
        """Return the largest id of a varied text plus one, a lower bound of the vocabulary; None without `/tokenize`."""
        tokens = await self._tokenize(_probe())
        return max(tokens) + 1 if tokens else None

    async def count(self, text: str) -> int:
        tokens = None if self.estimated else await self._tokenize(text)
        if tokens is None:
            self.estimated = True
            return -(-len(text) // CHARACTERS_PER_TOKEN)
        return len(tokens)

    async def version(self) -> str | None:
        answer = await self._ask_optional("GET", "/version")
        version = answer.get("version") if isinstance(answer, dict) else None
        return version if isinstance(version, str) else None

    async def start_profile(self) -> None:
        answer = await self._post("/start_profile")
        if answer.status != 200:
            told = error_text(answer.json(), f"HTTP {answer.status}", answer.content)
            raise EngineError(
                f"/start_profile of {self.client.origin} answers {told}. --profile requires a server with a profiler"
            )

    async def stop_profile(self) -> list[str]:
        """Return the traces, which are files on the machines of the engines; a server that does not name them has none."""
        answer = await self._post("/stop_profile")
        if answer.status != 200:
            told = error_text(answer.json(), f"HTTP {answer.status}", answer.content)
            raise EngineError(f"/stop_profile of {self.client.origin} answers {told}")
        body = answer.json()
        files = body.get("files") if isinstance(body, dict) else None
        return [str(file) for file in files] if isinstance(files, list) else []

    async def _post(self, endpoint: str) -> WholeAnswer:
        try:
            return await self.client.ask("POST", endpoint)
        except (OSError, TimeoutError) as error:
            raise EngineError(f"{endpoint} of {self.client.origin}: {reason(error)}") from None

    async def _tokenize(self, text: str) -> list[int] | None:
        question: dict[str, Any] = {"model": self.model, "prompt": text, "add_special_tokens": False}
        answer = await self._ask_optional("POST", "/tokenize", question)
        tokens = answer.get("tokens") if isinstance(answer, dict) else None
        if not isinstance(tokens, list) or not tokens or not all(type(token) is int for token in tokens):
            return None
        return tokens

    async def _ask_optional(self, method: str, endpoint: str, question: Any = None) -> Any:
        """Return the answer's JSON, or None if there is no such endpoint."""
        try:
            answer = await self.client.ask(method, endpoint, question)
        except OSError:
            return None
        return answer.json() if answer.status == 200 else None
