"""Several API processes on one port: answers are those of one, metrics are of all, and one that is lost is replaced."""

import concurrent.futures
import contextlib
import os
import re
import signal
import threading
from pathlib import Path

import httpx
import pytest
from server_process import ServerProcess, body, children, read_stream, serving, wait_for

from adapter_files import write_adapter
from quire import LLM, SamplingParams

FRONT = "quire.serve.api_workers.process"
FLAGS = ("--api-server-count", "2", "--data-parallel-size", "2", "--enable-server-load-tracking", "--enable-lora",
         "--max-loras", "4", "--allow-runtime-lora-updating")  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    for name in ("a", "b", "c"):
        write_adapter(folder / name, name)
    return folder


@pytest.fixture(scope="module")
def two(serve_model: Path, folder: Path):
    with serving(serve_model, *FLAGS, "--lora-modules", f"a={folder / 'a'}") as server:
        server.url()
        yield server


def fronts(server: ServerProcess) -> list[int]:
    return children(server.process.pid, FRONT)


def metric(client: httpx.Client, name: str) -> float:
    text = client.get("/metrics").text
    return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if re.match(rf"{name}(\{{| )", line))


def fresh(server: ServerProcess, i: int) -> str:
    """Over a connection of its own, so that any process may get it."""
    with server.client() as client:
        events = read_stream(client, body(20, True, f"prompt {i}"))
    return "".join(event["choices"][0]["text"] for event in events[:-2])


def sockets(pid: int) -> int:
    found = 0
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            found += "socket" in str(descriptor.readlink())
    return found


def test_answers_and_metrics_of_all(two: ServerProcess, serve_model: Path) -> None:
    assert len(fronts(two)) == 2 and len(children(two.process.pid, "quire.engine.process")) == 2
    alone = LLM(str(serve_model), distributed_executor_backend="fake")
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    expected = [one.outputs[0].text for one in alone.generate([f"prompt {i}" for i in range(4)], params)]
    with two.client() as client:
        before = metric(client, "quire:request_success_total"), metric(client, "http_requests_total")
    idle, over, requests = {pid: sockets(pid) for pid in fronts(two)}, threading.Event(), 0

    def ask_on(i: int) -> list[str]:
        texts = [fresh(two, i % 4)]
        while not over.is_set():
            texts.append(fresh(two, i % 4))
        return texts

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        streams = [pool.submit(ask_on, i) for i in range(8)]
        try:
            busy: set[int] = set()
            wait_for(lambda: busy.update(pid for pid in idle if sockets(pid) > idle[pid]) or len(busy) == 2)  # both have some
            with two.client() as client:
                wait_for(lambda: client.get("/load").json()["server_load"] > 0)
        finally:
            over.set()
        for i, stream in enumerate(streams):
            assert {*stream.result()} == {expected[i % 4]}
            requests += len(stream.result())
    for _ in range(4):  # whoever answers
        with two.client() as client:
            assert metric(client, "quire:request_success_total") == before[0] + requests
            assert metric(client, "http_requests_total") == before[1] + requests
            assert metric(client, "quire:generation_tokens_total") == metric(client, "quire:request_generation_tokens_sum")
            wait_for(lambda client=client: metric(client, "quire:num_requests_running") == 0)  # told a few times a second
            assert client.get("/load").json() == {"server_load": 0}
            assert client.get("/readyz").status_code == 200


def test_other_hosts_are_refused_by_all(two: ServerProcess) -> None:
    for _ in range(8):  # each time by any of the processes
        with two.client() as http:
            assert http.get("/livez", headers={"Host": "evil.example"}).status_code == 421
            assert http.get("/livez", headers={"Host": "localhost"}).status_code == 200


def test_what_no_process_could_find_again_is_refused(two: ServerProcess) -> None:
    with two.client() as client:
        asked = {"model": "tiny", "input": "hi", "max_output_tokens": 3}
        kept = client.post("/v1/responses", json=asked)
        assert kept.status_code == 200 and kept.json()["store"] is False
        for name, value in (("background", True), ("previous_response_id", kept.json()["id"])):
            refused = client.post("/v1/responses", json=asked | {name: value})
            assert refused.status_code == 400 and "--api-server-count" in refused.json()["error"]["message"]


def ask(server: ServerProcess, path: str, **asked: object) -> httpx.Response:
    with server.client() as client:
        return client.post(path, json=asked)


def names_known(server: ServerProcess) -> list[set[str]]:
    """By whichever process answers, many times."""
    found = []
    for _ in range(8):
        with server.client() as client:
            found.append({card["id"] for card in client.get("/v1/models").json()["data"]} - {"tiny"})
    return found


def test_adapters_are_known_to_all(two: ServerProcess, folder: Path) -> None:
    assert names_known(two) == [{"a"}] * 8
    with concurrent.futures.ThreadPoolExecutor(12) as pool:  # several processes are asked for the same name at once
        loads = [
            pool.submit(ask, two, "/v1/load_lora_adapter", lora_name=name, lora_path=str(folder / name))
            for name in ("b", "c") * 6
        ]
        answers = [load.result() for load in loads]
    assert sorted(answer.status_code for answer in answers) == [200] * 2 + [400] * 10
    assert names_known(two) == [{"a", "b", "c"}] * 8
    assert all("already been loaded" in answer.text for answer in answers if answer.status_code == 400)
    body_of = {"prompt": "prompt 1", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    texts = [
        [ask(two, "/v1/completions", model=name, **body_of).json()["choices"][0]["text"] for name in ("tiny", "a", "b", "c")]
        for _ in range(3)
    ]
    assert texts[0] == texts[1] == texts[2] and len(set(texts[0])) == 4
    write_adapter(folder / "b", "another b")
    again = ask(two, "/v1/load_lora_adapter", lora_name="b", lora_path=str(folder / "b"), load_inplace=True)
    assert again.status_code == 200, again.text
    others = [ask(two, "/v1/completions", model="b", **body_of).json()["choices"][0]["text"] for _ in range(4)]
    assert len(set(others)) == 1 and others[0] not in texts[0]
    assert ask(two, "/v1/unload_lora_adapter", lora_name="a").status_code == 200 and names_known(two) == [{"b", "c"}] * 8
    assert ask(two, "/v1/unload_lora_adapter", lora_name="a").status_code == 404
    assert ask(two, "/v1/completions", model="a", **body_of).status_code == 404
    bad = ask(two, "/v1/load_lora_adapter", lora_name="x", lora_path=str(folder / "none"))
    assert bad.status_code == 400 and names_known(two) == [{"b", "c"}] * 8


def test_adapters_in_use_are_of_all(two: ServerProcess, folder: Path) -> None:
    """A process tells which adapters the requests of another one run with."""
    assert ask(two, "/v1/load_lora_adapter", lora_name="used", lora_path=str(folder / "c")).status_code == 200
    done, request = threading.Event(), body(200, True) | {"model": "used"}

    def info(client: httpx.Client) -> list[str]:
        return [line for line in client.get("/metrics").text.splitlines() if line.startswith("quire:lora_requests_info{")]

    def run(client: httpx.Client) -> None:
        while not done.is_set():
            assert read_stream(client, request)[-1] == "[DONE]"

    with contextlib.ExitStack() as stack, concurrent.futures.ThreadPoolExecutor(1) as pool:
        of: dict[int, httpx.Client] = {}  # a connection to each process
        for _ in range(200):
            if len(of) == 2:
                break
            before = {pid: sockets(pid) for pid in fronts(two)}
            client = stack.enter_context(two.client())
            assert len(info(client)) == 1
            risen = [pid for pid in fronts(two) if sockets(pid) > before[pid]]
            if len(risen) == 1:
                of.setdefault(risen[0], client)
        one, other = of.values()
        running = pool.submit(run, one)
        try:
            wait_for(lambda: running.done() or 'running_lora_adapters="used"' in info(other)[0])
        finally:
            done.set()
        running.result()
    assert ask(two, "/v1/unload_lora_adapter", lora_name="used").status_code == 200


def test_lost_processes(two: ServerProcess) -> None:
    """An API process costs its own connections, an engine nobody anything; counts go on."""
    victim, other = fronts(two)
    expected = fresh(two, 1)
    with two.client() as client:
        counted = metric(client, "quire:request_success_total")
    for _ in range(24):  # a process that is asked fetches the counts of the others: both are asked
        with two.client() as client:
            metric(client, "quire:request_success_total")
    os.kill(victim, signal.SIGKILL)
    wait_for(lambda: len(fronts(two)) == 2 and victim not in fronts(two))
    assert other in fronts(two) and fresh(two, 1) == expected
    assert names_known(two) == [{"b", "c"}] * 8  # what they have, not what was there at the start
    wait_for(lambda: two.log().count("ended with signal SIGKILL") == 1)
    engine = children(two.process.pid, "quire.engine.process")[0]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        streams = [pool.submit(fresh, two, 1) for _ in range(8)]
        os.kill(engine, signal.SIGKILL)
        assert all(stream.result() == expected for stream in streams)
    with two.client() as client:
        wait_for(lambda: metric(client, "quire:engine_restarts_total") == 1)
        assert metric(client, "quire:request_success_total") == counted + 9


def test_aborts_reach_all(serve_model: Path) -> None:
    """One answer ends the requests of every API process."""
    names = [f"one-of-{i}" for i in range(24)]
    with serving(serve_model, "-asc", "2", latency=0.5, QUIRE_SERVER_DEV_MODE="1") as server:
        begun: list[str] = []

        def ask_for(name: str) -> str:
            with server.client() as client:
                events = read_stream(client, body(200, True) | {"request_id": name}, lambda: begun.append(name))
            return events[-3]["choices"][0]["finish_reason"]

        server.url()
        idle = {pid: sockets(pid) for pid in fronts(server)}
        with concurrent.futures.ThreadPoolExecutor(24) as pool, server.client() as client:
            answers = [pool.submit(ask_for, name) for name in names]
            wait_for(lambda: len(begun) == 24)
            assert all(sockets(pid) > before for pid, before in idle.items())
            assert client.post("/abort_requests", json={"request_ids": ["absent"]}).json() == {"aborted": 0}
            assert client.post("/abort_requests", json={"request_ids": names}).json() == {"aborted": 24}
            assert [answer.result() for answer in answers] == ["abort"] * 24
            assert client.post("/abort_requests", json={"request_ids": names}).json() == {"aborted": 0}


def test_the_end(two: ServerProcess, serve_model: Path) -> None:
    """Streams finish first; nothing is left, of a killed hub either."""
    with two.client() as client, concurrent.futures.ThreadPoolExecutor() as pool:
        begun: list[bool] = []
        stream = pool.submit(read_stream, client, body(60, True), lambda: begun.append(True))
        wait_for(lambda: begun)
        everybody = [*fronts(two), *children(two.process.pid, "quire.engine.process")]
        two.signal()
        events = stream.result()
    assert events[-1] == "[DONE]" and events[-3]["choices"][0]["finish_reason"] == "length"
    assert two.wait() == 0
    assert not any(Path(f"/proc/{pid}").exists() for pid in everybody)
    with serving(serve_model, "-asc", "2") as server:
        server.url()
        everybody = [*fronts(server), *children(server.process.pid, "quire.engine.process")]
        server.signal(signal.SIGKILL)
        wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in everybody))
