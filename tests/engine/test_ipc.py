"""What crosses between the processes arrives as it was sent, and nothing else is let in."""

import gc
import os
import pickle
import signal
import socket
import tempfile

import msgspec
import numpy as np
import pytest

from quire import EngineArgs, SamplingParams
from quire.engine import ipc, process
from quire.engine.child import Child
from quire.engine.timeline import Timeline
from quire.types import errors
from quire.types.outputs import TokenDelta
from quire.types.plan import TopLogprobs
from quire.types.pooling import Pooling
from quire.types.prompts import Extras
from quire.types.request import EngineRequest
from quire.types.sampling import RepetitionDetectionParams, RequestOutputKind
from quire.types.stats import Stats

STATS = Stats(1, 2, 30, 4, 5, 6, 7)
REQUEST = EngineRequest(
    id="a#1",
    prompt=(5, 0, 70000),
    params=SamplingParams(
        temperature=0.3, stop=["x", "y"], stop_token_ids=[7], logit_bias={3: -1.5}, allowed_token_ids=[3, 4], logprobs=2,
        max_tokens=9, min_tokens=2, bad_words=["no"], seed=-5, output_kind=RequestOutputKind.DELTA,
        repetition_detection=RepetitionDetectionParams(4, 2, 3),
    ),
    seed=2**64 - 1,
    stop_ids=frozenset({1, 7}),
    eos_ids=frozenset({1}),
    arrival=12.5,
    bad_words=((8, 9), (10,)),
    priority=-3,
    salt=("tenant=ü", "owner=b"),
    fork_of="a#0",
    hold=True,
    extras=Extras(adapter_slot=3, pooling=Pooling("token_classify", "STEP", returned_token_ids=(3, 1))),
    resumed=(4, 3),
    scored=2,
)  # fmt: skip


def top(rows: int, columns: int) -> TopLogprobs:
    values = -np.arange(rows * columns, dtype=np.float32).reshape(rows, columns) / 3
    return TopLogprobs(np.arange(rows * columns, dtype=np.int32).reshape(rows, columns), values, np.ones(rows, np.int32))


@pytest.mark.parametrize(
    "command",
    [
        ipc.StartEngine(EngineArgs("m", hf_overrides={"a": [1, {"b": None}]}, served_model_name=["x", "y"], hf_token=True), 20),
        ipc.Add([REQUEST, EngineRequest("b", (1,), SamplingParams(), 0, frozenset(), frozenset(), 0.0)]),
        ipc.Abort(["a", "b"]),
        ipc.CallMethod(3, "reset_prefix_cache", [1, "x", None]),
        ipc.Stop(),
    ],
)
def test_commands_arrive_as_they_were_sent(command):
    assert ipc.decode_command(ipc.encode(command)) == command


@pytest.mark.parametrize(
    "report",
    [
        ipc.Ready(256, 100, "cpu", "float32", 64, 8, 1, Timeline([("imports", 1.5)], 1.5, 7.25), 32, "NVIDIA H200"),
        ipc.StepReport([TokenDelta("a", [1, 2], "stop", 2), TokenDelta("b", [], "error", error="why")], STATS, 17),
        ipc.Beat(0.25),
        ipc.Refused("a", "PromptTooLong", "too long", "prompt"),
        ipc.Reply(3, True),
        ipc.Failed("ConfigError", "no"),
    ],
)
def test_reports_arrive_as_they_were_sent(report):
    assert ipc.decode_report(ipc.encode(report)) == report


def test_arrays_arrive_with_type_and_shape():
    state = np.arange(5, dtype=np.float32) / 3
    sent = TokenDelta("a", [4], logprobs=(top(1, 3),), prompt_logprobs=(top(5, 2), top(0, 2)), pooled=state)
    [got] = ipc.decode_report(ipc.encode(ipc.StepReport([sent], STATS, 1))).deltas
    assert got.pooled.dtype == np.float32 and (got.pooled == state).all()
    for before, after in zip(sent.logprobs + sent.prompt_logprobs, got.logprobs + got.prompt_logprobs, strict=True):
        for name in ("ids", "values", "rank"):
            old, new = getattr(before, name), getattr(after, name)
            assert (old.dtype, old.shape) == (new.dtype, new.shape) and (old == new).all()
    strided = TopLogprobs(top(4, 4).ids[::2, ::2], top(4, 4).values[::2, ::2], top(4, 4).rank[::2])
    [got] = ipc.decode_report(ipc.encode(ipc.StepReport([TokenDelta("a", [4], logprobs=(strided,))], STATS, 1))).deltas
    assert got.pooled is None and (got.logprobs[0].ids == strided.ids).all() and got.logprobs[0].ids.flags.c_contiguous


@pytest.mark.parametrize(
    "frame",
    [b"", b"\xc1", pickle.dumps(ipc.Stop), ipc.encode(ipc.Beat(1.0)), ipc.encode(ipc.Stop())[:-1], b"\x92\xa3Add\xc0"],
)
def test_what_is_not_a_command_is_refused(frame):
    with pytest.raises((msgspec.DecodeError, UnicodeDecodeError)):
        ipc.decode_command(frame)


@pytest.mark.parametrize("kind", ["|O", "<U3", "<M8[s]"])
def test_only_numbers_come_as_arrays(kind):
    bad = msgspec.to_builtins(ipc.StepReport([TokenDelta("a", [1])], STATS, 1))
    bad[1][0][5] = [{"ids": [kind, [1, 1], b"12345678"], "values": ["<f4", [1, 1], b"1234"], "rank": ["<i4", [1], b"1234"]}]
    with pytest.raises((msgspec.ValidationError, TypeError), match="cannot be received"):
        ipc.decode_report(msgspec.msgpack.encode(bad))


def test_what_cannot_be_sent_is_a_config_error():
    with pytest.raises(errors.ConfigError, match="cannot be sent"):
        Child(EngineArgs("m", hf_overrides={"f": print}))


@pytest.mark.parametrize("kind", ["RequestError", "InvalidParameter", "PromptTooLong", "NotSupported"])
def test_a_refusal_is_the_same_error_here(kind):
    error = ipc.request_error(ipc.Refused("a", kind, "why", "prompt"))
    assert (type(error).__name__, str(error), error.parameter) == (kind, "why", "prompt")


def test_an_unforeseen_refusal_is_the_engines_fault():
    for kind in ("KeyError", "ConfigError", "__doc__"):
        error = ipc.request_error(ipc.Refused("a", kind, "why", None))
        assert type(error) is errors.EngineError and str(error) == f"{kind}: why"


def test_a_failed_start_is_the_same_error_here():
    for kind in ("ConfigError", "ModelError", "ModelNotFound", "EngineError"):
        error = ipc.start_error(ipc.Failed(kind, "why"))
        assert (type(error).__name__, str(error)) == (kind, "why")
    for kind in ("KeyError", "RequestError", "__doc__", "QuireError"):
        error = ipc.start_error(ipc.Failed(kind, "why"))
        assert type(error) is errors.EngineError and kind in str(error) and "why" in str(error)


def test_a_process_leaves_nothing_behind_whoever_kills_it(tmp_path, monkeypatch):
    """There is nothing that would have to be removed."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    child = Child(EngineArgs("m"), ("sleep", "60", ";"))
    try:
        assert list(tmp_path.iterdir()) == []
        assert child.in_flight() == {""}
    finally:
        child.close()
    assert child.ending() is not None


def test_an_engine_process_ends_with_nothing_hidden_from_the_collector(monkeypatch):
    """Libraries count what is left of theirs when the interpreter ends, and print it."""
    monkeypatch.setattr(process, "_serve", lambda *_: gc.freeze() or 0)
    before, (ours, theirs) = signal.getsignal(signal.SIGINT), socket.socketpair()
    try:
        with tempfile.TemporaryFile() as journal, ours:
            arguments = [str(journal.fileno()), str(os.getppid()), str(theirs.detach())]
            assert process.main(arguments) == 0 and gc.get_freeze_count() == 0
    finally:
        gc.unfreeze()
        signal.signal(signal.SIGINT, before)
