"""Messages between the first rank and the others: msgpack frames. Nothing received is ever executed or unpickled."""

from collections.abc import Callable
from typing import Any

from msgspec import field

from quire.config.args import EngineArgs
from quire.proc import messages
from quire.proc.messages import WireMessage, decoder
from quire.types.adapter import AdapterRef
from quire.types.plan import Ints, StepPlan

# ---- from the first rank


class StartRank(WireMessage):
    args: EngineArgs
    rank: int
    resolved: dict[str, str] = field(default_factory=dict)  # rank 0's (`agreement.resolved_values`)
    draft_files: dict[str, str] = field(default_factory=dict)  # digests of node 0's (`agreement.draft_files`), on other nodes
    gpus: str = ""  # of its engine, by name, if the first rank has GPUs; "": all of the machine
    local_rank: int = 0  # number of the rank among those of its node, which use its GPUs in this order


class RunStep(WireMessage):
    """A step. Only the first rank samples: `sampled` are the tokens of the previous step, if it sampled any."""

    sampled: Ints | None
    plan: StepPlan


class Follow(WireMessage):
    """Run the drafter after the latest step: sampled tokens, and how many tokens its rows accepted."""

    sampled: Ints
    lengths: Ints


class BeginStep(WireMessage):
    """Run rows through a pipeline stage. sampled: tokens of finished steps, for the first stage."""

    sampled: dict[int, Ints]
    plan: StepPlan


class FinishStep(WireMessage):
    """Finish a step on the first pipeline stage, with the output of the last one. Steps are finished in the order in which
    they began.
    """

    step: int


class CallRank(WireMessage):
    """A call of a public method of the runner. The reply is an Answer."""

    method: str
    args: list[Any]


class Idle(WireMessage):
    """Prepare for later steps, as the first rank does at the same time: record a CUDA graph that contains collectives."""


class ReadAdapter(WireMessage):
    """Read an adapter into host memory while steps run. There is no reply: `hold_adapter` returns the outcome
    (`features/lora/cache.py`). needed=False: the first rank could not read it.
    """

    ref: AdapterRef
    needed: bool = True


class Did(WireMessage):
    """The outcome of a call on rank 0, for ranks that run the same script (`engine/external.py`).

    digest: of the call's arguments. report: a frame of `ipc`.
    """

    what: str
    digest: int
    report: bytes


# ---- to the first rank


class Answer(WireMessage):
    value: Any


class RankFailed(WireMessage):
    """The last message of a rank that failed."""

    kind: str
    message: str
    step: int | None  # in which it failed; None: before the first


Command = StartRank | RunStep | Follow | BeginStep | FinishStep | CallRank | Idle | ReadAdapter | Did
Report = Answer | RankFailed


encode: Callable[[Command | Report], bytes] = messages.encode
_DTYPES = ("<i4", "<i8", "<u4", "<f4", "|b1")
decode_command: Callable[[bytes], Command] = decoder(Command, _DTYPES, writable=True)
decode_report: Callable[[bytes], Report] = decoder(Report, _DTYPES, writable=True)
