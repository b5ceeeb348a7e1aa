"""What the client sends to an engine, and what it sends again to the next one."""

import asyncio

import numpy as np
import pytest

from quire import EngineArgs, SamplingParams
from quire.engine import client as client_module
from quire.engine import ipc
from quire.engine.client import EngineClient
from quire.engine.timeline import Timeline
from quire.types.adapter import AdapterRef
from quire.types.errors import EngineDead, EngineError, PromptTooLong
from quire.types.outputs import TokenDelta
from quire.types.plan import TopLogprobs
from quire.types.request import EngineRequest

READY = ipc.Ready(100, 10, "cpu", "float32", 64, 8, 0, Timeline([], 0.0, 0.0), 16)


class Stage:
    """A client whose supervisor is played by the test: `sent` is what went to the engine, `heard` what came out."""

    def __init__(self, monkeypatch):
        stage = self
        self.sent, self.heard, self.refused = [], [], []
        self.state, self.error = "starting", None

        class Puppet:
            state = property(lambda _: stage.state)
            error = property(lambda _: stage.error)

            def __init__(self, *_):
                pass

            def send(self, command):
                assert stage.state == "ready"
                stage.sent.append(command)

            def stop(self, timeout):
                assert timeout >= 0
                stage.state, stage.error = "dead", EngineDead("stopped")

        monkeypatch.setattr(client_module, "Supervisor", Puppet)
        self.client = EngineClient(EngineArgs("m"), self)

    def on_ready(self, ready, engine=0):
        assert ready is READY

    def on_deltas(self, deltas, engine=0):
        self.heard += deltas

    def on_step(self, report, engine=0):
        pass

    def on_refused(self, engine_id, error):
        self.refused.append((engine_id, error))

    def ready(self):
        self.state = "ready"
        self.client.on_ready(READY)

    def lose(self, *in_flight):
        self.state = "restarting"
        self.client.on_lost(set(in_flight))

    def tell(self, name, *tokens, finish=None, scores=0):
        top = TopLogprobs(np.zeros((scores, 1), np.int32), np.zeros((scores, 1), np.float32), np.ones(scores, np.int32))
        self.client.on_deltas([TokenDelta(name, list(tokens), finish, prompt_logprobs=(top,) if scores else ())])

    def take(self):
        """The requests sent since the last look: id → (tokens told before, scores told before)."""
        added = [request for command in self.sent if isinstance(command, ipc.Add) for request in command.requests]
        self.sent.clear()
        return {request.id: (request.resumed, request.scored) for request in added}


@pytest.fixture
def stage(monkeypatch):
    return Stage(monkeypatch)


def requests(*names):
    return [EngineRequest(name, (1, 2, 3), SamplingParams(), 0, frozenset(), frozenset(), 0.0) for name in names]


FRESH = ((), 0)


def test_requests_wait_for_an_engine_and_go_in_order(stage):
    stage.client.add(requests("b", "a"))
    stage.client.add(requests("c"))
    assert stage.sent == []
    stage.ready()
    assert list(stage.take().items()) == [("b", FRESH), ("a", FRESH), ("c", FRESH)]
    stage.client.add(requests("d"))
    assert stage.take() == {"d": FRESH} and stage.client.num_open == 4


def test_what_ends_engines_is_not_asked_for_for_ever(stage):
    async def scene():
        stage.lose()  # without an engine that has got it nothing is counted
        asked = asyncio.create_task(stage.client.load_adapter(AdapterRef(1, "version", "path"), pinned=False))
        await asyncio.sleep(0)
        for _ in range(3):
            stage.lose()
            stage.ready()
            assert isinstance(stage.sent.pop(), ipc.LoadAdapter)
        stage.lose()
        with pytest.raises(EngineDead, match="lost 3 times in a row"):
            await asked
        stage.ready()
        assert stage.sent == []

    asyncio.run(scene())


def test_the_next_engine_goes_on_where_the_last_one_was(stage):
    stage.client.add(requests("a", "b", "c", "d"))
    stage.ready()
    stage.tell("a", 7)
    stage.tell("a", 8, 9)
    stage.tell("b", scores=2)
    stage.tell("c", 5, finish="stop")
    stage.take()
    stage.lose("a", "b")
    stage.ready()
    assert stage.take() == {"a": ((7, 8, 9), 0), "b": ((), 2), "d": FRESH}
    stage.tell("b", 4)
    stage.tell("a", 10)
    stage.lose("a", "b")
    stage.ready()
    assert stage.take() == {"a": ((7, 8, 9, 10), 0), "b": ((4,), 2), "d": FRESH}


def test_aborted_requests_are_not_sent_again(stage):
    stage.client.add(requests("a", "b"))
    stage.client.abort(["a", "unknown"])
    stage.ready()
    assert stage.take() == {"b": FRESH}
    stage.client.abort(["b", "a"])
    assert stage.sent == [ipc.Abort(["b"])]
    stage.sent.clear()
    stage.lose("b")
    stage.client.add(requests("c"))
    stage.client.abort(["c"])
    stage.ready()
    assert stage.sent == [] and stage.client.num_open == 0


def test_suspects_come_last_and_one_at_a_time(stage):
    stage.client.add(requests("a", "b", "c", "new"))
    for _ in range(2):
        stage.ready()
        stage.take()
        stage.lose("a", "b", "c")
    stage.ready()
    assert stage.take() == {"new": FRESH}
    stage.tell("new", 1)
    assert stage.take() == {"a": FRESH}
    stage.tell("new", 1)
    assert stage.take() == {}
    stage.tell("a", 1)
    assert stage.take() == {"b": FRESH}
    stage.client.abort(["b"])
    assert stage.take() == {"c": FRESH}
    stage.tell("c", 1, finish="length")
    assert stage.client.num_open == 2


def test_with_only_suspects_the_first_goes_at_once(stage):
    stage.client.add(requests("a", "b"))
    for _ in range(2):
        stage.ready()
        stage.lose("a", "b")
    stage.take()
    stage.ready()
    assert stage.take() == {"a": FRESH}
    stage.lose("a")
    [last] = stage.heard
    assert (last.request_id, last.finish_reason) == ("a", "error") and "3 times in a row" in last.error
    stage.ready()
    assert stage.take() == {"b": FRESH}, "it was not there at the third crash"


def test_who_only_waits_is_not_blamed(stage):
    stage.client.add(requests("runs", "waits"))
    for _ in range(10):
        stage.ready()
        assert "waits" in stage.take()
        stage.tell("runs", 1)
        stage.lose("runs")
    assert stage.heard == [d for d in stage.heard if d.finish_reason is None] and stage.client.num_open == 2


def test_progress_clears_the_record(stage):
    stage.client.add(requests("a"))
    for crash in range(10):
        stage.ready()
        assert "a" in stage.take()
        if crash % 3 == 2:
            stage.tell("a", crash)
        stage.lose("a")
    assert stage.client.num_open == 1


def test_a_refusal_is_raised_or_told(stage):
    stage.client.add(requests("fresh", "old"))
    stage.ready()
    stage.tell("old", 3)
    stage.lose("old")
    stage.ready()
    for name in ("fresh", "old", "unknown"):
        stage.client.on_answer(ipc.Refused(name, "PromptTooLong", "too long", "prompt"))
    [(name, error)] = stage.refused
    assert name == "fresh" and isinstance(error, PromptTooLong) and error.parameter == "prompt"
    assert (stage.heard[-1].request_id, stage.heard[-1].finish_reason) == ("old", "error")
    assert "too long" in stage.heard[-1].error and stage.client.num_open == 0


def test_calls_are_asked_again_of_the_next_engine(stage):
    async def scene():
        first = asyncio.create_task(stage.client.call("reset_prefix_cache"))
        await asyncio.sleep(0)
        stage.ready()
        assert stage.sent == [ipc.CallMethod(0, "reset_prefix_cache", [])]
        stage.lose()
        second = asyncio.create_task(stage.client.call("nonsense", 1))
        await asyncio.sleep(0)
        stage.ready()
        assert stage.sent[1:] == [ipc.CallMethod(0, "reset_prefix_cache", []), ipc.CallMethod(1, "nonsense", [1])]
        stage.client.on_answer(ipc.Reply(0, True))
        stage.client.on_answer(ipc.Reply(1, None, "no such method"))
        stage.client.on_answer(ipc.Reply(7, None))
        assert await first is True
        with pytest.raises(EngineError, match="no such method"):
            await second

    asyncio.run(scene())


@pytest.mark.parametrize("way", ["dead", "stop"])
def test_the_end_is_told_to_everybody(stage, way):
    async def scene():
        stage.client.add(requests("a", "b"))
        stage.ready()
        call = asyncio.create_task(stage.client.call("reset_prefix_cache"))
        await asyncio.sleep(0)
        if way == "dead":
            stage.state, stage.error = "dead", EngineDead("too often")
            stage.client.on_dead(stage.error)
        else:
            stage.client.stop(1.0)
        expected = ("error", "too often") if way == "dead" else ("abort", None)
        assert [(d.request_id, d.finish_reason, d.error) for d in stage.heard] == [("a", *expected), ("b", *expected)]
        with pytest.raises(EngineDead):
            await call
        with pytest.raises(EngineDead):
            stage.client.add(requests("c"))
        with pytest.raises(EngineDead):
            await stage.client.call("reset_prefix_cache")

    asyncio.run(scene())
