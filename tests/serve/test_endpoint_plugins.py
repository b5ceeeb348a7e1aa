"""Endpoints that other packages add to the server: they meet what Quire's own do."""

import pytest

from quire.config.server_args import ServerArgs
from quire.serve.app import build_app, build_middleware
from quire.serve.auth import Keys
from quire.serve.endpoints import check_endpoints
from quire.serve.health import ServerState
from quire.types.errors import PlugInError
from serving import error_of

CODE = """
import asyncio
from typing import Annotated
from fastapi import APIRouter, Depends, HTTPException, Request
from fastapi.responses import StreamingResponse
from pydantic import BaseModel
from quire.sampling_params import RequestOutputKind, SamplingParams
from quire.serve.endpoints import EndpointServer
from quire.types.errors import InvalidParameter

router = APIRouter(prefix="/acme")
Server = Annotated[EndpointServer, Depends(EndpointServer)]
cancelled = []

class Ask(BaseModel):
    prompt: str
    tokens: int = 4

@router.post("/count")
async def count(request: Ask, server: Server):
    final = RequestOutputKind.FINAL_ONLY
    params = SamplingParams(temperature=0.0, max_tokens=request.tokens, output_kind=final, ignore_eos=True)
    async for output in server.llm.generate(request.prompt, params, server.new_id(), cache_tenant=server.tenant):
        found = output.outputs[0]
    return {"tokens": len(found.token_ids), "text": found.text, "model": server.names[0]}

@router.get("/items/{name}")
async def item(name: str):
    if name == "missing":
        raise HTTPException(404, "there is no such item")
    if name == "bad":
        raise InvalidParameter("name must be good; got bad. Change it", "name")
    if name == "exit":
        raise SystemExit(3)
    return {"crash": {}[name]}

@router.get("/exits/{name}")
def exits(name: str):
    raise SystemExit(name)

@router.get("/wait")
async def wait():
    try:
        await asyncio.sleep(3600)
    except asyncio.CancelledError:
        cancelled.append(1)
        raise

def make():
    made = APIRouter()
    @made.get("/made")
    async def made_by_a_function():
        return {"made": True}
    return made

shadow = APIRouter()
@shadow.get("/fine")
async def fine():
    return {}
@shadow.post("/v1/models")
async def models():
    return {}

all_paths = APIRouter()
@all_paths.get("/{path:path}")
async def everything(path: str):
    return {}

health = APIRouter()
@health.get("/health")
async def healthy():
    return {}

again = APIRouter()
@again.get("/acme/wait")
async def wait_again():
    return {}

not_a_router = {"router": 1}
"""
GOOD = "[quire.endpoints]\nacme = acme_endpoints:router\nmade = acme_endpoints:make\n"


@pytest.fixture
def acme(packages, server):
    packages.add("acme_endpoints", GOOD, CODE)
    with server.serve(ServerArgs()) as http:
        yield http


def test_they_use_the_engine(acme, http):
    answer = acme.post("/acme/count", json={"prompt": "the quick brown", "tokens": 5}).json()
    request = {"prompt": "the quick brown", "max_tokens": 5, "temperature": 0, "ignore_eos": True}
    text = http.post("/v1/completions", json=request).json()["choices"][0]["text"]
    assert answer == {"tokens": 5, "text": text, "model": "tiny"}
    assert acme.get("/made").json() == {"made": True}
    assert {"/acme/count", "/made"} <= acme.get("/openapi.json").json()["paths"].keys()


@pytest.mark.parametrize(
    ("method", "path", "options", "status", "message"),
    [
        ("POST", "/acme/count", {"json": {}}, 400, "prompt: Field required"),
        ("POST", "/acme/count", {"content": b"{", "headers": {"content-type": "application/json"}}, 400, "JSON decode error"),
        ("POST", "/acme/count", {"json": {"prompt": "x " * 300}}, 400, "context"),
        ("POST", "/acme/count", {"content": b" " * (2**24 + 1)}, 413, "the request body may have at most 16777216 bytes"),
        ("GET", "/acme/items/missing", {}, 404, "there is no such item"),
        ("GET", "/acme/items/bad", {}, 400, "name must be good; got bad. Change it"),
        ("GET", "/acme/items/crash", {}, 500, "internal error (request id"),
        ("GET", "/acme/items/exit", {}, 500, "internal error (request id"),
        ("GET", "/acme/exits/x", {}, 500, "internal error (request id"),
        ("GET", "/acme/count", {}, 405, "GET is not a method of this path; there is POST"),
        ("GET", "/acme/nothing", {}, 404, "there is no such path here"),
    ],
)
def test_errors_have_the_format_of_the_server(acme, method, path, options, status, message):
    response = acme.request(method, path, **options)
    assert response.status_code == status
    assert message in error_of(response)["message"]


def test_work_ends_when_the_client_disconnects(acme, server):
    import sys

    import httpx

    with pytest.raises(httpx.ReadTimeout):
        acme.get("/acme/wait", timeout=0.3)
    from patience import wait_for

    wait_for(lambda: sys.modules["acme_endpoints"].cancelled == [1])


def test_they_need_a_key(packages, server):
    packages.add("acme_endpoints", GOOD, CODE)
    settings = ServerArgs(api_key=["secret"])
    state = ServerState(settings)
    app = build_middleware(state, Keys(["secret"]))
    state.service = type("Service", (), {"app": build_app(server.llm, settings), "http_metrics": _Uncounted()})()

    async def ask(headers):
        import httpx

        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            return await client.post("/acme/count", json={"prompt": "the quick"}, headers=headers)

    refused, answered = (server.call(ask(headers)) for headers in ({}, {"Authorization": "Bearer secret"}))
    assert refused.status_code == 401 and error_of(refused)["type"] == "AuthenticationError"
    assert answered.json()["tokens"] == 4


class _Uncounted:
    def record(self, *values):
        pass


@pytest.mark.parametrize(
    ("points", "reason"),
    [
        ("a = acme_endpoints:shadow", "its path /v1/models is one of /v1/models, which exists already. Choose another path"),
        ("a = acme_endpoints:all_paths", "its path /{path:path} is one of "),
        ("a = acme_endpoints:health", "its path /health is one of /health, which exists already"),
        ("a = acme_endpoints:again\nZ = acme_endpoints:router", "which exists already"),
        ("a = acme_endpoints:not_a_router", "it must be a FastAPI APIRouter or a function that returns one; got dict"),
    ],
)
def test_routers_that_are_left_out(packages, server, caplog, points, reason, monkeypatch):
    packages.add("acme_endpoints", f"[quire.endpoints]\n{points}\n", CODE)
    with server.serve(ServerArgs()) as http:
        assert http.get("/v1/models").json()["data"][0]["id"] == "tiny"
        assert http.get("/fine").status_code == 404
    lines = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(lines) == 1 and "the endpoint 'a' of acme_endpoints 1.0" in lines[0] and reason in lines[0]
    assert lines[0].endswith("; it is skipped")
    monkeypatch.setattr(server.llm.config.args, "require_plugins", True)
    with pytest.raises(PlugInError, match=r"the endpoint 'a' of acme_endpoints 1.0"):
        check_endpoints(True)
        build_app(server.llm, ServerArgs())
