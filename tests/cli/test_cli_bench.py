import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fake_openai import Answer, FakeOpenAI
from patience import PATIENCE
from quire.bench.machine import commit, without_secrets
from quire.cli.bench_serve import KEYS
from quire.cli.main import main


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in KEYS:
        monkeypatch.delenv(name, raising=False)


def bench(server: FakeOpenAI, *flags: str) -> int:
    small = ["--random-input-len", "5", "--random-output-len", "3"]
    return main(["bench", "serve", "--base-url", server.url, "--num-prompts", "6", "--disable-tqdm", *small, *flags])


def test_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    with FakeOpenAI(lambda *_: Answer(gap=0.01)) as server:
        assert (
            bench(server, "--goodput", "ttft:5000", "--metric-percentiles", "50,99.9", "--percentile-metrics", "ttft,itl") == 0
        )
    out, err = capsys.readouterr()
    assert err == f"6 requests (random), all at once, to /v1/completions of {server.url}\n"
    rows = dict(line.rsplit(maxsplit=1) for line in out.splitlines() if ":" in line)
    assert rows["Successful requests:"] == "6"
    assert rows["Total input tokens:"] == "30"
    assert rows["Total generated tokens:"] == "18"
    assert float(rows["Request goodput (req/s):"]) == float(rows["Request throughput (req/s):"]) > 0
    assert "mean     median        std      P99.9" in out
    assert "ITL (ms)" in out
    assert "E2EL" not in out


def test_a_saved_result(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "deep" / "run.json"
    line = ["quire", "bench", "serve", "--api-key", "hush", "--header", "x-a=hush", "--save-result"]
    monkeypatch.setattr(sys, "argv", line)
    with FakeOpenAI(key="hush") as server:
        flags = ["--api-key", "hush", "--header", "x-a=hush", "--save-detailed", "--metadata", "gpu=H200", "--ignore-eos"]
        assert bench(server, "--save-result", str(path), "--max-concurrency", "2", "--temperature", "0", *flags) == 0
    assert f"saved: {path}" in capsys.readouterr().out
    text = path.read_text()
    result = json.loads(text)
    assert "hush" not in text
    assert result["command"] == "quire bench serve --api-key ... --header ... --save-result"
    assert (result["completed"], result["failed"], result["total_output_tokens"]) == (6, 0, 18)
    assert (result["request_rate"], result["max_concurrency"], result["model_id"], result["gpu"]) == ("inf", 2, "fake", "H200")
    assert result["flags"]["temperature"] == 0.0
    assert result["server_version"] == "1.2.3"
    assert {"p99_ttft_ms", "median_itl_ms", "std_tpot_ms", "mean_e2el_ms", "date", "commit", "quire_version"} <= set(result)
    assert result["generated_texts"] == [" la la la"] * 6
    assert [len(itls) for itls in result["itls"]] == [2] * 6
    assert result["start_times"] == sorted(result["start_times"])
    assert {seen.body["ignore_eos"] for seen in server.generated} == {True}


def test_a_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "p.json"
    with FakeOpenAI(traces=["/tmp/traces/a", "/tmp/traces/b"]) as server:
        assert bench(server, "--profile", "--num-warmups", "2", "--save-result", str(path)) == 0
        asked = [seen.path.rpartition("/")[2] for seen in server.requests if seen.path.endswith(("_profile", "completions"))]
    assert asked == ["completions"] * 2 + ["start_profile"] + ["completions"] * 6 + ["stop_profile"]
    out = capsys.readouterr().out
    assert "profile: /tmp/traces/a\nprofile: /tmp/traces/b" in out and "note: the server was profiled" in out
    assert json.loads(path.read_text())["traces"] == ["/tmp/traces/a", "/tmp/traces/b"]
    with FakeOpenAI() as server:
        assert bench(server, "--profile") == 1
        assert not server.generated
    assert "HTTP 404: Not Found. --profile requires a server with a profiler" in capsys.readouterr().err


def test_names_of_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with FakeOpenAI(models=["org/tiny"]) as server:
        assert bench(server, "--save-result", "--request-rate", "500") == 0
        assert bench(server, "--result-dir", "d", "--result-filename", "x.json") == 0
        assert bench(server, "--save-result", "a.json", "--result-filename", "b.json") == 2
    (named,) = tmp_path.glob("*.json")
    assert named.name.startswith("openai-500qps-tiny-")
    assert (tmp_path / "d" / "x.json").exists()


def test_comparing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "then.json"
    with FakeOpenAI(lambda *_: Answer(first=0.02)) as server:
        assert bench(server, "--save-result", str(path)) == 0
        then = json.loads(path.read_text())
        then["mean_ttft_ms"] = then["duration"] = 1.0
        path.write_text(json.dumps(then))
        capsys.readouterr()
        assert bench(server, "--compare", str(path), "--max-concurrency", "3") == 0
        out = capsys.readouterr().out
        assert bench(server, "--compare", str(tmp_path / "nothing.json")) == 2
        path.write_text('{"a": 1}')
        assert bench(server, "--compare", str(path)) == 2
    (row,) = [line.split() for line in out.splitlines() if line.startswith("mean_ttft_ms")]
    assert row[2] == "1.00"
    assert float(row[3]) == pytest.approx(float(row[1]), abs=0.01)
    assert float(row[1]) >= 19
    assert "differs: max_concurrency is 3, was None" in out
    assert "differs: base_url" not in out


def test_nothing_succeeded(capsys: pytest.CaptureFixture[str]) -> None:
    with FakeOpenAI(lambda *_: Answer(status=503, error={"error": {"message": "draining"}})) as server:
        assert bench(server) == 1
    out = capsys.readouterr().out
    assert "failed: 6 x HTTP 503: draining" in out
    assert "TTFT (ms)                  -" in out


def test_some_failed(capsys: pytest.CaptureFixture[str]) -> None:
    with FakeOpenAI(lambda _, index: Answer(cut_after=1) if index == 2 else Answer()) as server:
        assert bench(server) == 0
    assert "failed: 1 x the stream was cut after 1 tokens" in capsys.readouterr().out


def test_nobody_there(capsys: pytest.CaptureFixture[str]) -> None:
    with FakeOpenAI() as server:
        pass
    assert bench(server) == 1
    assert "no server answers at" in capsys.readouterr().err


def test_chat_and_endpoints(capsys: pytest.CaptureFixture[str]) -> None:
    with FakeOpenAI() as server:
        assert bench(server, "--backend", "openai-chat") == 0
        assert bench(server, "--endpoint", "/v1/chat/completions") == 0
        assert bench(server, "--backend", "vllm") == 0
        assert bench(server, "--backend", "openai", "--endpoint", "/v1/chat/completions") == 2
    assert [seen.path for seen in server.generated[::6]] == ["/v1/chat/completions"] * 2 + ["/v1/completions"]
    assert "does not match" in capsys.readouterr().err


def test_extra_body_wins(capsys: pytest.CaptureFixture[str]) -> None:
    with FakeOpenAI() as server:
        assert bench(server, "--top-p", "0.5", "--extra-body", '{"top_p": 0.9, "seed": 3}') == 0
    assert {(seen.body["top_p"], seen.body["seed"]) for seen in server.generated} == {(0.9, 3)}
    capsys.readouterr()


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--port", "99"], "drop --host and --port"),
        (["--extra-body", "[]"], "not a JSON object"),
        (["--extra-body", "{"], "not JSON"),
        (["--header", "novalue"], "NAME=VALUE"),
        (["--metadata", "novalue"], "NAME=VALUE"),
        (["--goodput", "itl:3"], "METRIC:MILLISECONDS"),
        (["--custom-output-len", "3"], "--custom-output-len does not belong to --dataset-name random"),
        (["--request-timeout", "0"], "request-timeout"),
        (["--burstiness", "2"], "needs --request-rate"),
        (["--extra-body", "[" * 100_000], "--extra-body is not JSON: it is nested too deeply"),
        (["--random-input-len", "99999999999999999999"], "--random-input-len must be at most 16777216, got"),
        (["--random-output-len", "99999999999999999999"], "--random-output-len must be at most 16777216, got"),
        (["--num-prompts", "99999999999999999999"], "--num-prompts must be at most 100000000, got"),
        (["--num-warmups", "99999999999999999999"], "--num-warmups must be at most 100000000, got"),
        (["--base-url", "http://[::1"], "--base-url 'http://[::1' is not like http://127.0.0.1:8000"),
        (["--seed", "-1"], "--seed must be at least 0, got -1"),
    ],
)
def test_wrong_flags_are_told_before_anything_is_sent(flags: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with FakeOpenAI() as server:
        assert bench(server, *flags) == 2
    assert server.requests == []
    err = capsys.readouterr().err
    assert told in err
    assert err.count("\n") == 1


DEEP = "[" * 100_000
LINE = '{"timestamp": %s, "input_length": %s, "output_length": 1}'


@pytest.mark.parametrize(
    ("dataset", "text", "told"),
    [
        ("sharegpt", DEEP, "data is not JSON: it is nested too deeply"),
        ("custom", DEEP, "data line 1 is not JSON: it is nested too deeply"),
        ("custom", '{"prompt": [1, 99999999999]}', "data line 1: prompt must have token ids from 0 to 2147483647"),
        ("custom", '{"prompt": "a", "output_tokens": 1%s}' % ("0" * 400), "data line 1: output_tokens is 1000"),
        ("timed_trace", DEEP, "data line 1 is not JSON: it is nested too deeply"),
        ("timed_trace", LINE % (0, "1e308"), "data line 1: input_length is 1e+308; no request has more than 16777216 tokens"),
        (
            "timed_trace",
            LINE % ("NaN", 1),
            "data line 1: timestamp must be a number from 0 to 1e+16, in units of 0.001 seconds",
        ),
        ("timed_trace", LINE % ("1" + "0" * 400, 1), "data line 1: timestamp must be a number from 0 to 1e+16"),
    ],
)
def test_wrong_data_is_told_in_a_line(
    dataset: str, text: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "data"
    path.write_text(text)
    with FakeOpenAI() as server:
        flags = ["--num-prompts", "2", "--disable-tqdm", "--dataset-name", dataset, "--dataset-path", str(path)]
        assert main(["bench", "serve", "--base-url", server.url, *flags]) == 2
    assert server.generated == []
    said = capsys.readouterr().err.splitlines()
    assert said[-1].startswith("quire bench: ") and told in said[-1] and len(said) == 2  # the first is the heading


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (DEEP, "it is nested too deeply"),
        ('{"request_throughput": 1%s}' % ("0" * 400), "request_throughput has 401 digits; no figure is that large"),
        ('{"request_throughput": 1, "flags": 5}', "flags must be an object, got 5"),
    ],
)
def test_wrong_results_are_not_compared(text: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "then.json"
    path.write_text(text)
    with FakeOpenAI() as server:
        assert bench(server, "--compare", str(path)) == 2
    assert server.requests == []
    error = capsys.readouterr().err
    assert told in error and str(path) in error and error.count("\n") == 1


@pytest.mark.parametrize("name", KEYS)
def test_the_key_of_the_environment(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "from-there")
    with FakeOpenAI(key="from-there") as server:
        assert bench(server) == 0


def test_secrets_stay_out() -> None:
    line = "q --api_key=a --header b=c d=e --seed 3 --api-key f --model m"
    assert " ".join(without_secrets(line.split())) == "q --api_key=... --header ... ... --seed 3 --api-key ... --model m"


def test_the_commit(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        names = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", "-C", str(tmp_path), *names, *words], check=True, capture_output=True)

    file = tmp_path / "a.py"
    file.write_text("1")
    assert commit(file) is None
    git("init")
    assert commit(file) is None
    git("add", "a.py")
    git("commit", "-m", "x")
    clean = commit(file)
    assert clean is not None
    assert len(clean) == 40
    file.write_text("2")
    assert commit(file) == f"{clean}-dirty"


def run_apart(*flags: str) -> "subprocess.Popen[str]":
    line: list[Any] = [sys.executable, "-m", "quire.cli.main", "bench", "serve", "--num-prompts", "4", *flags]
    return subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def waits(pid: int) -> bool:
    """None of its threads has anything to do: it has read all that was sent."""
    states = [(task / "stat").read_text().rpartition(")")[2].split()[0] for task in Path(f"/proc/{pid}/task").iterdir()]
    return set(states) == {"S"}


def test_ctrl_c_reports_what_has_ended() -> None:
    with FakeOpenAI(lambda _, index: Answer(hang_after=1 if index == 3 else None)) as server:
        process = run_apart("--base-url", server.url, "--random-input-len", "4", "--random-output-len", "2")
        deadline = time.monotonic() + PATIENCE
        while (len(server.generated) < 4 or server.running > 1) and time.monotonic() < deadline:
            time.sleep(0.05)
        while not (waits(process.pid) and time.sleep(0.3) is None and waits(process.pid)) and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert "Successful requests:                     3" in out
    assert "interrupted: 1 of 4" in out
    assert "Traceback" not in err


def test_ctrl_c_in_the_warm_up_ends_the_command() -> None:
    with FakeOpenAI(lambda *_: Answer(hang_after=1)) as server:
        process = run_apart("--base-url", server.url, "--random-input-len", "4", "--num-warmups", "2")
        deadline = time.monotonic() + PATIENCE
        while len(server.generated) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out) == (130, "")
    assert "Traceback" not in err
    assert len(server.generated) == 2


def test_the_command_does_not_import_torch() -> None:
    with FakeOpenAI() as server:
        code = f"""
import sys
from quire.cli.main import main
main(["bench", "serve", "--base-url", {server.url!r}, "--num-prompts", "2", "--random-input-len", "3"])
print("torch" in sys.modules, "aiohttp" in sys.modules, "httpx" in sys.modules)
"""
        done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.endswith("False False False\n")


def test_bench_alone_says_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench"])
    assert ended.value.code == 2
    assert "MEASUREMENT" in capsys.readouterr().err
