"""The feed's own parts: viewers that do not read, how many there may be, and when the engine is asked to collect anything."""

import asyncio
import json
from types import SimpleNamespace

import pytest

from quire.config.server_args import ServerArgs
from quire.obs.metrics import HttpMetrics, Metrics
from quire.serve.engine_events import MAX_BYTES, MAX_WAITING, EngineEvents, Viewer, ViewerStream, encode
from quire.serve.engine_views import END_TIMEOUT_S, RequestTraces
from quire.serve.health import ServerState, Service
from quire.serve.limits import ServerLimits
from quire.types.engine_snapshot import PARTS, RequestSnapshot
from quire.types.stats import Stats


def events_of(data):
    blocks = [block.split(b"\n") for block in data.split(b"\n\n") if block and not block.startswith(b":")]
    return [(lines[1].removeprefix(b"event: ").decode(), json.loads(lines[2].removeprefix(b"data: "))) for lines in blocks]


def test_a_viewer_that_does_not_read_holds_a_bounded_number_of_events():
    async def go():
        viewer = Viewer(None, lambda: encode("snapshot", {"t": 1.0}))
        for i in range(10 * MAX_WAITING):
            viewer.push(encode("step", {"i": i}))
            assert len(viewer._waiting) <= MAX_WAITING and viewer._bytes <= MAX_BYTES
        gap, snapshot = events_of(await viewer.take())
        assert gap == ("gap", {"lost": 10 * MAX_WAITING}) and snapshot[0] == "snapshot"
        viewer.push(encode("step", {"i": -1}))
        assert events_of(await viewer.take()) == [("step", {"i": -1})], "it goes on from there"
        large = b"x" * (MAX_BYTES // 2)
        for _ in range(5):
            viewer.push(large)
        assert viewer._bytes <= MAX_BYTES

    asyncio.run(go())


def test_a_blocked_connection_loses_events_and_is_told_so():
    async def go():
        viewer, sent, room, left = Viewer(None, lambda: encode("snapshot", {"t": 1.0})), [], asyncio.Event(), []

        async def send(message):
            sent.append(message)
            if message["type"] == "http.response.body":
                await room.wait()

        async def receive():
            await asyncio.Event().wait()

        task = asyncio.create_task(ViewerStream(viewer, left.append)({"type": "http"}, receive, send))
        viewer.push(encode("step", {"i": 0}))
        await asyncio.sleep(0.01)
        for i in range(1000):
            viewer.push(encode("step", {"i": i}))
        viewer.end(encode("bye", {}))
        assert len(sent) == 2 and len(viewer._waiting) <= MAX_WAITING
        room.set()
        await asyncio.sleep(0.01)
        await task
        kinds = [kind for message in sent[1:] for kind, _ in events_of(message["body"])]
        assert kinds == ["step", "gap", "snapshot", "bye"]
        assert left == [viewer] and sent[-1]["more_body"] is False

    asyncio.run(go())


class FakeLLM:
    """Says whether it is watched."""

    def __init__(self):
        self.config = SimpleNamespace(
            served_names=("tiny",),
            device="cpu",
            dtype="float32",
            max_seqs=4,
            max_batched_tokens=64,
            page_size=4,
            features={},
            world=1,
            stages=1,
        )
        self.observers, self.viewer = [], None
        self.state, self.restarts, self.replayed, self.last_loss, self.pid = "ready", 0, 0, None, 1
        self.engines = [self]
        self.pages, self.max_model_len, self.stats = 8, 100, Stats(0, 0, 8, 8, 0, 0, 0)

    def watch(self, viewer):
        self.viewer = viewer

    def owner(self, key):
        return None


def make_feed(several, viewers):
    state, llm = ServerState(ServerArgs()), FakeLLM()
    metrics = Metrics("quire", "tiny", 100, {"block_size": 16})
    state.service = Service(llm, None, metrics, HttpMetrics(metrics.registry))
    return EngineEvents(state, several, ServerLimits(viewers=viewers)), llm, state


def ask(feed, tenant=None, method="GET"):
    return feed.events(SimpleNamespace(method=method, state=SimpleNamespace(tenant=tenant)))


def test_the_engine_is_watched_from_the_first_viewer_to_the_last():
    async def go():
        feed, llm, _ = make_feed(several=False, viewers=3)
        assert llm.viewer is None and not llm.observers
        streams = [await ask(feed), await ask(feed)]
        assert llm.viewer is not None and len(llm.observers) == 1
        feed._leave(streams[0]._viewer)
        assert llm.viewer is not None
        feed._leave(streams[1]._viewer)
        assert llm.viewer is None and not llm.observers and feed._watch is None
        assert (await ask(feed, method="HEAD")).status_code == 200 and feed._watch is None

    asyncio.run(go())


def test_the_number_of_viewers_is_bounded_and_keys_leave_room_for_others():
    async def go():
        feed, _, _ = make_feed(several=False, viewers=3)
        assert [(await ask(feed)).status_code if i > 2 else await ask(feed) for i in range(4)][3] == 503
        feed, _, state = make_feed(several=True, viewers=4)
        loud = [await ask(feed, "a") for _ in range(4)]
        assert [isinstance(each, ViewerStream) for each in loud] == [True, True, False, False]
        assert isinstance(await ask(feed, "b"), ViewerStream)
        state.draining = True
        assert (await ask(feed, "b")).status_code == 503

    asyncio.run(go())


def seen(key, state, since, parts=None, **more):
    fields = {
        "tenant": "", "seen": 10.0, "fresh": True, "prompt": 5, "cached": 0, "drawn": 1, "drafted": 0, "accepted": 0,
        "max_tokens": 9, "grammar": False, "preemptions": 0,
    } | more  # fmt: skip
    return RequestSnapshot(key=key, state=state, since=since, parts=parts or [0.0] * len(PARTS), **fields)


def parts(**named):
    return [named.get(name, 0.0) for name in PARTS]


def over(key, finished, reason="stop"):
    metrics = SimpleNamespace(queued_ts=9.5, finished_ts=finished, first_token_ts=10.5, first_token_latency=1.0)
    return SimpleNamespace(
        request_id=f"cmpl-x-0-{key}", engine_ids=(key,), metrics=metrics, reasons=(reason,), generated=(4,), params=None
    )


def answer(key):
    requests = (SimpleNamespace(id=key),)
    return SimpleNamespace(
        prepared=SimpleNamespace(id=f"cmpl-x-0-{key}", requests=requests), metrics=SimpleNamespace(queued_ts=9.5)
    )


def check(trace, wall, **expected):
    told = trace.as_event()
    assert told["state"] == "finished" and told["wall"] == wall and told["id"] == "cmpl-x" and told["index"] == 0
    assert told["parts"] == pytest.approx(expected) and sum(told["parts"].values()) == pytest.approx(wall)


def test_a_request_that_came_and_went_between_two_sights():
    traces = RequestTraces(lambda key: None)
    traces.end(over("1", 12.5))
    traces.see([seen("1", "finished", 12.0, parts(queue=1.0, decode=1.0))])
    check(traces.take()[-1], 3.0, prepare=0.5, queue=1.0, decode=1.0, deliver=0.5)
    assert not traces.open and not traces._ended


def test_what_an_engine_did_after_a_stop_string_is_not_counted():
    traces = RequestTraces(answer)
    traces.see([seen("1", "decode", 11.0, parts(queue=1.0))])
    traces.end(over("1", 12.0))
    traces.see([seen("1", "finished", 14.0, parts(queue=1.0, decode=1.0, others=2.0))])
    check(traces.take()[-1], 2.5, prepare=0.5, queue=1.0, others=1.0)


def test_a_request_survives_engines_in_the_ledger():
    traces = RequestTraces(answer)
    traces.see([seen("1", "decode", 11.0, parts(queue=1.0))])
    traces.lose(12.0)
    assert traces.take()[-1].as_event()["state"] == "restart"
    traces.regain(14.5)
    traces.see([seen("1", "prompt", 15.0, seen=15.0)])
    traces.end(over("1", 17.0))
    traces.see([seen("1", "finished", 17.0, parts(prompt=2.0), seen=15.0)])
    check(traces.take()[-1], 7.5, prepare=0.5, queue=1.0, decode=1.0, restart=3.0, prompt=2.0)


def test_a_request_that_ends_while_there_is_no_engine():
    traces = RequestTraces(answer)
    traces.see([seen("1", "waiting", 10.0)])
    traces.lose(11.0)
    traces.end(over("1", 13.0, "abort"))
    check(traces.take()[-1], 3.5, prepare=0.5, queue=1.0, restart=2.0)
    traces = RequestTraces(answer)
    traces.see([seen("2", "waiting", 10.0)])
    traces.end(over("2", 10.5))
    traces.lose(11.0)
    check(traces.take()[-1], 1.0, prepare=0.5, queue=0.5)


def test_what_nobody_speaks_of_again_is_forgotten():
    traces = RequestTraces(answer)
    traces.see([seen("1", "decode", 11.0)])
    traces._owner = lambda key: None
    traces.end(over("2", 12.0))
    traces.tidy(13.0)
    assert traces.open and traces._ended
    traces.tidy(13.0 + END_TIMEOUT_S)
    assert not traces.open and not traces._ended
