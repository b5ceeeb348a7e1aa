"""/engine/events through a whole server: what viewers see, what they must not see, and what becomes of them."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time

import httpx
import pytest
from feed_viewer import watching
from server_process import body, serving, wait_for

from patience import PATIENCE
from quire.types.engine_snapshot import PARTS, STEP_COLUMNS

KEYS = ("first-key", "second-key")
LEAST = 1e-4  # seconds: what rounding may do to a sum of parts


@pytest.fixture(scope="module")
def served(serve_model):
    with serving(serve_model, "--max-num-seqs", "3", latency=0.01) as server:
        server.url()
        yield server


@pytest.fixture(scope="module")
def shared(serve_model):
    """By two keys."""
    flags = [flag for key in KEYS for flag in ("--api-key", key)]
    with serving(serve_model, "--max-num-seqs", "4", *flags, latency=0.01) as server:
        server.url()
        yield server


def ask_at_once(client, bodies, headers=None):
    answers = [None] * len(bodies)

    def ask(i):
        answers[i] = client.post("/v1/completions", json=bodies[i], headers=headers)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def metric(client, name, **labels):
    wanted = [f'{label}="{value}"' for label, value in labels.items()]
    lines = [line for line in client.get("/metrics").text.splitlines() if line.startswith(f"quire:{name}{{")]
    return sum(float(line.rpartition(" ")[2]) for line in lines if all(label in line for label in wanted))


def total(request):
    return sum(request["parts"].values())


def test_events_agree_with_metrics(served):
    with served.client() as client, watching(served.url()) as viewer:
        answers = ask_at_once(client, [body(5 + i, False) for i in range(8)])
        viewer.finished(8)
        stats = viewer.settled()
        hello = viewer.of("hello")[0]
        assert hello["version"] == 1 and hello["model"] == "tiny" and hello["max_seqs"] == 3 and not hello["keys"]
        assert stats["prompt_tokens"] == metric(client, "prompt_tokens_total") > 0
        assert stats["cached_tokens"] == metric(client, "prompt_tokens_cached_total")
        assert stats["generated_tokens"] == metric(client, "generation_tokens_total") > 0
        assert stats["finished"]["length"] == metric(client, "request_success_total", finished_reason="length")
        for name, metric_name in (("ttft", "time_to_first_token_seconds"), ("itl", "inter_token_latency_seconds")):
            bounds = hello[f"{name}_bounds"]
            for i, bound in enumerate(bounds):
                assert sum(stats[name][: i + 1]) == metric(client, f"{metric_name}_bucket", le=repr(float(bound)))
            assert len(stats[name]) == len(bounds) + 1 and sum(stats[name]) == metric(client, f"{metric_name}_count")
            assert stats[f"{name}_sum"] == pytest.approx(metric(client, f"{metric_name}_sum"))
        used = viewer.of("pages")[-1]["used"]
        assert used == 0 == metric(client, "kv_cache_usage_perc")
        told = {request["id"]: request for request in viewer.requests("finished")}
        for answer in answers:
            usage, request = answer.json()["usage"], told[answer.json()["id"]]
            assert (request["prompt"], request["drawn"]) == (usage["prompt_tokens"], usage["completion_tokens"])
            assert request["reason"] == "length" and request["index"] == 0 and request["choice"] == 0


def test_the_batch_is_told_step_by_step(served):
    with served.client() as client, watching(served.url()) as viewer:
        answers = ask_at_once(client, [body(40, False) for _ in range(5)])
        viewer.finished(5)
        steps = [dict(zip(STEP_COLUMNS, step, strict=True)) for event in viewer.of("step") for step in event["steps"]]
        assert not any(event["skipped"] for event in viewer.of("step"))
        numbers = [step["step"] for step in steps]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        assert sum(step["drawn"] for step in steps) == sum(a.json()["usage"]["completion_tokens"] for a in answers) == 200
        prompts = sum(request["prompt"] - request["cached"] for request in viewer.requests("finished"))
        assert 0 < sum(step["prompt"] for step in steps) <= prompts
        assert all(step["rows"] <= 3 and step["ms"] > 0 for step in steps)
        running = [event for event in viewer.of("step") if event["keys"]]
        assert running and max(len(event["keys"]) for event in running) == 3
        assert max(event["waiting"] for event in viewer.of("step")) >= 1
        keys = {request["key"] for request in viewer.requests("finished")}
        for event in running:
            assert set(event["keys"]) <= keys and len(event["row"]) == len(event["computed"]) == len(event["drawn"])
        assert any("o" in event["cells"].lower() for event in viewer.of("pages"))
        assert viewer.numbers == list(range(1, len(viewer.numbers) + 1))


def test_the_parts_of_a_request_add_up_to_its_time(served):
    with served.client() as client, watching(served.url()) as viewer:
        before = metric(client, "e2e_request_latency_seconds_sum")
        many = [body(30, False, prompt=f"{i} " * (5 + 20 * (i % 3))) for i in range(7)]
        stop = body(60, False) | {"ignore_eos": False, "stop": ["a", "e", "t", "\n"]}
        ask_at_once(client, [*many, stop, body(10, False) | {"n": 2, "temperature": 1.0}])
        finished = viewer.finished(10)
        assert len(finished) == 10
        for request in finished:
            assert set(request["parts"]) <= set(PARTS) and min(request["parts"].values()) > 0
            assert total(request) == pytest.approx(request["wall"], abs=LEAST)
        assert any(request["parts"].get("queue", 0) > 0.05 for request in finished), "three at a time: some wait"
        alone = [request for request in finished if request["choice"] == 0]
        both = [r for r in finished if [other["id"] for other in finished].count(r["id"]) == 2]
        walls = sum(request["wall"] for request in alone if request not in both) + max(r["wall"] for r in both)
        assert walls == pytest.approx(metric(client, "e2e_request_latency_seconds_sum") - before, rel=0.05)
        assert {request["reason"] for request in finished} <= {"length", "stop"}


def test_a_grammar_has_its_own_time(served):
    pytest.importorskip("llguidance")
    schema = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}}, "required": ["name"]}
    with served.client() as client, watching(served.url()) as viewer:
        asked = body(40, False) | {"ignore_eos": False, "structured_outputs": {"json": schema}}
        assert client.post("/v1/completions", json=asked).status_code == 200
        [request] = viewer.finished(1)
        assert request["grammar"] and request["parts"]["grammar"] > 0
        assert total(request) == pytest.approx(request["wall"], abs=LEAST)
        steps = [dict(zip(STEP_COLUMNS, step, strict=True)) for event in viewer.of("step") for step in event["steps"]]
        assert sum(step["masked"] for step in steps) > 0


def test_who_leaves_early_is_told_as_such(served):
    with served.client() as client, watching(served.url()) as viewer:
        with client.stream("POST", "/v1/completions", json=body(200, True)) as answer:
            next(answer.iter_bytes())
        [request] = viewer.finished(1)
        assert request["reason"] == "abort" and total(request) == pytest.approx(request["wall"], abs=LEAST)


def test_a_request_that_ran_before_anybody_looked(served):
    with served.client() as client:
        time.sleep(1.0)  # until the engine knows that the earlier viewers have left
        thread = threading.Thread(target=client.post, args=("/v1/completions",), kwargs={"json": body(220, False)})
        thread.start()
        wait_for(lambda: metric(client, "num_requests_running"))
        time.sleep(0.3)
        with watching(served.url()) as viewer:
            thread.join()
            [request] = viewer.finished(1)
        assert request["parts"]["unseen"] > 0.2 and "prepare" not in request["parts"]
        assert total(request) == pytest.approx(request["wall"], abs=LEAST)


def test_two_keys_see_only_their_own(shared):
    secrets = ["zebra", "walrus"]
    headers = [{"Authorization": f"Bearer {key}"} for key in KEYS]
    with shared.client() as client, watching(shared.url(), KEYS[0]) as first, watching(shared.url(), KEYS[1]) as second:
        answers = [[], []]

        def load(i):
            bodies = [body(40 + 7 * i, False, prompt=f"{secrets[i]} " * (10 + 3 * i)) for _ in range(4)]
            answers[i] = ask_at_once(client, bodies, headers[i])

        threads = [threading.Thread(target=load, args=(i,)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for viewer, mine, others in ((first, answers[0], answers[1]), (second, answers[1], answers[0])):
            finished = viewer.finished(4)
            assert {request["id"] for request in finished} == {answer.json()["id"] for answer in mine}
            keys = {request["key"] for request in finished}
            assert all(set(event["keys"]) <= keys for event in viewer.of("step"))
            assert any(event["running"] > event["own_running"] for event in viewer.of("step"))
            assert viewer.of("hello")[0]["keys"] is True
            raw = viewer.raw.decode()
            for answer in others:
                assert answer.json()["id"] not in raw
            for answer in [*mine, *others]:
                assert answer.json()["choices"][0]["text"] not in raw
            assert not any(secret in raw for secret in (*secrets, *KEYS)), "nobody's text, nobody's key"
            sizes = {answer.json()["usage"]["prompt_tokens"] for answer in mine}
            assert {request["prompt"] for event in viewer.of("requests") for request in event["requests"]} == sizes
            cells = "".join(event["cells"] for event in viewer.of("pages"))
            assert "o" in cells.lower() and "x" in cells.lower()
        tenants = re.findall(r"[0-9a-f]{32}(?![0-9a-f])", first.raw.decode())
        assert not {name for name in tenants if f"cmpl-{name}" not in first.raw.decode()}
        assert client.get("/engine/events").status_code == 401
        late = client.stream("GET", "/engine/events", headers=headers[1])
        with late as answer:
            told = next(answer.iter_bytes()).decode()
            assert all(answer.json()["id"] not in told for answer in answers[0])


def test_a_lost_engine_is_told_and_the_feed_goes_on(serve_model):
    with serving(serve_model, latency=0.02) as server, server.client() as client, watching(server.url()) as viewer:
        answers = []
        thread = threading.Thread(target=lambda: answers.append(client.post("/v1/completions", json=body(150, False))))
        thread.start()
        wait_for(lambda: any(event["drawn"] and event["drawn"][0] > 10 for event in viewer.of("step")))
        os.kill(server.engine_pid(), signal.SIGKILL)
        thread.join()
        [request] = viewer.finished(1)
        assert answers[0].json()["usage"]["completion_tokens"] == 150 == request["drawn"]
        states = [event["state"] for event in viewer.of("engine")]
        assert states == ["restarting", "ready"]
        assert viewer.of("engine")[-1]["restarts"] == 1 == viewer.of("engine")[-1]["replayed"]
        assert "SIGKILL" in viewer.of("engine")[-1]["reason"]
        assert viewer.requests("restart")[0]["id"] == request["id"] == answers[0].json()["id"]
        assert request["parts"]["restart"] > 0.1 and request["parts"]["decode"] > 0.2
        assert total(request) == pytest.approx(request["wall"], abs=LEAST)
        client.post("/v1/completions", json=body(5, False))
        viewer.finished(2)


def test_a_server_that_ends_says_so(serve_model):
    with serving(serve_model) as server, watching(server.url()) as viewer:
        server.signal()
        assert server.wait() == 0
        wait_for(lambda: viewer.ended)
        assert viewer.events[-1][0] == "bye"


def test_it_can_be_turned_off(serve_model):
    with serving(serve_model, "--disable-page") as server, server.client() as client:
        assert client.get("/engine/events").status_code == 404 == client.get("/").status_code
        assert "browser" not in server.log()


def test_the_page_is_opened_and_its_address_is_told_last(serve_model, tmp_path):
    browser, opened = tmp_path / "browser", tmp_path / "opened"
    browser.write_text(f'#!/bin/sh\necho "$1" > {opened}\n')
    browser.chmod(0o755)
    line = [sys.executable, "-m", "quire.cli.main", "serve", str(serve_model), "--port", "0", "--open", "--sample", "hello"]
    line += ["--distributed-executor-backend", "fake"]
    environment = {**os.environ, "BROWSER": str(browser), "OMP_NUM_THREADS": "1"}
    server = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment)
    try:
        assert server.stdout is not None
        printed = []
        while not printed or not printed[-1].startswith("Open "):
            printed.append(server.stdout.readline())
            assert printed[-1], printed
        assert printed[0] == "> hello\n"
        [url] = re.findall(r"Open (http://127\.0\.0\.1:\d+/) in a browser", printed[-1])
        wait_for(opened.exists)
        wait_for(lambda: opened.read_text().strip() == url)
        assert httpx.get(url, timeout=PATIENCE).status_code == 200
    finally:
        server.kill()
        server.communicate()


def test_quire_top_in_a_pipe(served):
    line = [sys.executable, "-m", "quire.cli.main", "top", served.url()]
    top = subprocess.Popen(line, stdout=subprocess.PIPE, text=True)
    lines: list[str] = []
    assert top.stdout is not None
    reader = threading.Thread(target=lambda: lines.extend(top.stdout or ()), daemon=True)
    reader.start()
    try:
        wait_for(lambda: any("running 0" in each for each in lines))
        with served.client() as client:
            name = client.post("/v1/completions", json=body(20, False)).json()["id"]
        wait_for(lambda: any(f"finished {name} length" in each for each in lines))
        [told] = [each for each in lines if name in each]
        wall = float(re.search(r"in (\d+\.\d+) s", told)[1])
        assert sum(map(float, re.findall(r"[a-z]+ (\d+\.\d+)", told.partition(" = ")[2]))) == pytest.approx(wall, abs=0.01)
        assert not any("\x1b" in each for each in lines)
    finally:
        top.send_signal(signal.SIGINT)
        assert top.wait(PATIENCE) == 0
        reader.join()
        top.stdout.close()


def latest_picture(screen):
    """The last whole one, in lines; the terminal adds returns of its own."""
    picture = screen.split("\x1b[H")[-2].replace("\x1b[K", "").replace("\x1b[J", "")
    return picture.replace("\r", "").split("\n")


def test_quire_top_in_a_terminal(served):
    pty = pytest.importorskip("pty")
    import fcntl
    import struct
    import termios

    main, other = pty.openpty()
    fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", 20, 90, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    line = [sys.executable, "-m", "quire.cli.main", "top", served.url()]
    top = subprocess.Popen(line, stdin=other, stdout=other, env=environment)
    os.close(other)
    screens: list[str] = [""]

    def read() -> None:
        with contextlib.suppress(OSError):
            while piece := os.read(main, 1 << 16):
                screens[0] += piece.decode(errors="replace")

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        wait_for(lambda: "tiny on cpu" in screens[0] and "pages: " in screens[0])
        with served.client() as client:
            name = client.post("/v1/completions", json=body(60, False)).json()["id"]
        wait_for(lambda: name[:30] in screens[0])
        picture = latest_picture(screens[0])
        assert len(picture) <= 20 and max(map(len, picture)) <= 90
        fcntl.ioctl(main, termios.TIOCSWINSZ, struct.pack("HHHH", 8, 40, 0, 0))
        seen = len(screens[0])
        wait_for(lambda: screens[0][seen:].count("\x1b[H") > 4)
        picture = latest_picture(screens[0])
        assert len(picture) <= 8 and max(map(len, picture)) <= 40
        os.write(main, b"q")
        assert top.wait(PATIENCE) == 0
        wait_for(lambda: "\x1b[?1049l" in screens[0])
    finally:
        top.kill()
        top.wait()
        os.close(main)


def test_quire_top_says_what_it_lacks(shared):
    line = [sys.executable, "-m", "quire.cli.main", "top", shared.url()]
    refused = subprocess.run(line, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert refused.returncode == 2 and "--api-key" in refused.stderr and "Traceback" not in refused.stderr
