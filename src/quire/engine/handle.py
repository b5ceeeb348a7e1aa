"""EngineHandle: the one interface to engines, in another process (`EngineClient`), on another node, or several as one.

    EngineClient    one engine process of this machine or of another node, restarted when it is lost
    EngineRouter    several of them
    RouterClient    those of the main process, from an API process (`serve/api_workers`)

An engine's state is one struct, `EngineStatus`. What engines produce is pushed to one `EngineListener`.
"""

import time
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

import msgspec

from quire.types.adapter import AdapterRef
from quire.types.engine_snapshot import EngineSnapshot
from quire.types.errors import InvalidParameter, NotSupported, QuireError
from quire.types.outputs import TokenDelta
from quire.types.request import EngineRequest
from quire.types.stats import Stats

if TYPE_CHECKING:
    from quire.engine import ipc

RANK_METHODS = ("check_health", "describe_rank")  # of collective_rpc
State = Literal["starting", "ready", "restarting", "dead"]


class EngineStatus(msgspec.Struct, array_like=True, frozen=True):
    """The state of one engine, or of several as one."""

    state: State = "starting"
    received_at: float = 0.0  # time.monotonic() of the latest message of the engine process; 0 = none is expected
    busy_for: float = 0.0  # seconds that the engine's loop has been in its present step; 0 while it waits for work
    restarts: int = 0
    replayed: int = 0  # requests that continued in a restarted engine
    last_loss: str | None = None  # why the latest engine process was lost
    pid: int | None = None
    pages: int = 0  # of the KV cache; 0 until the engine is ready
    stats: Stats | None = None  # of the latest step
    error: str | None = None  # why it is dead


def combine(engines: Sequence[EngineStatus]) -> EngineStatus:
    """The status of several engines as one. One that is ready takes requests, so one is enough once all have been ready."""
    states = {each.state for each in engines}
    order: tuple[State, ...] = ("starting", "ready", "restarting")
    if len(engines) == 1:
        return engines[0]
    lost = [f"engine {i}: {each.last_loss}" for i, each in enumerate(engines) if each.last_loss is not None]
    return EngineStatus(
        state=next((state for state in order if state in states), "dead"),
        received_at=min((each.received_at for each in engines if each.state == "ready"), default=0.0),
        busy_for=max((each.busy_for for each in engines), default=0.0),
        restarts=sum(each.restarts for each in engines),
        replayed=sum(each.replayed for each in engines),
        last_loss=". ".join(lost) or None,
        pid=engines[0].pid if engines else None,
        pages=sum(each.pages for each in engines),
    )


class EngineView(Protocol):
    """The fields of a status as properties."""

    @property
    @abstractmethod
    def status(self) -> EngineStatus: ...

    @property
    def state(self) -> State:
        return self.status.state

    @property
    def heartbeat_age(self) -> float:
        """Return the seconds since the latest message of the engine process; of several engines, the longest silence."""
        received_at = self.status.received_at
        return time.monotonic() - received_at if received_at else 0.0

    @property
    def busy_for(self) -> float:
        return self.status.busy_for

    @property
    def restarts(self) -> int:
        return self.status.restarts

    @property
    def replayed(self) -> int:
        return self.status.replayed

    @property
    def last_loss(self) -> str | None:
        return self.status.last_loss

    @property
    def pid(self) -> int | None:
        """Of several engines, the first one's."""
        return self.status.pid


class EngineGroup(EngineView):
    """Several engines as one."""

    engines: "Sequence[EngineView]"

    @property
    def status(self) -> EngineStatus:
        return combine([engine.status for engine in self.engines])


class OneEngine(EngineView, Protocol):
    """One of the engines of a handle."""

    @property
    def stats(self) -> Stats | None: ...

    @property
    def pages(self) -> int: ...

    @property
    def engines(self) -> "Sequence[OneEngine]":
        """Itself."""

    async def load_adapter(self, ref: AdapterRef, pinned: bool) -> None:
        """Return when the engine has read the adapter; raise why it cannot."""

    def notify(self, method: str, *args: Any) -> None:
        """Call a method of the engine core without waiting; does nothing while no engine is ready."""

    def pin_again(self, ref: AdapterRef) -> None:
        """Pin an adapter in a restarted engine."""


class EngineHandle(EngineView, Protocol):
    @property
    def engines(self) -> Sequence[OneEngine]: ...

    async def wait_ready(self) -> None:
        """Return when requests are taken; raise why the engine could not start."""

    async def run(self) -> None:
        """Listen to the engines until all are dead."""

    def add(self, requests: Iterable[EngineRequest]) -> None:
        """Requests that cannot be sent now are sent when an engine is ready."""

    def abort(self, ids: Iterable[str]) -> None:
        """The listener gets no more of these requests. Unknown ids are ignored."""

    def watch(self, watched: bool) -> None:
        """Let engines report snapshots of themselves, now and after restarts, or not."""

    async def call(self, method: str, *args: Any) -> Any:
        """Call a method of the engine core; wait for an engine if none is ready."""

    def check(self, engine: int | None = None) -> None:
        """Raise EngineDead if no engine is left, or not this one; InvalidParameter if its number is out of range."""

    def stop(self, timeout: float) -> None:
        """End the engines, waiting up to `timeout` seconds. Open requests end with `abort`."""


class EngineListener(Protocol):
    """What a handle reports. `engine`: the number of the engine, of several."""

    def on_ready(self, ready: "ipc.Ready", engine: int = 0) -> None: ...

    def on_deltas(self, deltas: Sequence[TokenDelta], engine: int = 0) -> None: ...

    def on_step(self, report: "ipc.StepReport", engine: int = 0) -> None:
        """After all deltas of the step."""

    def on_snapshot(self, snapshot: EngineSnapshot, engine: int = 0) -> None: ...

    def on_refused(self, engine_id: str, error: QuireError) -> None: ...


def check_rank_call(method: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> None:
    """Raise if `collective_rpc` does not support this call."""
    if not isinstance(method, str):
        raise NotSupported("collective_rpc takes the name of a method: no code is sent to ranks", "method")
    if method not in RANK_METHODS:
        raise InvalidParameter(f"ranks have no method {method!r}; they have {', '.join(RANK_METHODS)}", "method")
    if args or kwargs:
        raise NotSupported(f"collective_rpc: {method} takes no arguments", "args")
