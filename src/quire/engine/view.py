"""What is known of engines wherever requests are made: beside their supervisor, or in another process that it tells."""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from quire.engine.supervisor import State
from quire.types.adapter import AdapterRef
from quire.types.request import EngineRequest
from quire.types.stats import Stats


class EngineState(Protocol):
    """How one engine is, or all of them together."""

    @property
    def state(self) -> State: ...
    @property
    def heartbeat_age(self) -> float:
        """Seconds since something was heard of the engine process."""

    @property
    def busy_for(self) -> float:
        """Seconds the engine's loop has been in its present step; 0 while it waits for work."""

    @property
    def restarts(self) -> int: ...
    @property
    def replayed(self) -> int:
        """Requests that went on in a restarted engine."""

    @property
    def last_loss(self) -> str | None:
        """Why the latest engine that was lost was lost."""

    @property
    def pid(self) -> int | None: ...


class OneEngine(EngineState, Protocol):
    @property
    def stats(self) -> Stats | None:
        """As of the latest step."""

    @property
    def pages(self) -> int:
        """Of the cache; 0 until the engine is ready."""

    @property
    def engines(self) -> "Sequence[OneEngine]":
        """Itself."""

    async def load_adapter(self, ref: AdapterRef, pinned: bool) -> None: ...

    def tell(self, method: str, *args: Any) -> None: ...

    def pin_again(self, ref: AdapterRef) -> None: ...


class Engines(EngineState, Protocol):
    """What `AsyncLLM` talks to: `EngineClient`, `EngineRouter`, or the way to one in another process."""

    @property
    def engines(self) -> Sequence[OneEngine]: ...

    async def wait_ready(self) -> None: ...

    async def run(self) -> None: ...

    def add(self, requests: Iterable[EngineRequest]) -> None: ...

    def abort(self, ids: Iterable[str]) -> None: ...

    def watch(self, watched: bool) -> None: ...

    async def call(self, method: str, *args: Any) -> Any: ...

    def check(self, engine: int | None = None) -> None: ...

    def stop(self, timeout: float) -> None: ...
