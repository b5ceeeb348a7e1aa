"""What the API process and the engine process say to each other.

    API process                        engine process
    ──── Start, Add, Abort, ... ─────► the loop
    ◄─── Ready, StepReport, ... ────── the loop
    ◄─── Beat ──────────────────────── the heartbeat thread

They are joined by a pair of sockets that nobody else has (`Channel`); the frames are msgpack. Nothing received is ever executed
or unpickled.
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

AHEAD = "ahead"  # to an engine process that is started before its arguments are known: import what a model needs
LARGEST = 1 << 30  # bytes of a message between machines: a step's report with every logprob of thousands of rows
FIRST = 1 << 20  # of the first one, when nobody knows yet who speaks
END = b"\0"  # of the journal, the file that says who is being worked on: one request id per line


# ---- to the engine


class StartEngine(WireMessage):
    args: EngineArgs
    log_level: int
    engine: int = 0  # its number, of args.data_parallel_size
    serving: bool = True  # requests come and go while others wait for their next token


class Add(WireMessage):
    """A prompt that several requests have is told once: `shared` says which of the `prompts` a request without one has."""

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
    places: dict[int, int] = {}
    prompts: list[tuple[int, ...]] = []
    told, shared = [], {}
    for request in requests:
        key = id(request.prompt)
        if owners[key] > 1:
            if key not in places:
                places[key] = len(prompts)
                prompts.append(request.prompt)
            shared[request.id] = places[key]
            request = replace(request, prompt=())
        told.append(request)
    return Add(told, prompts, shared)


class Abort(WireMessage):
    ids: list[str]


class CallMethod(WireMessage):
    """One of the engine core's public methods, by name."""

    id: int
    method: str
    args: list[Any]


class LoadAdapter(WireMessage):
    """The reply comes when it is read, and found good or not."""

    id: int
    ref: AdapterRef
    pinned: bool


class Watch(WireMessage):
    """Somebody looks at the engine now, or nobody any more."""

    on: bool


class Stop(WireMessage):
    pass


# ---- from the engine


class Ready(WireMessage):
    """Started: what was decided there."""

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
    """One turn of the loop: news of every request that has any."""

    deltas: list[TokenDelta]
    stats: Stats
    tokens: int  # run in this step


class Seen(WireMessage):
    """For those who look at the engine."""

    snapshot: EngineSnapshot


class Beat(WireMessage):
    """The process is alive. `busy` is for how long its loop has been in the present turn; 0 while it waits for work."""

    busy: float


class Refused(WireMessage):
    """A request that was not added, or that was and turned out to be wrong while it was worked on."""

    id: str
    kind: str
    message: str
    parameter: str | None
    added: bool = False


class Reply(WireMessage):
    """The answer to a Call; `error` says why there is none, `kind` and `parameter` whether that is the client's fault."""

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
    pid: int  # there


class Ended(WireMessage):
    """Its process has; `how`, and what a parent learns from its journal and its log."""

    how: str
    in_flight: list[str]
    lines: list[str]


Command = StartEngine | Add | Abort | CallMethod | LoadAdapter | Watch | Stop
Report = Ready | StepReport | Seen | Beat | Refused | Reply | Failed | Begun | Ended


encode: Callable[[Command | Report], bytes] = messages.encode
DTYPES = ("<i4", "<f4")  # of numpy arrays in messages
decode_command: Callable[[bytes], Command] = decoder(Command, DTYPES)
decode_report: Callable[[bytes], Report] = decoder(Report, DTYPES)


def request_error(refused: Refused) -> errors.QuireError:
    """The same error the engine raised."""
    return _request_error(refused.kind, refused.message, refused.parameter)


def reply_error(reply: Reply) -> errors.QuireError:
    """The same error the engine raised."""
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
