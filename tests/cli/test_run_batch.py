"""`quire run-batch`: files and URLs, errors of lines, resuming after kill -9, a full disk, and exit codes."""

import http.server
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from patience import PATIENCE, wait_for
from quick_engines import quick_engines
from quire.cli.main import main
from tiny_model import make_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("run_batch"))


def arguments(model: Path, source: object, target: object, *flags: str) -> list[str]:
    line = ["run-batch", str(model), "--served-model-name", "tiny", "-i", str(source), "-o", str(target)]
    return [*line, "--device", "cpu", "--kv-cache-memory-bytes", "4m", "--max-num-seqs", "8", *flags]


def request(name: str, tokens: int = 2, url: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    content = {"prompt": "a page", "max_tokens": tokens, "ignore_eos": True} if url == "/v1/completions" else {}
    return {"custom_id": name, "method": "POST", "url": url, "body": {"model": "tiny"} | content | body}


def write(path: Path, lines: list[Any]) -> Path:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_line_has_an_answer(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    messages = [{"role": "user", "content": "漢字 ☃"}]
    lines = [
        request("chat", url="/v1/chat/completions", messages=messages, max_tokens=3),
        request("response", url="/v1/responses", input="a", max_output_tokens=3),
        request("text", 3),
        request("embedding", url="/v1/embeddings", input="a"),
        request("audio", url="/v1/audio/transcriptions"),
        request("model", model="gpt-9"),
        request("hot", temperature=3),
        "{not json", "",
        request("text"),
    ]  # fmt: skip
    source, target = write(tmp_path / "in", lines), tmp_path / "out"
    with quick_engines():
        assert main(arguments(model, source, target)) == 3
    found = {line["custom_id"]: line for line in read(target) if line["error"] is None}
    codes = {name: line["response"]["status_code"] for name, line in found.items()}
    assert codes == {"chat": 200, "response": 200, "text": 200, "embedding": 400, "audio": 404, "model": 404, "hot": 400}
    assert found["chat"]["response"]["body"]["object"] == "chat.completion"
    assert found["response"]["response"]["body"]["object"] == "response"
    assert found["text"]["response"]["body"]["usage"]["completion_tokens"] == 3
    assert found["hot"]["response"]["body"]["error"]["param"] == "temperature"
    errors = sorted((line["error"]["line"], line["error"]["code"]) for line in read(target) if line["error"])
    assert errors == [(8, "invalid_json"), (10, "duplicate_custom_id")]
    assert "9 lines: 3 answered, 6 failed" in capsys.readouterr().err
    assert main(arguments(model, source, target)) == 2
    assert "exists. Add --resume to go on with it" in capsys.readouterr().err
    before = target.read_bytes()
    with target.open("ab") as file:
        file.write(b'{"id":"half')
    with quick_engines():
        assert main(arguments(model, source, target, "--resume")) == 3
    assert target.read_bytes() == before and "(9 of them by earlier runs)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["-i", "absent.jsonl"], "--input-file absent.jsonl does not exist"),
        (["-i", "."], "--input-file . is a folder"),
        (["-o", "."], "--output-file . is a folder"),
        (["-o", "absent/out"], "the folder absent does not exist"),
        (["-o", "in.jsonl", "--resume"], "is the input file"),
        (["-o", "http://localhost:1/out", "--resume"], "--resume requires a local output file"),
        (["--concurrency", "0"], "--concurrency must be at least 1"),
        (["-i", ""], "--input-file is missing"),
        (["-i", "http://127.0.0.1:1/x"], "cannot be fetched"),
        (["-o", "other.txt", "--resume"], "other.txt line 1 is not the output of a batch"),
    ],
)
def test_wrong_use(
    model: Path,
    tmp_path: Path,
    flags: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "in.jsonl", [request("a")])
    (tmp_path / "other.txt").write_text("my thesis\n")
    assert main([*arguments(model, "in.jsonl", "out.jsonl"), *flags]) == 2
    assert message in capsys.readouterr().err
    assert (tmp_path / "other.txt").read_text() == "my thesis\n"


def start(model: Path, source: Path, target: Path, *flags: str, **options: Any) -> "subprocess.Popen[str]":
    line = [sys.executable, "-m", "quire.cli.main", *arguments(model, source, target, *flags)]
    environment = {**os.environ, "QUIRE_FAKE_LATENCY": "0.02", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*line, "--distributed-executor-backend", "fake"], stderr=subprocess.PIPE, text=True, env=environment, **options
    )


def test_a_killed_run_goes_on_and_answers_every_line_once(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    count = 500
    source, target = write(tmp_path / "in", [request(str(i), 8) for i in range(count)]), tmp_path / "out"
    for kill in range(3):
        process = start(model, source, target, "--resume")
        wait_for(lambda: target.exists() and target.read_bytes().count(b"\n") > 50 * (kill + 1))  # noqa: B023
        if not kill:
            assert main(arguments(model, source, target, "--resume")) == 2
            assert "is being written by another run" in capsys.readouterr().err
        process.kill()
        process.communicate(timeout=PATIENCE)
    assert 0 < target.read_bytes().count(b"\n") < count
    process = start(model, source, target, "--resume")
    _, log = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, log
    assert Counter(line["custom_id"] for line in read(target)) == {str(i): 1 for i in range(count)}


def test_ctrl_c_leaves_a_file_that_can_be_resumed(model: Path, tmp_path: Path) -> None:
    source, target = write(tmp_path / "in", [request(str(i), 8) for i in range(500)]), tmp_path / "out"
    process = start(model, source, target)
    wait_for(lambda: target.exists() and target.stat().st_size)
    process.send_signal(signal.SIGINT)
    _, log = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130 and "interrupted" in log and "--resume goes on after them" in log, log
    assert 0 < len(read(target)) < 500


def test_a_full_disk_ends_the_run_with_whole_lines(model: Path, tmp_path: Path) -> None:
    source, target = write(tmp_path / "in", [request(str(i)) for i in range(100)]), tmp_path / "out"
    limit = 20_000  # bytes of a file
    process = start(model, source, target, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)))
    _, log = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1, log
    assert "the output file cannot be written: File too large" in log and "--resume goes on after them" in log
    assert 0 < len(read(target)) < 100 and target.stat().st_size <= limit


@pytest.fixture
def web() -> Iterator[tuple[str, dict[str, bytes]]]:
    """A web server that has what is put there."""
    files: dict[str, bytes] = {}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path in files else 404)
            self.end_headers()
            self.wfile.write(files.get(self.path, b""))

        def do_PUT(self) -> None:
            files[self.path] = self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", files
        server.shutdown()
        thread.join()


def test_input_and_output_over_http(model: Path, tmp_path: Path, web: tuple[str, dict[str, bytes]]) -> None:
    url, files = web
    files["/in"] = "\n".join(json.dumps(request(str(i))) for i in range(3)).encode()
    with quick_engines():
        assert main(arguments(model, f"{url}/in", f"{url}/out?signature=x", "--output-tmp-dir", str(tmp_path))) == 0
    assert sorted(json.loads(line)["custom_id"] for line in files["/out?signature=x"].splitlines()) == ["0", "1", "2"]
    assert not list(tmp_path.iterdir())
