"""A whole server in this process (its engine is in another): a tiny random Llama, a byte-level tokenizer, a real socket."""

import asyncio
import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Awaitable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import uvicorn
import uvloop

from patience import PATIENCE
from quick_engines import quick_engines
from quire.async_llm import AsyncLLM
from quire.config.args import EngineArgs
from quire.config.resolve import resolve
from quire.config.server_args import ServerArgs
from quire.device.registry import describe
from quire.engine.child import COMMAND
from quire.serve.app import RequestIds, build_app

NAME = "tiny"
NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # for clients of plain HTTP, which would each read all certificates


class Running:
    """An event loop in a thread, with an engine and any number of HTTP servers on it. `quick`: the engine is forked."""

    def __init__(self, directory: Path, command: Sequence[str] = COMMAND, quick: bool = True, **args: Any) -> None:
        defaults = {
            "served_model_name": [NAME, "also-tiny"],
            "device": "cpu",
            "block_size": 4,
            "max_num_seqs": 16,
            "max_num_batched_tokens": 64,
            "kv_cache_memory_bytes": 4 << 20,
        }
        self.loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self._stack = contextlib.ExitStack()
        settings = EngineArgs.from_kwargs(model=str(directory), **(defaults | args))
        with quick_engines() if quick else contextlib.nullcontext():
            self.llm = AsyncLLM(resolve(settings, lambda: "cpu", describe), command)
        self.call(self.llm.wait_ready())
        self.http = self._stack.enter_context(self.serve(ServerArgs()))

    def call(self, work: Awaitable[Any]) -> Any:
        """Runs a coroutine on the servers' loop."""

        async def run() -> Any:
            return await work

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(PATIENCE)

    @contextlib.contextmanager
    def serve(self, settings: ServerArgs, llm: Any = None) -> Iterator[httpx.Client]:
        """Another HTTP server over the same engine (or over something like one)."""
        listener = socket.create_server(("127.0.0.1", 0))
        app = RequestIds(build_app(llm or self.llm, settings), settings.enable_request_id_headers)
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off", access_log=False))
        serving = asyncio.run_coroutine_threadsafe(server.serve([listener]), self.loop)
        while not server.started:
            time.sleep(0.01)
        try:
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            with httpx.Client(base_url=url, timeout=PATIENCE, verify=NO_TLS) as client:
                yield client
        finally:
            server.should_exit = True
            serving.result(PATIENCE)
            listener.close()

    @property
    def free_pages(self) -> int:
        stats = self.llm.stats
        assert stats is not None
        return stats.free_pages

    def is_idle(self) -> bool:
        stats = self.llm.stats
        return self.llm.num_open == 0 and (
            stats is None or (stats.running, stats.waiting, stats.free_pages) == (0, 0, stats.pages)
        )

    def wait_idle(self, seconds: float = PATIENCE) -> None:
        deadline = time.monotonic() + seconds
        while not self.is_idle():
            assert time.monotonic() < deadline, f"still open: {self.llm.num_open}, {self.llm.stats}"
            time.sleep(0.01)

    def close(self) -> None:
        self._stack.close()
        self.loop.call_soon_threadsafe(self.llm.shutdown)
        time.sleep(0.1)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(PATIENCE)
        self.loop.close()


def events_of(text: str) -> list[Any]:
    """The events of a stream: parsed JSON, and "[DONE]"."""
    import json

    out = []
    for block in text.split("\n\n"):
        if block:
            assert block.startswith("data: "), block
            data = block.removeprefix("data: ")
            out.append(data if data == "[DONE]" else json.loads(data))
    return out


def error_of(response: httpx.Response) -> dict[str, Any]:
    body = response.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["code"] == response.status_code
    return body["error"]
