"""The front of a server without a server: a stand-in for the engine, another for the API, and requests by function call."""

import asyncio
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from quire.config.server_args import ServerArgs
from quire.obs.metrics import HttpMetrics, Metrics
from quire.serve.app import build_middleware
from quire.serve.auth import Keys, find_keys
from quire.serve.health import ServerState, Service
from quire.types.errors import EngineDead
from quire.types.stats import Stats


@dataclass
class FakeLLM:
    config: Any = field(default_factory=lambda: SimpleNamespace(served_names=("tiny",), features={}))
    tokenizer: Any = field(default_factory=lambda: SimpleNamespace(chat_template="{{ messages }}"))
    state: str = "ready"
    heartbeat_age: float = 0.1
    restarts: int = 0
    replayed: int = 0
    stats: Stats | None = field(default_factory=lambda: Stats(1, 2, 10, 4, 30, 10, 1))

    async def check_health(self) -> None:
        if self.state == "dead":
            raise EngineDead("it is dead")


async def whoami(request: Request) -> JSONResponse:
    return JSONResponse({"tenant": getattr(request.state, "tenant", "nobody set it")})


class Desk:
    def __init__(
        self, environment: dict[str, str] | None = None, loaded: bool = True, loopback: bool = False, **settings: Any
    ) -> None:
        args = ServerArgs(**settings)
        self.llm = FakeLLM()
        self.state = ServerState(args)
        if loaded:
            metrics = Metrics(args.metrics_prefix, "tiny", 100, {"block_size": 16})
            api = Starlette(routes=[Route("/v1/whoami", whoami, methods=["GET", "POST"])])
            self.state.service = Service(self.llm, api, metrics, HttpMetrics(metrics.registry))  # type: ignore[arg-type]
        self.app = build_middleware(self.state, Keys(find_keys(args, environment or {})), loopback)

    def ask(self, path: str, method: str = "GET", headers: Any = None) -> httpx.Response:
        async def send() -> httpx.Response:
            async with httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://here") as client:
                return await client.request(method, path, headers=headers)

        return asyncio.run(send())
