"""Clients that do not read their streams: what waits for them is bounded, and slow clients that read lose nothing."""

import asyncio
import contextlib
import json
import socket
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from server_process import wait_for

from patience import PATIENCE
from quire.config.server_args import ServerArgs
from quire.serve.app import build_app
from quire.serve.http import HttpServer
from quire.serve.limits import LIMITS, ConnectionLimits, ServerLimits
from serving import Running

TOKENS = 240
BODY = {
    "model": "tiny", "prompt": "the quick", "max_tokens": TOKENS, "ignore_eos": True, "stream": True, "logprobs": 5, "n": 2,
    "temperature": 1, "seed": 1,
}  # fmt: skip
BUFFER = 16 << 10  # bytes, of the sockets: the system holds little of an answer


class Bounded:
    """The HTTP server of `quire serve`, whose seconds pass when `second` is called."""

    def __init__(self, running: Running, server: HttpServer, port: int) -> None:
        self._running, self._port = running, port
        self.connection_limits, self.closed = server.connection_limits, 0
        server.connection_limits.on_closed_unread = self._count

    def _count(self) -> None:
        self.closed += 1

    def second(self) -> None:
        async def look() -> None:
            self.connection_limits.tick()

        self._running.call(look())

    def ask(self) -> socket.socket:
        client = socket.socket()
        client.settimeout(PATIENCE)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER)
        client.connect(("127.0.0.1", self._port))
        raw = json.dumps(BODY).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
        client.sendall(f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw)
        return client


@contextlib.contextmanager
def bounded(running: Running, limits: ServerLimits) -> Iterator[Bounded]:
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
    server = HttpServer(ServerArgs(), build_app(running.llm, ServerArgs()), limits)
    serving = asyncio.run_coroutine_threadsafe(server.serve([listener]), running.loop)
    wait_for(lambda: server.started)
    try:
        yield Bounded(running, server, listener.getsockname()[1])
    finally:
        server.should_exit = True
        serving.result(PATIENCE)
        listener.close()


def read_all(client: socket.socket) -> bytes:
    parts = []
    with contextlib.suppress(ConnectionError):
        while part := client.recv(1 << 16):
            parts.append(part)
    return b"".join(parts)


def test_a_stream_that_nobody_reads_is_closed_and_its_request_ends(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    with bounded(server, replace(LIMITS, unread_bytes=1 << 16, stalled_seconds=2)) as http:
        client = http.ask()

        def passed() -> bool:
            http.second()
            return http.closed == 1

        wait_for(passed)
        wait_for(lambda: len(http.connection_limits) == 0)
        server.wait_idle()
        assert b"[DONE]" not in read_all(client)
        client.close()
    assert "of the answer unread, no read for" in caplog.text


def test_a_slow_client_that_reads_loses_nothing(server: Running) -> None:
    with bounded(server, replace(LIMITS, unread_bytes=1, stalled_seconds=20)) as http:
        client, answer = http.ask(), b""
        while part := client.recv(8 << 10):
            answer += part
            http.second()
        client.close()
        assert http.closed == 0
    assert answer.rstrip().endswith(b"0") and b"data: [DONE]" in answer


def test_all_answers_together_are_bounded(server: Running) -> None:
    """One of these answers takes less than the bound, three take more."""
    with bounded(server, replace(LIMITS, all_unread_bytes=3 << 18, stalled_seconds=1000)) as http:
        clients = [http.ask() for _ in range(3)]

        def passed() -> bool:
            http.second()
            return http.closed > 0

        wait_for(passed)
        answers = [read_all(client) for client in clients]
        for client in clients:
            client.close()
        assert sum(b"[DONE]" not in answer for answer in answers) == http.closed < 3


class Waiting:
    body_size = body_age = 0

    def __init__(self, unread: int, stalled: int) -> None:
        self.unread, self.stalled, self.closed = unread, stalled, False

    def tick(self) -> None: ...
    def make_room(self) -> None: ...
    def give_up_body(self) -> None: ...
    def close_unread(self) -> None:
        self.closed, self.unread = True, 0


def test_who_has_read_nothing_for_longest_is_closed_first() -> None:
    connection_limits: Any = ConnectionLimits(replace(LIMITS, all_unread_bytes=800), 1024)
    reads, stalls, small = Waiting(600, 0), Waiting(250, 30), Waiting(10, 30)
    for member in (reads, stalls, small):
        connection_limits.enter(member)
    connection_limits.tick()
    assert stalls.closed and not reads.closed and not small.closed
