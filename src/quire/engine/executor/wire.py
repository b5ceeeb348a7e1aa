"""What the first rank and the others say to each other beside the parts of their sums: msgpack frames with their length in
front. Nothing received is ever executed or unpickled."""

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
    args: EngineArgs  # with which any process comes to the same configuration
    rank: int
    draft_files: dict[str, str] = field(default_factory=dict)  # digests of node 0's (`agreement.draft_files`), on other nodes
    gpus: str = ""  # those of its engine, by their names, where the first rank has GPUs; "" = as the machine has them


class RunStep(WireMessage):
    """The first rank alone draws: `drawn` is what the step before drew, if it did."""

    drawn: Ints | None
    plan: StepPlan


class Follow(WireMessage):
    """A model or head that drafts goes on behind the latest step, on every rank: what it drew, and how many tokens its rows
    brought."""

    drawn: Ints
    lengths: Ints


class BeginStep(WireMessage):
    """Of a pipeline: the rows go through a rank's stage. `drawn`: what steps that are finished drew, for the first stage."""

    drawn: dict[int, Ints]
    plan: StepPlan


class FinishStep(WireMessage):
    """Of a pipeline: the first stage takes what came out of the last one. Steps are finished in the order they were begun."""

    step: int


class CallRank(WireMessage):
    """One of a runner's public methods, by name. The answer is an Answer."""

    method: str
    args: list[Any]


class ReadAdapter(WireMessage):
    """Read an adapter into host memory while steps run. There is no reply: `hold_adapter` returns the outcome
    (`features/lora/cache.py`). wanted=False: the first rank could not read it."""

    ref: AdapterRef
    wanted: bool = True


class Did(WireMessage):
    """To ranks that run the same script (`engine/external.py`): what came of a call in the first one's. digest: of what was
    asked. report: a frame of `ipc`."""

    what: str
    digest: int
    report: bytes


# ---- to it


class Answer(WireMessage):
    value: Any


class RankFailed(WireMessage):
    """Its last words."""

    kind: str
    message: str
    step: int | None  # in which it failed; None = before there were any


Command = StartRank | RunStep | Follow | BeginStep | FinishStep | CallRank | ReadAdapter | Did
Report = Answer | RankFailed


encode: Callable[[Command | Report], bytes] = messages.encode
_DTYPES = ("<i4", "<i8", "<u4", "<f4", "|b1")
decode_command: Callable[[bytes], Command] = decoder(Command, _DTYPES, writable=True)
decode_report: Callable[[bytes], Report] = decoder(Report, _DTYPES, writable=True)
