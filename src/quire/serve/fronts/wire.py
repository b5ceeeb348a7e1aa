"""What the hub and its API processes say to each other. Nothing received is ever executed or unpickled."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from quire.config.args import EngineArgs
from quire.config.server_args import ServerArgs
from quire.engine import ipc
from quire.engine.adapter_names import NamedAdapter
from quire.engine.supervisor import State
from quire.obs.instruments import BoardState
from quire.obs.metrics import NONE_OPEN, OpenAdapters
from quire.proc.channel import Channel
from quire.proc.messages import decoder
from quire.types.adapter import AdapterRef
from quire.types.outputs import TokenDelta
from quire.types.sight import Sight
from quire.types.stats import Stats


class _Frame(msgspec.Struct, array_like=True, tag=True):
    pass


# ---- from the hub


class Begin(_Frame):
    """The first frame. `name`: what the ids of this process's requests begin with. `first`: of several processes one is, the
    one that tells what all know."""

    args: EngineArgs
    settings: ServerArgs
    name: str
    started: float  # when the user asked, in seconds of time.monotonic()
    first: bool


class EngineSeen(_Frame):
    """How one engine is."""

    state: State
    heartbeat_age: float
    busy_for: float
    restarts: int
    replayed: int
    last_loss: str | None
    pid: int | None
    pages: int
    stats: Stats | None
    error: str | None  # why it is dead


class EnginesSeen(_Frame):
    engines: list[EngineSeen]


class EngineReady(_Frame):
    engine: int
    ready: ipc.Ready
    seen: EngineSeen


class Deltas(_Frame):
    engine: int
    deltas: list[TokenDelta]


class Shown(_Frame):
    """For those who look at an engine."""

    engine: int
    sight: Sight


class TellCounts(_Frame):
    """The answer is Counts, with this number."""

    id: int


class Gathered(_Frame):
    """The answer to Gather: what all the other processes have counted, those that are gone included."""

    id: int
    open: int  # requests
    boards: list[list[BoardState]]
    adapters: OpenAdapters  # of those who are there


class Named(_Frame):
    """What a name of adapters means from now on; None = nothing. The answer is Noted."""

    id: int
    name: str
    adapter: NamedAdapter | None


# ---- to it


class Open(_Frame):
    """It takes requests."""


class Counts(_Frame):
    """What it has counted so far, how many requests are open, and their adapters. Told now and then, lest it be lost with the
    process."""

    open: int
    boards: list[BoardState]
    adapters: OpenAdapters = NONE_OPEN
    id: int = -1  # of the question, if there was one


class Gather(_Frame):
    id: int


class Claim(_Frame):
    """It wants to change what a name means. The Reply comes when nobody else is about to, and Named before it."""

    id: int
    name: str


class Yield(_Frame):
    """It has changed it, or not."""

    name: str


class Name(_Frame):
    """What it means now. The Reply comes when all others have Noted it."""

    id: int
    name: str
    adapter: NamedAdapter | None


class Noted(_Frame):
    id: int


class LoadOn(_Frame):
    id: int
    engine: int
    ref: AdapterRef
    pinned: bool


class TellEngine(_Frame):
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


class Line:
    """One end of a connection, on an event loop. Whoever sends never waits."""

    def __init__(self, connection: socket.socket) -> None:
        self._mailbox = Channel(connection)
        self._closed = False

    def send(self, frame: Any) -> None:
        """Raises what cannot be encoded; what nobody is there to receive is lost."""
        data = ipc.encode(frame)
        if not self._closed:
            self._mailbox.send(data)
            if self._mailbox.full:
                self._flush()

    async def listen(self, hear: Callable[[bytes], Awaitable[None]]) -> None:
        """Until the other end is gone."""
        loop, wake = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._mailbox.fileno(), wake.set)
        self._flush()
        try:
            while True:
                wake.clear()
                while not self._closed and (frame := self._mailbox.receive()) is not None:
                    await hear(frame)
                if self._closed or self._mailbox.closed:
                    return
                await wake.wait()
        finally:
            if not self._closed:
                loop.remove_reader(self._mailbox.fileno())
                loop.remove_writer(self._mailbox.fileno())

    def receive(self) -> bytes:
        """The next frame, waiting for it; for whoever has no event loop yet. EOFError: it never comes."""
        while (frame := self._mailbox.receive()) is None:
            if self._mailbox.closed:
                raise EOFError
            self._mailbox.wait(1000)
        return frame

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            try:
                loop = asyncio.get_running_loop()
            except RuntimeError:
                pass
            else:
                loop.remove_reader(self._mailbox.fileno())
                loop.remove_writer(self._mailbox.fileno())
            self._mailbox.drain(0.0)
            self._mailbox.close()

    def _flush(self) -> None:
        loop = asyncio.get_running_loop()
        self._mailbox.flush()
        if self._mailbox.full:
            loop.add_writer(self._mailbox.fileno(), self._flush)
        else:
            loop.remove_writer(self._mailbox.fileno())
