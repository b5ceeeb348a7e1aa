"""What the first rank and the others say to each other beside the parts of their sums: msgpack frames with their length in
front. Nothing received is ever executed or unpickled."""

from collections.abc import Callable
from typing import Any

import msgspec

from quire.config.args import EngineArgs
from quire.engine.arrays import array_reader, from_array
from quire.types.adapter import AdapterRef
from quire.types.plan import Ints, StepPlan


class _RankFrame(msgspec.Struct, array_like=True, tag=True):
    pass


# ---- from the first rank


class StartRank(_RankFrame):
    args: EngineArgs  # with which any process comes to the same configuration
    rank: int
    draft_files: dict[str, str] = {}  # digests of node 0's, for a rank of another node (`agreement.draft_files`)
    gpus: str = ""  # those of its engine, by their names, where the first rank has GPUs; "" = as the machine has them


class RunStep(_RankFrame):
    """The first rank alone draws: `drawn` is what the step before drew, if it did."""

    drawn: Ints | None
    plan: StepPlan


class Follow(_RankFrame):
    """A model or head that drafts goes on behind the latest step, on every rank: what it drew, and how many tokens its rows
    brought."""

    drawn: Ints
    lengths: Ints


class BeginStep(_RankFrame):
    """Of a pipeline: the rows go through a rank's stage. `drawn`: what steps that are finished drew, for the first stage."""

    drawn: dict[int, Ints]
    plan: StepPlan


class FinishStep(_RankFrame):
    """Of a pipeline: the first stage takes what came out of the last one. Steps are finished in the order they were begun."""

    step: int


class CallRank(_RankFrame):
    """One of a runner's public methods, by name. The answer is an Answer."""

    method: str
    args: list[Any]


class ReadAdapter(_RankFrame):
    """Into the host's memory, while steps run. There is no answer (`rank_adapters.py` has what comes of it). Not `wanted`: the
    first rank could not read it."""

    ref: AdapterRef
    wanted: bool = True


class Did(_RankFrame):
    """To ranks that run the same script (`engine/external.py`): what came of a call in the first one's. digest: of what was
    asked. report: a frame of `ipc`."""

    what: str
    digest: int
    report: bytes


# ---- to it


class Answer(_RankFrame):
    value: Any


class RankFailed(_RankFrame):
    """Its last words."""

    kind: str
    message: str
    step: int | None  # in which it failed; None = before there were any


Command = StartRank | RunStep | Follow | BeginStep | FinishStep | CallRank | ReadAdapter | Did
Report = Answer | RankFailed


_to_array = array_reader(("<i4", "<i8", "<u4", "<f4", "|b1"), writable=True)
encode: Callable[[Command | Report], bytes] = msgspec.msgpack.Encoder(enc_hook=from_array).encode
decode_command: Callable[[bytes], Command] = msgspec.msgpack.Decoder(Command, dec_hook=_to_array).decode
decode_report: Callable[[bytes], Report] = msgspec.msgpack.Decoder(Report, dec_hook=_to_array).decode
