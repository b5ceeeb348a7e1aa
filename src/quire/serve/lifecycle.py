"""What all parts of one server share: the engine once there is one, whether the server is about to end, and what is open."""

import asyncio
import contextlib
from dataclasses import dataclass, field

from starlette.types import ASGIApp

from quire.async_llm import AsyncLLM
from quire.config.server_args import ServerArgs
from quire.obs.http_metrics import HttpMetrics
from quire.obs.metrics import Metrics
from quire.serve.fronts.client import HubClient


@dataclass(frozen=True)
class Service:
    """All that exists once the model is loaded."""

    llm: AsyncLLM
    app: ASGIApp
    metrics: Metrics
    http_metrics: HttpMetrics
    hub: HubClient | None = None  # the way to other API processes, if there are any


@dataclass
class ServerState:
    settings: ServerArgs
    service: Service | None = None
    draining: bool = False  # no new requests
    closing: bool = False  # the deadline has passed: what has not begun to answer is refused
    open: int = 0  # requests being answered
    _idle: asyncio.Event = field(default_factory=asyncio.Event)

    def enter(self) -> None:
        self.open += 1
        self._idle.clear()

    def leave(self) -> None:
        self.open -= 1
        if not self.open:
            self._idle.set()

    async def wait_idle(self, seconds: float) -> bool:
        """True once nothing is open, False if that takes too long."""
        if self.open:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), seconds)
        return not self.open
