"""Several engines behind one server: the same answers, whoever gives them, and a lost engine costs its own requests a pause."""

import concurrent.futures
import os
import signal
import socket
from pathlib import Path

import pytest
from feed_viewer import watching
from server_process import body, children, serving, wait_for

from quick_engines import held_back
from quire.cli.top import EngineRow, screen
from quire.config.server_args import ServerArgs
from serving import Running, error_of, events_of

RANK = "X-data-parallel-rank"


@pytest.fixture(scope="module")
def two(serve_model, quick, tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("traces"))
    traces = {"profiler": "torch", "torch_profiler_dir": folder, "torch_profiler_with_stack": False}
    running = Running(serve_model, data_parallel_size=2, profiler_config=traces)
    yield running
    running.close()


def bodies():
    base = {"model": "tiny", "max_tokens": 14, "ignore_eos": True, "temperature": 0, "return_token_ids": True}
    some = [
        {},
        {"temperature": 1, "seed": 3},
        {"temperature": 1, "seed": 4, "n": 3},
        {"structured_outputs": {"regex": "[a-f]{3,7}"}, "ignore_eos": False},
        {"logprobs": 2},
        {"prompt": ["one prompt", "another one", "and a third"]},
    ]
    return [{"prompt": f"the quick brown fox {i % 5} " + "jumps " * (i % 3), **base, **some[i % 6]} for i in range(18)]


def answers(running, asked, headers=None):
    def ask(one):
        response = running.http.post("/v1/completions", json=one, headers=headers)
        assert response.status_code == 200, response.text
        return [(c["index"], c["text"], c["token_ids"], c["finish_reason"]) for c in response.json()["choices"]]

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        return list(pool.map(ask, asked))


def test_the_same_answers(shared_server, two):
    alone = answers(shared_server, bodies())
    before = [0 if engine.stats is None else engine.stats.queries for engine in two.llm.engines]
    assert answers(two, bodies()) == alone
    two.wait_idle()
    after = [engine.stats.queries for engine in two.llm.engines]
    assert all(new > old for new, old in zip(after, before, strict=True)), "both have worked"
    for rank in (0, 1):
        assert answers(two, bodies()[:6], {RANK: str(rank)}) == alone[:6]


def test_a_request_names_its_engine(two):
    def queries():
        two.wait_idle()
        return [0 if engine.stats is None else engine.stats.queries for engine in two.llm.engines]

    for rank in (1, 1, 0):
        before = queries()
        answers(two, [bodies()[0]], {RANK: str(rank)})
        moved = [new - old for new, old in zip(queries(), before, strict=True)]
        assert moved[rank] > 0 and moved[1 - rank] == 0
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    for wrong in ("2", "-1", "x", "", "1.0", "٣", "1" * 30):
        for path, asked in (("/v1/completions", bodies()[0] | {"stream": True}), ("/v1/chat/completions", chat)):
            refused = two.http.post(path, json=asked, headers={RANK: wrong.encode()})
            assert refused.status_code == 400 and error_of(refused)["param"] == "data_parallel_rank"
    one = {"model": "tiny", "input": "hi", "max_output_tokens": 3}
    assert two.http.post("/v1/responses", json=one, headers={RANK: "1"}).status_code == 200
    assert two.http.post("/v1/responses", json=one, headers={RANK: "9"}).status_code == 400


def test_one_engine_is_number_0(shared_server):
    assert answers(shared_server, [bodies()[0]], {RANK: "0"}) == answers(shared_server, [bodies()[0]])
    refused = shared_server.http.post("/v1/completions", json=bodies()[0], headers={RANK: "1"})
    assert refused.status_code == 400 and "there is one engine, 0" in error_of(refused)["message"]


def test_a_killed_engine_is_a_pause_for_its_own_streams_only(shared_server, two):
    asked = [bodies()[0] | {"prompt": f"stream {i}", "max_tokens": 200, "stream": True} for i in range(8)]
    alone = [answers(shared_server, [one | {"stream": False}])[0] for one in asked]
    engine, begun, ended = two.llm.engines[1], [0] * 8, [False] * 8

    def follow(i):
        tokens, text = [], ""
        with two.http.stream("POST", "/v1/completions", json=asked[i], headers={RANK: str(i % 2)}) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    [event] = events_of(line)
                    [choice] = event["choices"]
                    text, tokens = text + choice["text"], tokens + (choice["token_ids"] or [])
                    begun[i] = len(tokens)
                    last = choice["finish_reason"]
        ended[i] = True
        return [(0, text, tokens, last)]

    lost, restarts = engine.pid, engine.restarts
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        streams = [pool.submit(follow, i) for i in range(8)]
        wait_for(lambda: all(count > 3 for count in begun))
        with held_back(engine.supervisor):
            os.kill(lost, signal.SIGKILL)
            wait_for(lambda: engine.state == "restarting")
            assert two.llm.state == "ready" and answers(two, [bodies()[0]]), "new requests go to the other"
            wait_for(lambda: all(ended[::2]))
            assert not any(ended[1::2]), "the other engine's streams did not wait for it"
        assert [stream.result() for stream in streams] == alone
    assert engine.restarts == restarts + 1 and engine.pid != lost and two.llm.engines[0].restarts == 0
    assert two.llm.replayed >= 4


def test_profiles_and_calls_of_every_engine(shared_server, two, monkeypatch):
    alone = answers(shared_server, bodies()[:6])
    assert two.http.post("/start_profile").json() == {"success": True}
    assert answers(two, bodies()[:6]) == alone
    assert "already running" in error_of(two.http.post("/start_profile"))["message"]
    files = two.http.post("/stop_profile").json()["files"]
    assert len(files) == 2 and all(Path(file).stat().st_size > 1000 for file in files)
    two.http.post("/start_profile")
    engine = two.llm.engines[0]
    restarts = engine.restarts
    os.kill(engine.pid, signal.SIGKILL)
    wait_for(lambda: engine.restarts > restarts and engine.state == "ready")
    refused = two.http.post("/start_profile")
    assert refused.status_code == 400 and "already running" in error_of(refused)["message"], "by the other engine"
    assert len(two.http.post("/stop_profile").json()["files"]) == 1, "the lost engine's profile is gone"
    assert "engine that was restarted has lost" in error_of(two.http.post("/stop_profile"))["message"]
    monkeypatch.setenv("QUIRE_SERVER_DEV_MODE", "1")
    with two.serve(ServerArgs()) as http:
        ranks = http.post("/collective_rpc", json={"method": "describe_rank"}).json()["results"]
        assert {rank["pid"] for rank in ranks} == {each.pid for each in two.llm.engines}
        assert [http.get(f"/get_world_size{one}").json()["world_size"] for one in ("", "?include_dp=false")] == [2, 1]


def metrics_of(client, name):
    """Its samples by engine."""
    lines = [line for line in client.get("/metrics").text.splitlines() if line.startswith(f"quire:{name}{{")]
    found = {}
    for line in lines:
        engine = line.partition('engine="')[2].partition('"')[0]
        found[engine] = found.get(engine, 0.0) + float(line.rpartition(" ")[2])
    return found


def test_metrics_health_and_events_of_a_whole_server(serve_model):
    flags = ("--data-parallel-size", "2", "--max-num-seqs", "4", "--num-gpu-blocks-override", "80")
    with serving(serve_model, *flags, latency=0.01) as server, server.client() as client, watching(server.url()) as viewer:
        first, second = children(server.process.pid, "quire.engine.process")
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            asked = [body(30, False, f"prompt {i} " * 6) for i in range(12)]
            counts = [one.json()["usage"] for one in pool.map(lambda one: client.post("/v1/completions", json=one), asked)]
        finished = viewer.finished(12)
        assert {request["engine"] for request in finished} == {0, 1}
        stats = viewer.settled()
        generated = metrics_of(client, "generation_tokens_total")
        assert set(generated) == {"0", "1"} and all(generated.values())
        assert sum(generated.values()) == stats["generated_tokens"] == sum(each["completion_tokens"] for each in counts)
        for engine in "01":
            mine = [request for request in finished if str(request["engine"]) == engine]
            assert metrics_of(client, "request_success_total")[engine] == len(mine)
            assert metrics_of(client, "e2e_request_latency_seconds_count")[engine] == len(mine)
            assert metrics_of(client, "cache_config_info")[engine] == 1
        hello, snapshot = viewer.of("hello")[0], viewer.of("snapshot")[0]
        assert hello["engines"] == 2 and hello["pages"] == 160 == hello["cells"] == len(snapshot["pages"]["cells"])
        assert [one["engine"]["engine"] for one in (snapshot, *snapshot["others"])] == [0, 1]
        assert {event["engine"] for event in viewer.of("step")} == {0, 1}
        assert max(event["first"] for event in viewer.of("pages")) >= 80, "one map behind the other"

        os.kill(second, signal.SIGKILL)
        wait_for(lambda: [event for event in viewer.of("engine") if event["state"] == "restarting"])
        assert client.get("/health").status_code == client.get("/readyz").status_code == client.get("/livez").status_code == 200
        assert client.post("/v1/completions", json=body(3, False)).status_code == 200
        wait_for(lambda: viewer.of("engine")[-1]["state"] == "ready")
        told = viewer.of("engine")[-1]
        assert told["restarts"] == 1 and "SIGKILL" in told["reason"] and told["pid"] not in (first, second)
        assert metrics_of(client, "engine_restarts_total")[str(told["engine"])] == 1
        assert sum(metrics_of(client, "engine_restarts_total").values()) == 1
        known = EngineRow()
        for kind, event in list(viewer.events):
            known.apply(kind, event)
        picture = "\n".join(screen(known, None, "here", 160, 50))
        assert "engine 0" in picture and "engine 1" in picture and "1 restarts, the latest: " in picture
        assert f"engine {told['engine']} was lost" in server.log() and f"restarting engine {told['engine']}" in server.log()
        assert client.post("/reset_prefix_cache").status_code in (200, 404)
        server.signal()
        assert server.wait() == 0


def test_a_machine_with_an_engine_is_lost_and_another_takes_its_place(serve_model):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    shared = ("--data-parallel-size", "2", "--data-parallel-size-local", "1", "--data-parallel-rpc-port", port)
    other = (*shared, "--headless", "--data-parallel-start-rank", "1")
    asked = body(120, True)
    with (
        serving(serve_model, *other, latency=0.01) as node,
        serving(serve_model, *shared, latency=0.01) as server,
        server.client() as client,
    ):
        alone = text_of(client.post("/v1/completions", json=asked, headers={RANK: "0"}).text)
        engine = node.engine_pid()
        with client.stream("POST", "/v1/completions", json=asked, headers={RANK: "1"}) as answer:
            lines = answer.iter_lines()
            begun = [next(lines) for _ in range(20)]
            node.signal(signal.SIGKILL)
            rest = list(lines)
        assert text_of("\n".join(begun + rest)) == alone, "it went on in the engine that is left"
        wait_for(lambda: not Path(f"/proc/{engine}").exists())
        assert client.get("/health").status_code == 200
        with serving(serve_model, *other, latency=0.01) as successor:
            wait_for(lambda: children(successor.process.pid, "quire.engine.process"))
            assert text_of(client.post("/v1/completions", json=asked, headers={RANK: "1"}).text) == alone
            assert metrics_of(client, "engine_restarts_total") == {"0": 0, "1": 1}
            server.signal()
            assert server.wait() == 0 and successor.wait() == 0, "both end"


def text_of(streamed):
    lines = [line for line in streamed.splitlines() if line.startswith("data: {")]
    events = [event for line in lines for event in events_of(line)]
    return "".join(event["choices"][0]["text"] for event in events if event["choices"])
