"""Messages between the router and its API processes. Nothing received is ever executed or unpickled."""

from collections.abc import Callable
from typing import Any

from quire.config.args import EngineArgs
from quire.config.server_args import ServerArgs
from quire.engine import ipc
from quire.engine.handle import EngineStatus
from quire.features.lora.names import NamedAdapter
from quire.obs.instruments import BoardState
from quire.obs.metrics import NONE_OPEN, OpenAdapters
from quire.proc.channel import AsyncChannel
from quire.proc.messages import WireMessage, decoder, encode
from quire.types.adapter import AdapterRef
from quire.types.engine_snapshot import EngineSnapshot
from quire.types.outputs import TokenDelta

# ---- from the router


class Begin(WireMessage):
    """The first frame. `name`: what the ids of this process's requests begin with. `first`: of several processes one is, the
    one that tells what all know."""

    args: EngineArgs
    settings: ServerArgs
    name: str
    started: float  # when the user asked, in seconds of time.monotonic()
    first: bool


class EnginesSeen(WireMessage):
    engines: list[EngineStatus]


class EngineReady(WireMessage):
    engine: int
    ready: ipc.Ready
    status: EngineStatus


class Deltas(WireMessage):
    engine: int
    deltas: list[TokenDelta]


class Shown(WireMessage):
    """For those who look at an engine."""

    engine: int
    snapshot: EngineSnapshot


class TellCounts(WireMessage):
    """The answer is Counts, with this number."""

    id: int


class Gathered(WireMessage):
    """The answer to Gather: what all the other processes have counted, those that are gone included."""

    id: int
    open: int  # requests
    boards: list[list[BoardState]]
    adapters: OpenAdapters  # of those who are there


class Named(WireMessage):
    """What a name of adapters means from now on; None = nothing. The answer is Noted."""

    id: int
    name: str
    adapter: NamedAdapter | None


# ---- to it


class Open(WireMessage):
    """It takes requests."""


class Counts(WireMessage):
    """What it has counted so far, how many requests are open, and their adapters. Told now and then, lest it be lost with the
    process."""

    open: int
    boards: list[BoardState]
    adapters: OpenAdapters = NONE_OPEN
    id: int = -1  # of the question, if there was one


class Gather(WireMessage):
    id: int


class Claim(WireMessage):
    """It wants to change what a name means. The Reply comes when nobody else is about to, and Named before it."""

    id: int
    name: str


class Yield(WireMessage):
    """It has changed it, or not."""

    name: str


class Name(WireMessage):
    """What it means now. The Reply comes when all others have Noted it."""

    id: int
    name: str
    adapter: NamedAdapter | None


class Noted(WireMessage):
    id: int


class LoadOn(WireMessage):
    id: int
    engine: int
    ref: AdapterRef
    pinned: bool


class TellEngine(WireMessage):
    """One of an engine core's public methods, by name; nobody waits for an answer."""

    engine: int
    method: str
    args: list[Any]


Down = Begin | EnginesSeen | EngineReady | Deltas | Shown | Named | TellCounts | Gathered | ipc.Refused | ipc.Reply
Up = (
    Open | Counts | Gather | Claim | Yield | Name | Noted | LoadOn | TellEngine
    | ipc.Add | ipc.Abort | ipc.CallMethod | ipc.Watch
)  # fmt: skip

decode_down: Callable[[bytes], Down] = decoder(Down, ipc.DTYPES)
decode_up: Callable[[bytes], Up] = decoder(Up, ipc.DTYPES)


class WorkerChannel(AsyncChannel):
    """One end of the connection between the router and an API process."""

    def post(self, message: Any) -> None:
        """Send a message. Raises if it cannot be encoded; messages to a closed peer are dropped."""
        self.send(encode(message))
