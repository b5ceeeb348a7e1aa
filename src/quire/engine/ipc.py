"""Messages between the API process and the engine process.

    API process                        engine process
    ──── Start, Add, Abort, ... ─────► the loop
    ◄─── Ready, StepReport, ... ────── the loop
    ◄─── Beat ──────────────────────── the heartbeat thread

A private pair of sockets joins them (`proc/channel.py`); frames are msgpack. Nothing received is ever executed or unpickled.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from msgspec import field

from quire.config.args import EngineArgs
from quire.engine.timeline import Timeline
from quire.proc import messages
from quire.proc.messages import WireMessage, decoder
from quire.types import errors
from quire.types.adapter import AdapterRef
from quire.types.engine_snapshot import EngineSnapshot
from quire.types.outputs import TokenDelta
from quire.types.request import EngineRequest
from quire.types.stats import Stats

MAX_MESSAGE_BYTES = 1 << 30  # between machines: a step report with every logprob of thousands of requests
MAX_FIRST_MESSAGE_BYTES = 1 << 20  # while the peer is not verified
JOURNAL_END = b"\0"  # ends the list of requests in flight: one request id per line


# ---- to the engine


class StartEngine(WireMessage):
    args: EngineArgs
    log_level: int
    engine: int = 0  # its number, of args.data_parallel_size
    serving: bool = True  # requests arrive while others run


class Add(WireMessage):
    """New requests. A prompt that several requests share is sent once: `shared` maps a request id to an index of `prompts`."""

    requests: list[EngineRequest]
    prompts: list[tuple[int, ...]] = field(default_factory=list)
    shared: dict[str, int] = field(default_factory=dict)

    def restored(self) -> list[EngineRequest]:
        return [
            replace(request, prompt=self.prompts[self.shared[request.id]]) if request.id in self.shared else request
            for request in self.requests
        ]


def add(requests: Sequence[EngineRequest]) -> Add:
    owners = Counter(id(request.prompt) for request in requests)
    indices: dict[int, int] = {}
    prompts: list[tuple[int, ...]] = []
    sent, shared = [], {}
    for request in requests:
        key = id(request.prompt)
        if owners[key] > 1:
            if key not in indices:
                indices[key] = len(prompts)
                prompts.append(request.prompt)
            shared[request.id] = indices[key]
            request = replace(request, prompt=())
        sent.append(request)
    return Add(sent, prompts, shared)


class Abort(WireMessage):
    ids: list[str]


class CallMethod(WireMessage):
    """One of the engine core's public methods, by name."""

    id: int
    method: str
    args: list[Any]


class LoadAdapter(WireMessage):
    """The reply is sent when the adapter has been read and checked."""

    id: int
    ref: AdapterRef
    pinned: bool


class SetWatched(WireMessage):
    """Start or stop reporting snapshots."""

    on: bool


class Stop(WireMessage):
    pass


# ---- from the engine


class Ready(WireMessage):
    """The engine has started: what it decided."""

    max_model_len: int
    pages: int
    device: str
    dtype: str
    max_batched_tokens: int
    max_seqs: int
    depth: int
    timeline: Timeline
    page_size: int  # tokens
    device_name: str = ""  # such as NVIDIA H200


class StepReport(WireMessage):
    """One step: the deltas of every request that has new tokens."""

    deltas: list[TokenDelta]
    stats: Stats
    tokens: int  # run in this step


class Seen(WireMessage):
    """A snapshot for viewers of the engine."""

    snapshot: EngineSnapshot


class Beat(WireMessage):
    """Heartbeat. busy: seconds that the loop has been in its present turn; 0 while it waits for work."""

    busy: float


class Refused(WireMessage):
    """A request that was rejected when it was added, or later (`added`)."""

    id: str
    kind: str
    message: str
    parameter: str | None
    added: bool = False


class Reply(WireMessage):
    """The reply to a call. error: why it failed; kind, parameter: set if the client caused it."""

    id: int
    value: Any
    error: str | None = None
    kind: str = ""
    parameter: str | None = None


class Failed(WireMessage):
    """The engine could not start."""

    kind: str
    message: str


# ---- from the node of an engine on another machine


class Begun(WireMessage):
    pid: int  # on its machine


class Ended(WireMessage):
    """The engine process ended: how, its requests in flight, and the last lines of its log."""

    how: str
    in_flight: list[str]
    lines: list[str]


Command = StartEngine | Add | Abort | CallMethod | LoadAdapter | SetWatched | Stop
Report = Ready | StepReport | Seen | Beat | Refused | Reply | Failed | Begun | Ended


encode: Callable[[Command | Report], bytes] = messages.encode
DTYPES = ("<i4", "<f4")  # of numpy arrays in messages
decode_command: Callable[[bytes], Command] = decoder(Command, DTYPES)
decode_report: Callable[[bytes], Report] = decoder(Report, DTYPES)


def request_error(refused: Refused) -> errors.QuireError:
    """Return the error that the engine raised."""
    return _request_error(refused.kind, refused.message, refused.parameter)


def reply_error(reply: Reply) -> errors.QuireError:
    """Return the error that the engine raised."""
    return _request_error(reply.kind, str(reply.error), reply.parameter) if reply.kind else errors.EngineError(reply.error)


def _request_error(name: str, message: str, parameter: str | None) -> errors.QuireError:
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, errors.RequestError):
        return kind(message, parameter)
    return errors.EngineError(f"{name}: {message}")


def start_error(failed: Failed) -> errors.QuireError:
    kind = getattr(errors, failed.kind, None)
    if isinstance(kind, type) and issubclass(kind, errors.ConfigError | errors.ModelError | errors.EngineError):
        return kind(failed.message)
    return errors.EngineError(f"the engine could not start: {failed.kind}: {failed.message}")
