import gzip
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
from raw_http import make_certificate, needs_openssl
from server_process import body, read_stream, serving, wait_for

from patience import PATIENCE
from quire.device.registry import describe
from quire.proc.fork_server import ForkServerProcess
from quire.types.errors import ConfigError


def run_line(*flags: str, module: str = "quire.cli.main") -> subprocess.CompletedProcess[str]:
    command = [*(["serve"] if module == "quire.cli.main" else []), *flags]
    return subprocess.run([sys.executable, "-m", module, *command], capture_output=True, text=True, timeout=PATIENCE)


@pytest.fixture(scope="module")
def commands() -> Iterator[ForkServerProcess]:
    """Forks `quire` with its imports done."""
    server = ForkServerProcess(("quire.cli.main", "quire.cli.serve", "quire.serve.launch"), {"HF_HUB_OFFLINE": "1"})
    wait_for(lambda: server.usable or server.closed)
    yield server
    server.close()


# ---- starting ------------------------------------------------------------------------------------------------------------


def test_a_port_in_use_is_told_at_once(serve_model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run_line(str(serve_model), "--port", str(port))
    assert done.returncode == 2
    [line] = [line for line in done.stderr.splitlines() if "importing torch" not in line]  # told where that takes long
    assert f"port {port} of 127.0.0.1 is in use" in line


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (["--host", "0.0.0.0"], 2, "can be reached from other machines, and there is no API key"),
        (["--host", "no-such-host.invalid"], 2, "--host no-such-host.invalid"),
        (["./nothing"], 1, "./nothing: no such file or directory"),
        (["nothing-here"], 1, "there is no directory 'nothing-here' here either"),
        (["--max-model-len", "9999999"], 2, "max_model_len"),
        (["--kv-cache-memory-bytes", "1000"], 2, "the cache got 1000 bytes"),  # told by the engine process
        (["--tool-call-parser", "hermis"], 2, "there is no parser 'hermis' for tool calls; did you mean 'hermes'?"),
        (["--tool-parser-plugin", "nowhere.py"], 2, "the parser plugin 'nowhere.py' is not a Python file"),
        (["--ssl-certfile", "x", "--ssl-keyfile", "y"], 2, "the TLS certificate or its key cannot be used"),
    ],
)
def test_start_up_errors_are_one_line(
    serve_model: Path, commands: ForkServerProcess, flags: list[str], code: int, message: str
) -> None:
    model = [str(serve_model)] if flags[0].startswith("-") else []
    line = [*model, "--port", "0", "--device", "cpu", "--distributed-executor-backend", "fake", *flags]
    inner, outer = os.pipe()
    process = commands.fork("quire.cli.main", ["serve", *line], [], outer)
    os.close(outer)
    with os.fdopen(inner) as output:
        log = output.read()
    *before, last = log.splitlines()
    assert (process.wait(PATIENCE), message in last) == (code, True), log
    assert all("INFO [quire.serve.launch] listening on" in line for line in before)
    assert model or not before, "a model that is not there is told before anybody listens"


def test_a_device_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"device=cuda requires a CUDA device; torch .* sees none"):
        describe("cuda")


def test_vllms_module_is_the_same_command(serve_model: Path) -> None:
    done = run_line("--model", str(serve_model), "--headless", module="quire.entrypoints.openai.api_server")
    assert done.returncode == 2
    assert done.stderr == (
        "quire serve: --headless is for machines 1 to nnodes - 1: give --nnodes and --node-rank; got 1 and 0; or for the "
        "engines of data_parallel_size from --data-parallel-start-rank on\n"
    )


def test_it_answers_while_it_loads(serve_model: Path) -> None:
    """The engine process sleeps before it is ready; the API process does not."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with (
        serving(serve_model, "--port", str(port)) as server,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE) as http,
    ):

        def answers() -> bool:
            try:
                return http.get("/livez").status_code == 200
            except httpx.TransportError:
                return False

        wait_for(answers)
        early = http.get("/readyz")
        refused = http.post("/v1/completions", json=body(1, False))
        assert early.status_code == 200 or (early.status_code, early.json()["reason"]) == (503, "the model is loading")
        if refused.status_code != 200:
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
            assert refused.json()["error"]["message"] == "the model is still loading"
        server.url()
        assert http.get("/readyz").status_code == 200
        assert http.post("/v1/completions", json=body(2, False)).json()["usage"]["completion_tokens"] == 2


def test_stopped_while_loading(serve_model: Path) -> None:
    with serving(serve_model) as server:
        time.sleep(1.2)
        server.signal()
        assert server.wait() in (0, -signal.SIGTERM)  # it may not have got as far as its own handler
        assert "Traceback" not in server.log()


def test_unix_socket(serve_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "s"
    with serving(serve_model, "--uds", str(path)) as server:
        assert server.url() == f"unix:{path}"
        assert run_line(str(serve_model), "--uds", str(path)).stderr.count("another server listens there") == 1
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://here", timeout=PATIENCE) as http:
            assert http.get("/readyz").status_code == 200
        server.signal()
        assert server.wait() == 0
    assert not path.exists()


def test_root_path_and_cors(serve_model: Path) -> None:
    flags = ["--root-path", "/llm", "--allowed-origins", '["https://a.example"]', "--api-key", "k"]
    with serving(serve_model, *flags) as server, server.client() as http:
        key = {"Authorization": "Bearer k"}
        for path in ("/v1/models", "/llm/v1/models", "/llm/readyz"):
            assert http.get(path, headers=key).status_code == 200
        assert http.get("/llm/livez").status_code == 200
        for path in ("/v1/completions", "/llm/v1/completions"):
            whole = http.post(path, headers=key, json=body(3, False))
            assert (whole.status_code, whole.json()["usage"]["completion_tokens"]) == (200, 3)
            assert http.post(path, headers=key, content=b"{").status_code == 400
            wrong = http.post(path, headers=key, json={"prompt": 5})
            assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "body.prompt")
            assert http.get(path, headers=key).status_code == 405
        ask = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
        allowed = http.options("/v1/completions", headers=ask)
        assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (200, "https://a.example")
        assert http.options("/v1/completions", headers={**ask, "Origin": "https://b.example"}).status_code == 400
        assert "access-control-allow-origin" in http.get("/v1/models", headers={**key, "Origin": "https://a.example"}).headers
        server.signal()
        assert server.wait() == 0
    assert '"GET /llm/v1/models HTTP/1.1" 200' in server.log()
    assert "livez" not in server.log() and "readyz" not in server.log()  # probes have no line


@needs_openssl
def test_tls(serve_model: Path, tmp_path: Path) -> None:
    key, certificate = make_certificate(tmp_path)
    with serving(serve_model, "--ssl-keyfile", str(key), "--ssl-certfile", str(certificate)) as server:
        assert server.url().startswith("https://127.0.0.1:")
        with server.client(verify=ssl.create_default_context(cafile=str(certificate))) as http:
            assert http.get("/readyz").status_code == 200


def test_traces_reach_the_collector(serve_model: Path) -> None:
    trace = "0af7651916cd43dd8448eb211c80319c"
    received: list[bytes] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers["content-length"]))
            received.append(gzip.decompress(content) if self.headers.get("content-encoding") == "gzip" else content)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Not here."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Collector) as collector:
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        flags = ["--otlp-traces-endpoint", f"http://127.0.0.1:{collector.server_port}/v1/traces"]
        environment = {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf", "OTEL_SERVICE_NAME": "my-service"}
        with serving(serve_model, *flags, **environment) as server, server.client() as http:
            headers = {"traceparent": f"00-{trace}-b7ad6b7169203331-01"}
            assert http.post("/v1/completions", json=body(3, False), headers=headers).status_code == 200
            server.signal()
            assert server.wait() == 0
        collector.shutdown()
    told = b"".join(received)
    for part in (b"llm_request", b"my-service", b"gen_ai.usage.completion_tokens", bytes.fromhex(trace)):
        assert part in told


def both_run(http: httpx.Client) -> bool:
    return 'quire:num_requests_running{engine="0",model_name="tiny"} 2.0' in http.get("/metrics").text


# ---- ending --------------------------------------------------------------------------------------------------------------


def test_sigterm_truncates_no_stream(serve_model: Path) -> None:
    tokens, streams = 120, 16
    with serving(serve_model, latency=0.02) as server, server.client() as http:
        begun = threading.Barrier(streams + 1)
        with ThreadPoolExecutor(streams) as pool:
            futures = [pool.submit(read_stream, http, body(tokens, True, f"prompt {i}"), begun.wait) for i in range(streams)]
            begun.wait(PATIENCE)
            server.signal()
            wait_for(lambda: http.get("/readyz").status_code == 503)
            assert http.get("/livez").status_code == 200
            refused = http.post("/v1/completions", json=body(4, False))
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
            assert refused.json()["error"] == {
                "message": "the server is shutting down", "type": "ServiceUnavailableError", "param": None, "code": 503,
            }  # fmt: skip
            for future in futures:
                events = future.result(PATIENCE)
                assert events[-1] == "[DONE]"
                assert events[-2]["usage"]["completion_tokens"] == tokens
                assert sum(len(choice["token_ids"]) for event in events[:-2] for choice in event["choices"]) == tokens
                assert events[-3]["choices"][0]["finish_reason"] == "length"
        assert server.wait() == 0
        assert "nothing is open" in server.log()


def test_the_deadline_ends_what_is_left(serve_model: Path) -> None:
    with serving(serve_model, "--shutdown-timeout", "0.5", latency=0.1) as server, server.client() as http:
        begun = threading.Event()
        with ThreadPoolExecutor(2) as pool:
            stream = pool.submit(read_stream, http, body(200, True), begun.set)
            whole = pool.submit(http.post, "/v1/completions", json=body(200, False))
            assert begun.wait(PATIENCE)
            wait_for(lambda: both_run(http))
            asked = time.monotonic()
            server.signal(signal.SIGINT)
            events, answer = stream.result(PATIENCE), whole.result(PATIENCE)
        assert events[-1] == "[DONE]"
        endings = [choice["finish_reason"] for event in events[:-1] for choice in event.get("choices", [])]
        assert endings[-1] == "abort" or "error" in events[-2]
        assert answer.status_code == 503
        assert answer.json()["error"]["message"] == "the server shut down before this request was done"
        assert server.wait() == 0
        assert time.monotonic() - asked > 0.4, "some time was left to them"
        assert "2 requests are ended" in server.log()


def test_a_second_signal_does_not_wait(serve_model: Path) -> None:
    with serving(serve_model, latency=0.1) as server, server.client() as http:
        begun = threading.Event()

        def cut() -> int:
            """How many events came before the end, told or not."""
            try:
                return len(read_stream(http, body(200, True), begun.set))
            except httpx.TransportError:
                return 0

        with ThreadPoolExecutor(1) as pool:
            stream = pool.submit(cut)
            assert begun.wait(PATIENCE)
            engine = server.engine_pid()
            server.signal()
            wait_for(lambda: "shutting down" in server.log())
            server.signal()
            assert server.wait() == 128 + signal.SIGTERM
            assert stream.result(PATIENCE) < 100
        assert not Path(f"/proc/{engine}").exists()
        assert "Traceback" not in server.log()


def test_when_the_engine_is_given_up(serve_model: Path) -> None:
    with serving(serve_model, "--max-engine-restarts", "0", latency=0.05) as server, server.client() as http:
        begun = threading.Event()
        with ThreadPoolExecutor(2) as pool:
            stream = pool.submit(read_stream, http, body(200, True), begun.set)
            whole = pool.submit(http.post, "/v1/completions", json=body(200, False))
            assert begun.wait(PATIENCE)
            wait_for(lambda: both_run(http))
            subprocess.run(["kill", "-9", str(server.engine_pid())], check=True)
            events, answer = stream.result(PATIENCE), whole.result(PATIENCE)
        assert events[-1] == "[DONE]"
        assert events[-2]["error"]["code"] == 500
        assert answer.status_code == 500
        assert "engine" in answer.json()["error"]["message"]
        assert server.wait() == 1
        assert "the engine is dead" in server.log()


def test_log_lines(serve_model: Path) -> None:
    flags = ["--enable-log-requests", "--enable-log-outputs", "--max-log-len", "8"]
    flags += ["--disable-access-log-for-endpoints", "/livez,/version"]
    environment = {"QUIRE_LOG_STATS_INTERVAL": "0.3", "QUIRE_LOGGING_LEVEL": "debug"}
    with serving(serve_model, *flags, **environment) as server, server.client() as http:
        for path in ("/livez", "/version?x=1", "/health"):
            http.get(path)
        assert http.post("/v1/completions", json=body(20, False, "one\nFAKE LINE two")).status_code == 200
        wait_for(lambda: "Avg generation throughput" in server.log() and "Generated response" in server.log())
        server.signal()
        assert server.wait() == 0
    for line in server.lines:
        assert line[:10].count("-") == 2 or line.startswith("(engine"), line
    log = server.log()
    assert "GET /health" in log
    assert "/livez" not in log
    assert "/version" not in log
    assert "Received request cmpl-" in log
    assert "prompt: 'one\\nFAKE'" in log
    assert json.dumps("FAKE LINE two") not in log
    assert "Engine 000: Avg prompt throughput" in log


def test_a_sample_is_answered_when_it_is_ready(serve_model: Path) -> None:
    line = [sys.executable, "-m", "quire.cli.main", "serve", str(serve_model), "--port", "0", "--sample", "hi there"]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "> hi there\n"
        assert process.stdout.readline().strip()
        process.terminate()
        assert process.wait(PATIENCE) == 0
    finally:
        process.kill()
        process.communicate()
