"""Messages between the router and its API processes. Nothing received is ever executed or unpickled."""

from collections.abc import Callable
from typing import Any

from quire.config.args import EngineArgs
from quire.config.server_args import ServerArgs
from quire.engine import ipc
from quire.engine.handle import EngineStatus
from quire.features.lora.client import NamedAdapter
from quire.obs.instruments import BoardState
from quire.obs.metrics import NONE_OPEN, OpenAdapters
from quire.proc.channel import AsyncChannel
from quire.proc.messages import WireMessage, decoder, encode
from quire.types.adapter import AdapterRef
from quire.types.engine_snapshot import EngineSnapshot
from quire.types.outputs import TokenDelta

# ---- from the router


class Begin(WireMessage):
    """The first frame. `name`: prefix of the ids of this process's requests. `first`: this process writes the log lines
    that would be the same in all processes."""

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
    """A snapshot, for processes with viewers."""

    engine: int
    snapshot: EngineSnapshot


class SendCounts(WireMessage):
    """The answer is Counts, with this number."""

    id: int


class Gathered(WireMessage):
    """The answer to Gather: the counts of all other processes, also of those that have ended."""

    id: int
    open: int  # requests
    boards: list[list[BoardState]]
    adapters: OpenAdapters  # of the processes that run


class AbortNamed(WireMessage):
    """Abort requests by the ids of their answers. The answer is Aborted, with this number."""

    id: int
    answers: list[str]


class Named(WireMessage):
    """Set the adapter of a name; None: the name is removed. The answer is Noted."""

    id: int
    name: str
    adapter: NamedAdapter | None


# ---- to it


class Open(WireMessage):
    """The process takes requests."""


class Counts(WireMessage):
    """Metrics of the process, its open requests, and their adapters. Sent regularly, so that a crash loses little."""

    open: int
    boards: list[BoardState]
    adapters: OpenAdapters = NONE_OPEN
    id: int = -1  # of the question, if there was one


class Gather(WireMessage):
    id: int


class AbortInOthers(WireMessage):
    """Ask all other processes to abort requests. The Reply is how many they aborted."""

    id: int
    answers: list[str]


class Aborted(WireMessage):
    id: int
    requests: int


class Claim(WireMessage):
    """Ask to change an adapter name. The Reply comes when no other process changes it, after the latest Named."""

    id: int
    name: str


class Yield(WireMessage):
    """Release a claim."""

    name: str


class Name(WireMessage):
    """Publish an adapter name. The Reply comes when all others have Noted it."""

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


class Notify(WireMessage):
    """Call a public method of the engine core, without a reply."""

    engine: int
    method: str
    args: list[Any]


Down = (
    Begin | EnginesSeen | EngineReady | Deltas | Shown | Named | SendCounts | AbortNamed | Gathered
    | ipc.Refused | ipc.Reply
)  # fmt: skip
Up = (
    Open | Counts | Gather | Claim | Yield | Name | Noted | LoadOn | Notify | AbortInOthers | Aborted
    | ipc.Add | ipc.Abort | ipc.CallMethod | ipc.SetWatched
)  # fmt: skip

decode_down: Callable[[bytes], Down] = decoder(Down, ipc.DTYPES)
decode_up: Callable[[bytes], Up] = decoder(Up, ipc.DTYPES)


class WorkerChannel(AsyncChannel):
    """One end of the connection between the router and an API process."""

    def post(self, message: Any) -> None:
        """Send a message. Raises if it cannot be encoded; messages to a closed peer are dropped."""
        self.send(encode(message))
