"""A small OpenAI server whose every delay, error and cut is known. It runs in a thread; it knows no model."""

import asyncio
import json
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from patience import PATIENCE

END = b"0\r\n\r\n"


@dataclass(frozen=True)
class Answer:
    """How one request is answered. `tokens` are the numbers of tokens per chunk; None is one each, as many as asked for."""

    first: float = 0.0  # seconds to the first chunk
    gap: float = 0.0  # between chunks
    tokens: Sequence[int] | None = None
    status: int = 200
    error: Any = None  # the body of an answer that is not 200, or an event in the stream, when `error_after` chunks have come
    error_after: int | None = None
    cut_after: int | None = None  # chunks, then the connection is closed; -1 closes it without a word
    hang_after: int | None = None  # chunks, then nothing more
    usage: bool = True
    cached: int = 0
    done: bool = True
    finish: str = "length"
    token_ids: bool = False
    lost: int = 0  # token ids that are missing in the first chunk
    separate_finish: bool = False  # the finish reason comes in a chunk of its own
    pieces: int | None = None  # the stream is written so many bytes at a time
    close: bool = False  # the connection is closed after the answer


@dataclass
class Seen:
    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    at: float
    left: float = 0.0


@dataclass
class FakeOpenAI:
    answer: Callable[[dict[str, Any], int], Answer] = lambda _body, _index: Answer()
    models: Sequence[str] = ("fake",)
    vocab_size: int | None = 1000  # None: there is no /tokenize
    version: str | None = "1.2.3"
    key: str | None = None
    tls: ssl.SSLContext | None = None
    loading: int = 0  # questions for the models that are answered with 503
    idle_close: bool = False  # connections are closed when one answer has been given, without saying so before
    port: int = 0  # 0: any that is free
    requests: list[Seen] = field(default_factory=list)
    connections: int = 0
    traces: Sequence[str] | None = None  # of /stop_profile; None: there is no profiler
    running: int = 0
    peak: int = 0

    def __enter__(self) -> "FakeOpenAI":
        ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main(ready)))
        self._thread.start()
        assert ready.wait(PATIENCE)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://127.0.0.1:{self.port}"

    @property
    def generated(self) -> list[Seen]:
        return [seen for seen in self.requests if seen.path.endswith("completions")]

    async def _main(self, ready: threading.Event) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        server = await asyncio.start_server(self._accept, "127.0.0.1", self.port, ssl=self.tls, backlog=2048)
        self.port = server.sockets[0].getsockname()[1]
        ready.set()
        await self._stop.wait()
        server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            while await self._serve(reader, writer) and not self.idle_close:
                pass
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        _method, path, _version = head[0].split(" ")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:] if line)}
        raw = await reader.readexactly(int(headers.get("content-length", 0)))
        body = json.loads(raw) if raw else {}
        seen = Seen(path, headers, body, time.perf_counter())
        self.requests.append(seen)
        if self.key is not None and headers.get("authorization") != f"Bearer {self.key}":
            return self._say(writer, 401, {"error": "Unauthorized"})
        if path.endswith("/models") and self.loading:
            self.loading -= 1
            return self._say(writer, 503, {"error": {"message": "the model is still loading"}})
        if path.endswith("/models"):
            return self._say(writer, 200, {"object": "list", "data": [{"id": name} for name in self.models]})
        if path.endswith("/tokenize") and self.vocab_size is not None:
            words = body["prompt"].split()
            return self._say(writer, 200, {"count": len(words), "tokens": [*range(1, len(words)), self.vocab_size - 1]})
        if path.endswith("/version") and self.version is not None:
            return self._say(writer, 200, {"version": self.version})
        if path.endswith("_profile") and self.traces is not None:
            return self._say(writer, 200, {"files": self.traces} if "stop" in path else {})
        if not path.endswith("completions"):
            return self._say(writer, 404, {"detail": "Not Found"})
        index = len(self.generated) - 1
        self.running += 1
        self.peak = max(self.peak, self.running)
        try:
            return await self._complete(writer, body, self.answer(body, index), "chat" in path)
        finally:
            self.running -= 1
            seen.left = time.perf_counter()

    def _say(self, writer: asyncio.StreamWriter, status: int, said: Any) -> bool:
        content = said.encode() if isinstance(said, str) else json.dumps(said).encode()
        writer.write(b"HTTP/1.1 %d Some Phrase\r\nContent-Length: %d\r\n\r\n" % (status, len(content)) + content)
        return True

    async def _complete(self, writer: asyncio.StreamWriter, body: dict[str, Any], how: Answer, chat: bool) -> bool:
        assert body["stream"] is True
        if body["model"] not in self.models:
            return self._say(writer, 404, {"error": {"message": f"The model `{body['model']}` does not exist.", "code": 404}})
        if how.cut_after == -1:
            return False
        await asyncio.sleep(how.first)
        if how.status != 200:
            return self._say(writer, how.status, how.error)
        ending = b"Connection: close\r\n" if how.close else b""
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
            + ending
            + b"Transfer-Encoding: chunked\r\n\r\n"
        )
        asked = body["max_completion_tokens" if chat else "max_tokens"]
        tokens = [1] * asked if how.tokens is None else list(how.tokens)
        if chat:
            await self._event(writer, {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}, how)
        for position, count in enumerate(tokens):
            if position:
                await asyncio.sleep(how.gap)
            if how.cut_after == position:
                return False
            if how.hang_after == position:
                await asyncio.sleep(60)
            if how.error_after == position:
                await self._event(writer, how.error, how)
                await self._event(writer, "[DONE]", how)
                writer.write(END)
                return True
            last = position == len(tokens) - 1 and not how.separate_finish
            await self._event(writer, {"choices": [self._choice(chat, count, how, position, last)]}, how)
        if how.separate_finish:
            await self._event(writer, {"choices": [self._choice(chat, 0, how, -1, True)]}, how)
        if how.usage:
            usage = {"prompt_tokens": self._length(body), "completion_tokens": sum(tokens)}
            await self._event(
                writer, {"choices": [], "usage": usage | {"prompt_tokens_details": {"cached_tokens": how.cached}}}, how
            )
        if how.done:
            await self._event(writer, "[DONE]", how)
        writer.write(END)
        await writer.drain()
        return not how.close

    def _length(self, body: dict[str, Any]) -> int:
        prompt = body.get("prompt") or body["messages"][0]["content"]
        return len(prompt.split()) if isinstance(prompt, str) else len(prompt)

    def _choice(self, chat: bool, count: int, how: Answer, position: int, last: bool) -> dict[str, Any]:
        text = " la" * count
        choice = {"index": 0, "delta": {"content": text}} if chat else {"index": 0, "text": text}
        choice["finish_reason"] = how.finish if last else None
        if how.token_ids:
            choice["token_ids"] = list(range(count - (how.lost if position == 0 else 0)))
        return choice

    async def _event(self, writer: asyncio.StreamWriter, said: Any, how: Answer) -> None:
        data = b"data: %s\n\n" % (said.encode() if isinstance(said, str) else json.dumps(said).encode())
        chunk = b"%x\r\n%s\r\n" % (len(data), data)
        size = how.pieces or len(chunk)
        for start in range(0, len(chunk), size):
            writer.write(chunk[start : start + size])
            if how.pieces:
                await asyncio.sleep(0)
        await writer.drain()
