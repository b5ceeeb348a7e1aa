"""A client that hangs up is gone from the engine, wherever its request was."""

import json
import random
import socket
import threading
import time

import httpx
import pytest

from patience import wait_for
from serving import Running

LONG = {"prompt": "the quick", "max_tokens": 250, "ignore_eos": True, "temperature": 0}
PATHS = {
    "/v1/completions": LONG,
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "a"}],
        "max_tokens": 200,
        "ignore_eos": True,
        "temperature": 0,
    },
    "/api/chat": {"messages": [{"role": "user", "content": "a"}], "options": {"num_predict": 200, "temperature": 0}},
}


def hang_up_after(http: httpx.Client, path: str, body: dict, seconds: float) -> None:
    hang_up_when(lambda: time.sleep(seconds) is None, http, path, body)


def hang_up_when(condition, http: httpx.Client, path: str, body: dict) -> None:
    """Sends a request, waits for the condition, and closes the socket."""
    raw = json.dumps(body).encode()
    with socket.create_connection((http.base_url.host, http.base_url.port)) as connection:
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
        connection.sendall(head.encode() + raw)
        wait_for(condition)


class Endings:
    """An observer of why requests ended."""

    def __init__(self) -> None:
        self.reasons: list[str] = []

    def on_step(self, *_) -> None: ...
    def on_arrival(self, _) -> None: ...
    def on_outputs(self, news) -> None:
        self.reasons += [reason for finished in news.finished for reason in finished.reasons]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
def test_while_it_generates(server, path, stream):
    """A machine may be so busy that a request is done before its client is gone; it is not so every time."""
    endings = Endings()
    server.llm.observers.append(endings)
    for _ in range(10):
        hang_up_when(lambda: server.llm.num_open == 1, server.http, path, {**PATHS[path], "stream": stream})
        wait_for(lambda: server.llm.num_open == 0)
        if "abort" in endings.reasons:
            break
    server.llm.observers.remove(endings)
    assert endings.reasons[-1] == "abort"


@pytest.mark.parametrize("stream", [False, True])
def test_while_it_waits_in_the_queue(server, stream):
    """All slots are taken by others; those are not disturbed."""
    others = [
        threading.Thread(
            target=server.http.post, args=("/v1/completions",), kwargs={"json": {**LONG, "n": 16, "temperature": 1}}
        )
    ]
    for thread in others:
        thread.start()
    wait_for(lambda: server.llm.num_open == 1)
    hang_up_when(lambda: server.llm.num_open == 2, server.http, "/v1/completions", {**LONG, "stream": stream})
    wait_for(lambda: server.llm.num_open <= 1)
    for thread in others:
        thread.join()


def test_batches_and_beams(server):
    hang_up_after(server.http, "/v1/completions", {**LONG, "prompt": ["a", "b", "c"] * 10, "stream": True}, 0.1)
    server.wait_idle()
    beams = {"prompt": "a", "max_tokens": 250, "n": 8, "use_beam_search": True, "ignore_eos": True}
    hang_up_after(server.http, "/v1/completions", beams, 0.2)
    server.wait_idle()


def test_many_at_random(server):
    """Every page comes back."""
    chance = random.Random(0)

    def visit() -> None:
        for _ in range(10):
            path = chance.choice(list(PATHS))
            body = {**PATHS[path], "stream": chance.random() < 0.5, "n": chance.choice([1, 1, 2]), "temperature": 1}
            hang_up_after(server.http, path, body, chance.random() * 0.15)

    visitors = [threading.Thread(target=visit) for _ in range(8)]
    for visitor in visitors:
        visitor.start()
    for visitor in visitors:
        visitor.join()
    server.wait_idle()
    answer = server.http.post("/v1/completions", json={"prompt": "the quick", "max_tokens": 3})
    assert answer.status_code == 200


def test_a_client_that_stops_reading_slows_nobody(server: Running):
    """Its stream waits in the socket; others are served, and it loses nothing."""
    body = {**LONG, "stream": True, "return_token_ids": True}
    with server.http.stream("POST", "/v1/completions", json=body) as slow:
        lines = slow.iter_lines()
        first = next(lines)
        for _ in range(3):
            assert server.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 2}).status_code == 200
        *rest, done = [first, *(line for line in lines if line)]
    choices = [json.loads(line.removeprefix("data: "))["choices"][0] for line in rest]
    assert done == "data: [DONE]" and sum(len(choice["token_ids"]) for choice in choices) == LONG["max_tokens"]
