import asyncio
import os
import re
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from front_desk import Desk
from prometheus_client.parser import text_string_to_metric_families
from server_process import body, read_stream, serving, wait_for
from starlette.responses import StreamingResponse
from starlette.routing import Route

from patience import PATIENCE
from quire import __version__
from quire.types.stats import Stats

WAITING = Stats(5, 3, 10, 4, 0, 0, 0)


@pytest.mark.parametrize(
    ("llm", "settings", "live", "ready", "healthy"),
    [
        ({}, {}, 200, 200, 200),
        ({"stats": None}, {}, 200, 200, 200),
        ({"heartbeat_age": 2.9}, {}, 200, 200, 200),
        ({"heartbeat_age": 3.1}, {}, 503, 503, 200),
        ({"state": "restarting", "heartbeat_age": 20.0}, {}, 200, 503, 200),
        ({"state": "dead"}, {}, 503, 503, 503),
        ({"stats": WAITING}, {"max_queue": 3}, 200, 200, 200),
        ({"stats": WAITING}, {"max_queue": 2}, 200, 503, 200),
    ],
)
def test_what_the_engine_does(llm: dict[str, Any], settings: dict[str, Any], live: int, ready: int, healthy: int) -> None:
    desk = Desk(**settings)
    vars(desk.llm).update(llm)
    answers = [desk.ask(path) for path in ("/livez", "/readyz", "/health", "/ping")]
    assert [answer.status_code for answer in answers] == [live, ready, healthy, healthy]
    for answer in answers[:2]:
        assert (answer.json()["status"] == "ok") == (answer.status_code == 200)
        assert ("reason" in answer.json()) == (answer.status_code == 503)


def test_while_the_model_loads() -> None:
    desk = Desk(loaded=False)
    codes = [desk.ask(path).status_code for path in ("/livez", "/readyz", "/health", "/version", "/metrics", "/v1/whoami")]
    assert codes == [200, 503, 503, 200, 503, 503]
    assert desk.ask("/v1/whoami").headers["retry-after"] == "5"


def test_while_the_server_drains() -> None:
    desk = Desk()
    desk.state.draining = True
    codes = [desk.ask(path).status_code for path in ("/livez", "/readyz", "/health", "/metrics", "/v1/whoami")]
    assert codes == [200, 503, 200, 200, 503]
    refused = desk.ask("/v1/whoami", "POST")
    assert refused.headers["retry-after"] == "5"
    assert refused.headers["connection"] == "close"
    assert refused.json()["error"]["message"] == "the server is shutting down"


def test_version_and_methods() -> None:
    desk = Desk()
    assert desk.ask("/version").json() == {"version": __version__}
    assert desk.ask("/ping", "POST").status_code == 200
    assert desk.ask("/readyz", "POST").status_code == 405
    assert desk.ask("/readyz", "POST").json()["error"]["code"] == 405


def test_http_is_counted_by_route() -> None:
    desk = Desk()
    for path, method in (
        ("/v1/whoami", "GET"),
        ("/v1/whoami", "POST"),
        ("/made-up-1", "BREW"),
        ("/made-up-2", "BREW"),
        ("/health", "GET"),
    ):
        desk.ask(path, method)
    families = {family.name: family for family in text_string_to_metric_families(desk.ask("/metrics").text)}
    counted = {tuple(sorted(s.labels.items())): s.value for s in families["http_requests"].samples}
    assert sum(counted.values()) == 4
    assert counted[(("handler", "none"), ("method", "other"), ("status", "4xx"))] == 2
    assert sum(s.value for s in families["http_request_duration_highr_seconds"].samples if s.name.endswith("_count")) == 4


def test_a_response_that_begins_after_the_deadline_is_a_refusal() -> None:
    """Whatever the API would say then; one that has begun is left alone."""
    desk = Desk()
    go_on = asyncio.Event()

    async def slow(_: object) -> StreamingResponse:
        async def parts() -> Any:
            yield b"begun "
            go_on.set()
            await asyncio.sleep(0.05)
            yield b"and done"

        return StreamingResponse(parts())

    async def late(_: object) -> StreamingResponse:
        await go_on.wait()
        desk.state.closing = True
        return await slow(_)

    assert desk.state.service is not None
    desk.state.service.app.routes.extend([Route("/slow", slow), Route("/late", late)])  # type: ignore[attr-defined]

    async def both() -> list[Any]:
        import httpx

        async with httpx.AsyncClient(transport=httpx.ASGITransport(desk.app), base_url="http://here") as client:
            answers = await asyncio.gather(client.get("/slow"), client.get("/late"))
        assert await desk.state.wait_idle(0)
        return answers

    begun, refused = asyncio.run(both())
    assert (begun.status_code, begun.text) == (200, "begun and done")
    assert refused.status_code == 503
    assert refused.json()["error"]["message"] == "the server shut down before this request was done"


def test_a_frozen_engine(serve_model: Path) -> None:
    """SIGSTOP is noticed long before silence alone would be, the supervisor replaces the engine, and the stream goes on."""
    with serving(serve_model, latency=0.03) as server, server.client() as http:
        begun = threading.Event()
        with ThreadPoolExecutor(1) as pool:
            stream = pool.submit(read_stream, http, body(150, True), begun.set)
            assert begun.wait(PATIENCE)
            engine = server.engine_pid()
            os.kill(engine, signal.SIGSTOP)
            wait_for(lambda: http.get("/readyz").status_code == 503)
            assert http.get("/livez").status_code == 200  # it is being restarted
            wait_for(lambda: http.get("/readyz").status_code == 200)
            assert server.engine_pid() != engine
            events = stream.result(PATIENCE)
        found = re.search(r"its process is stopped \(SIGSTOP\), and has been silent for (\d+\.\d) s", server.log())
        assert found and float(found[1]) < 5, server.log()  # counted in looks: what others take of the machine is not in it
        assert events[-1] == "[DONE]"
        assert events[-2]["usage"]["completion_tokens"] == 150
        text = http.get("/metrics").text
        assert 'quire:engine_restarts_total{engine="0",model_name="tiny"} 1.0' in text
        assert 'quire:requests_replayed_total{engine="0",model_name="tiny"} 1.0' in text
