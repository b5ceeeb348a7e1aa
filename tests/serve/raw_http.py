"""An HTTP server as `quire serve` has it around a small app, spoken to in raw bytes; and the longest turn of its event loop."""

import asyncio
import contextlib
import gc
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from patience import PATIENCE
from quire.config.server_args import ServerArgs
from quire.serve.http import HttpServer
from quire.serve.limits import LIMITS, ServerLimits

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="there is no openssl to make a certificate with")


def make_certificate(directory: Path) -> tuple[Path, Path]:
    """A key, and a certificate for 127.0.0.1."""
    key, certificate = directory / "key.pem", directory / "cert.pem"
    make = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    make += ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*make, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    return key, certificate


class Raw:
    """One client's connection."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)

    def send(self, data: bytes) -> bool:
        """False: the server does not want it any more."""
        try:
            self.socket.sendall(data)
        except OSError:
            return False
        return True

    def read(self) -> bytes:
        """All that comes until the server hangs up."""
        parts = []
        with contextlib.suppress(ConnectionError):
            while part := self.socket.recv(1 << 16):
                parts.append(part)
        return b"".join(parts)

    def read_head(self) -> bytes:
        data = b""
        while b"\r\n\r\n" not in data and (part := self.socket.recv(1)):
            data += part
        return data

    def close(self) -> None:
        self.socket.close()

    __del__ = close


class Hosted:
    """Seconds pass as fast as `tempo` says: patience is counted in them."""

    def __init__(self, limits: ServerLimits = LIMITS, app: Any = None, tempo: float = 1.0, **settings: Any) -> None:
        self.seen: list[str] = []  # what became of requests
        self.turn = 0.0  # seconds of processor time in the longest turn of the loop (and at most a millisecond more)
        self.hasty = False  # streams do without their pauses
        self.loop = uvloop.new_event_loop()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
        self.port = self._listener.getsockname()[1]
        self.server = HttpServer(ServerArgs(**settings), app or self._app(), limits)
        self._tempo = tempo
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        while not self.server.started:
            time.sleep(0.005)

    def _app(self) -> Starlette:
        async def echo(request: Request) -> Response:
            size = 0
            try:
                async for part in request.stream():
                    size += len(part)
            except ClientDisconnect:
                self.seen.append("gone")
                return Response()
            self.seen.append(f"{request.url.path} {size}")
            told = {name: request.headers.get(name) for name in ("x-late", "x-request-id")}
            return JSONResponse({"path": request.url.path, "size": size, **told})

        async def stream(request: Request) -> Response:
            async def parts() -> Any:
                try:
                    for i in range(int(request.query_params["n"])):
                        yield b"%d " % i * int(request.query_params.get("times", 1))
                        await asyncio.sleep(0 if self.hasty else float(request.query_params.get("pause", 0.01)))
                    self.seen.append("streamed")
                finally:
                    self.seen.append("ended")

            return StreamingResponse(parts())

        async def refuse(_: Request) -> Response:
            return JSONResponse({"no": True}, 413)

        return Starlette(
            routes=[
                Route("/echo", echo, methods=["GET", "POST"]),
                Route("/stream", stream),
                Route("/refuse", refuse, methods=["POST"]),
            ]
        )

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        gc.collect()
        gc.freeze()  # as the server does when the model is loaded
        last = time.thread_time()

        def turned() -> None:
            nonlocal last
            now = time.thread_time()
            self.turn = max(self.turn, now - last)
            last = now
            if not self.server.should_exit and self._tempo == 1.0:
                self.loop.call_later(0.001, turned)  # whole turns lie between two of these: none is longer than told

        async def hurry() -> None:
            while not self.server.should_exit:
                await asyncio.sleep(1 / self._tempo)
                self.server.connection_limits.tick()

        async def run() -> None:
            hurrying = asyncio.create_task(hurry()) if self._tempo != 1.0 else None
            turned()
            await self.server.serve([self._listener])
            if hurrying is not None:
                hurrying.cancel()

        self.loop.run_until_complete(run())
        self.loop.close()

    def connect(self) -> Raw:
        return Raw(self.port)

    def ask(self, data: bytes) -> bytes:
        """One connection's answer to these bytes."""
        raw = self.connect()
        raw.send(data)
        try:
            return raw.read()
        finally:
            raw.close()

    def close(self) -> None:
        self.server.should_exit = True
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()


@contextlib.contextmanager
def hosted(limits: ServerLimits = LIMITS, **options: Any) -> Iterator[Hosted]:
    server = Hosted(limits, **options)
    try:
        yield server
    finally:
        server.close()


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1]) if answer else 0
