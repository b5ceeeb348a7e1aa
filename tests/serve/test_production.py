"""What production throws at a real server process, with a real (tiny) model behind it."""

import asyncio
import contextlib
import json
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_process import ServerProcess, body, serving, wait_for

from patience import PATIENCE

STREAMS = 32
LOCAL = (
    "--distributed-executor-backend", "uni", "--device", "cpu", "--block-size", "4", "--kv-cache-memory-bytes", "4m",
    "--max-num-seqs", "16",
)  # fmt: skip


@pytest.fixture(scope="module")
def server(serve_model: Path) -> Iterator[ServerProcess]:
    with serving(serve_model, *LOCAL) as server:
        yield server


def metric(http: httpx.Client, name: str) -> float:
    lines = http.get("/metrics").text.splitlines()
    return float(next(line for line in lines if line.startswith(f"quire:{name}{{")).split()[-1])


def idle(http: httpx.Client) -> bool:
    return (
        metric(http, "num_requests_running") == metric(http, "num_requests_waiting") == metric(http, "kv_cache_usage_perc") == 0
    )


def test_a_page_of_another_name_is_not_answered(server: ServerProcess) -> None:
    with server.client() as http:
        refused = http.post("/v1/completions", json=body(1, False), headers={"Host": "evil.example"})
        assert refused.status_code == 421 and "--allowed-hosts evil.example" in refused.json()["error"]["message"]
        assert http.post("/v1/completions", json=body(1, False), headers={"Host": "localhost:1"}).status_code == 200


def requests() -> list[dict[str, Any]]:
    """Greedy and seeded in turn, of different lengths."""
    out = []
    for i in range(STREAMS):
        one = body(60 + i, True, f"{i} little pages sat in a row, and then there came")
        if i % 2:
            one |= {"temperature": 1.0, "seed": i}
        out.append(one)
    return out


async def read_all(url: str, bodies: list[dict[str, Any]], begun: Any = None) -> list[str]:
    """The text of every stream; each must end as it should. `begun` is called once all of them have."""
    left = len(bodies)

    async def one(client: httpx.AsyncClient, request: dict[str, Any]) -> str:
        nonlocal left
        parts: list[str] = []
        tokens = 0
        done = False
        async with client.stream("POST", "/v1/completions", json=request) as response:
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                if not line.startswith("data: "):
                    continue
                if line == "data: [DONE]":
                    done = True
                    continue
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                for choice in event["choices"]:
                    if not tokens:
                        left -= 1
                        if not left and begun:
                            begun()
                    parts.append(choice["text"])
                    tokens += len(choice["token_ids"])
        assert done and tokens == request["max_tokens"]
        return "".join(parts)

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE, limits=limits) as client:
        return list(await asyncio.gather(*(one(client, request) for request in bodies)))


def test_a_killed_engine_costs_nobody_an_answer(server: ServerProcess) -> None:
    with server.client() as http:
        undisturbed = asyncio.run(read_all(server.url(), requests()))
        killed = []

        def kill() -> None:
            killed.append(server.engine_pid())
            os.kill(killed[0], signal.SIGKILL)

        disturbed = asyncio.run(read_all(server.url(), requests(), begun=kill))
        assert killed and disturbed == undisturbed
        assert metric(http, "engine_restarts_total") == 1
        assert metric(http, "requests_replayed_total") > 0
        wait_for(lambda: idle(http))


@pytest.mark.parametrize("stream", [True, False])
def test_disconnects_give_every_page_back(server: ServerProcess, stream: bool) -> None:
    """300 clients each way that go away at random moments: queued, in the prompt, generating, or done."""
    with server.client() as http:
        dice, restarts = random.Random(7), metric(http, "engine_restarts_total")

        async def one(client: httpx.AsyncClient, number: int) -> None:
            request = body(100, stream, f"{number % 40} pages " * dice.randint(1, 8))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(client.post("/v1/completions", json=request), dice.random() * 0.3)

        async def storm() -> None:
            limits = httpx.Limits(max_connections=None)
            async with httpx.AsyncClient(base_url=server.url(), timeout=PATIENCE, limits=limits) as client:
                for first in range(0, 300, 50):
                    await asyncio.gather(*(one(client, first + i) for i in range(50)))

        asyncio.run(storm())
        wait_for(lambda: idle(http))
        assert metric(http, "engine_restarts_total") == restarts
        answer = http.post("/v1/completions", json=body(5, False)).json()
        assert answer["usage"]["completion_tokens"] == 5
