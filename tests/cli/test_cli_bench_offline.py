import json
import sys
from pathlib import Path
from typing import Any

import pytest

from quire.bench.offline import start_once, startup_figures
from quire.cli.main import main
from quire.types.errors import EngineError
from tiny_model import make_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_model(tmp_path_factory.mktemp("tiny")))


def bench(kind: str, model: str, *flags: str, executor: str = "fake") -> int:
    small = ["--device", "cpu", "--max-num-seqs", "8", "--kv-cache-memory-bytes", str(4 << 20)]
    return main(["bench", kind, "--model", model, "--distributed-executor-backend", executor, *small, *flags])


def read(path: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(path.read_text())
    return result


def test_random_prompts(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "t.json"
    monkeypatch.setattr(sys, "argv", ["quire", "bench", "throughput", "--hf-token", "hush"])
    lengths = ["--input-len", "20", "--output-len", "6", "--random-range-ratio", "0.5", "--num-prompts", "12"]
    assert bench("throughput", model, *lengths, "--runs", "3", "--output-json", str(path), "--hf-token", "hush") == 0
    out = capsys.readouterr().out
    assert "random: 12 requests" in out
    assert out.count("*") == 1
    result = read(path)
    assert "hush" not in path.read_text()
    (entry,) = result["workloads"]
    assert (entry["workload"], entry["num_requests"], len(entry["runs"])) == ("random", 12, 3)
    assert entry["elapsed_time"] == min(run["elapsed_time"] for run in entry["runs"])
    assert 12 * 3 <= entry["total_output_tokens"] <= 12 * 9
    assert result["figures"]["random tokens_per_second"] == entry["tokens_per_second"]
    assert (result["kind"], result["model_id"], result["engine"]["executor"]) == ("throughput", model, "fake")
    assert {"date", "command", "commit", "quire_version", "flags", "machine"} <= set(result)
    assert result["machine"]["device"] == "cpu"


def test_the_real_model_without_its_tokenizer(model: str, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    flags = ["--input-len", "9", "--output-len", "4", "--num-prompts", "3", "--runs", "1", "--load-format", "dummy"]
    assert bench("throughput", model, *flags, "--output-json", str(path), executor="uni") == 0
    assert read(path)["workloads"][0]["total_output_tokens"] == 12


def test_a_named_workload_cut(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("throughput", model, "--workload", "single", "--output-len", "16", "--runs", "1") == 0
    assert "single (16 out): 1 requests, 128 tokens in, 16 out" in capsys.readouterr().out
    assert bench("throughput", model, "--workload", "single", "--runs", "1") == 2  # 128 + 512 are too many for this model
    assert "max" in capsys.readouterr().err


def test_texts(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [{"prompt": "the quick fox", "output_tokens": 5}, {"messages": [{"role": "user", "content": "a page"}]}]
    path = tmp_path / "d.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    flags = ["--dataset-name", "custom", "--dataset-path", str(path), "--num-prompts", "4", "--output-len", "3", "--runs", "1"]
    assert bench("throughput", model, *flags) == 0
    assert "custom: 4 requests" in capsys.readouterr().out
    talk = [{"conversations": [{"value": "the quick brown fox jumps"}, {"value": "over the lazy dog and over"}]}] * 3
    path.write_text(json.dumps(talk))
    assert (
        bench(
            "throughput", model, "--dataset-name", "sharegpt", "--dataset-path", str(path), "--num-prompts", "2", "--runs", "1"
        )
        == 0
    )
    assert "sharegpt: 2 requests" in capsys.readouterr().out


def test_comparing(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "then.json"
    flags = ["--input-len", "8", "--output-len", "4", "--num-prompts", "5", "--runs", "1"]
    assert bench("throughput", model, *flags, "--output-json", str(path)) == 0
    then = read(path)
    then["figures"]["random elapsed_time"] = 1000.0
    path.write_text(json.dumps(then))
    capsys.readouterr()
    assert bench("throughput", model, *flags, "--compare", str(path), "--temperature", "1") == 0
    out = capsys.readouterr().out
    (row,) = [line.split() for line in out.splitlines() if line.startswith("random elapsed_time")]
    assert (row[3], float(row[4]) < 0.1) == ("1,000.00", True)
    assert "differs: temperature is 1.0, was 0.0" in out
    assert bench("latency", model, "--compare", str(path)) == 2
    assert "is not a result of `bench latency`" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--workload", "mixed", "--input-len", "5"], "--input-len does not belong to --workload"),
        (["--workload", "mixed", "--dataset-name", "random"], "--dataset-name does not belong to --workload"),
        (["--dataset-name", "prefix_repetition", "--input-len", "5"], "--input-len does not belong"),
        (["--input-len", "5", "--random-input-len", "6"], "are the same"),
        (["--runs", "0"], "--runs must be at least 1"),
        (["--metadata", "x"], "NAME=VALUE"),
        (["--dataset-name", "sharegpt"], "needs --dataset-path"),
    ],
)
def test_wrong_flags_are_told_before_the_model_is_loaded(
    flags: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "throughput", "--model", "/nowhere", *flags]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "flags"),
    [("throughput", ["--num-prompts", "2", "--runs", "1"]), ("latency", ["--batch-size", "2", "--num-iters", "1"])],
)
def test_a_profile(kind: str, flags: list[str], model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "p.json"
    flags = [*flags, "--profile", "--input-len", "9", "--output-len", "4", "--load-format", "dummy"]
    assert bench(kind, model, *flags, executor="uni") == 2
    assert "--profile requires --profiler-config; got none. Add" in capsys.readouterr().err
    config = {"profiler": "torch", "torch_profiler_dir": str(tmp_path / "traces"), "torch_profiler_with_stack": False}
    flags += ["--profiler-config", json.dumps(config), "--output-json", str(path)]
    assert bench(kind, model, *flags, executor="uni") == 0
    [trace] = (tmp_path / "traces").iterdir()
    assert f"profile: {trace}" in capsys.readouterr().out
    result = read(path)
    assert (result["workloads"][0] if kind == "throughput" else result)["traces"] == [str(trace)]


def test_latency(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "l.json"
    flags = ["--batch-size", "3", "--input-len", "8", "--output-len", "5", "--num-iters-warmup", "1", "--num-iters", "4"]
    assert bench("latency", model, *flags, "--output-json", str(path)) == 0
    assert "mean time per output token (ms)" in capsys.readouterr().out
    result = read(path)
    assert len(result["latencies"]) == 4
    assert result["avg_latency"] == pytest.approx(sum(result["latencies"]) / 4)
    assert set(result["percentiles"]) == {"10", "25", "50", "75", "90", "99"}
    assert 0 < result["mean_ttft_ms"] < 1000 * result["avg_latency"]
    assert {"avg_latency", "p50_latency", "p99_latency", "mean_tpot_ms"} <= set(result["figures"])


def test_startup(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "s.json"
    assert bench("startup", model, "--num-iters-cold", "1", "--num-iters-warm", "1", "--output-json", str(path)) == 0
    assert "1 (cold)" in capsys.readouterr().out
    result = read(path)
    cold, warm = result["starts"]
    assert (cold["cold"], warm["cold"]) == (True, False)
    for start in (cold, warm):
        assert 0 < start["ready"] < start["first_token"]
        assert sum(seconds for _, seconds in start["parts"]) == pytest.approx(start["first_token"], rel=0.05)
    assert result["figures"]["first_warm_first_token"] == warm["first_token"]
    assert bench("startup", model, "--num-iters-cold", "0", "--num-iters-warm", "0") == 2


def test_a_cold_start_has_an_empty_kernel_cache_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)  # set by whoever imported kernels in this process
    code = """
import json, os, sys, time
asked = json.load(sys.stdin)
directory = os.environ.get("TRITON_CACHE_DIR")
assert (directory is not None and not os.listdir(directory)) == asked["cold"], directory
now = time.monotonic()
print("noise")
print(json.dumps({"ready": now, "first_token": now + 1, "parts": [["nothing", 0.0]]}))
"""
    command = [sys.executable, "-c", code]
    starts = [start_once(command, {"cold": cold}, cold=cold) for cold in (True, False, False)]
    assert [name for name, _ in starts[0].parts][:2] == ["nothing", "first token"]
    figures = startup_figures(starts)
    assert figures["mean_warm_first_token"] == pytest.approx((starts[1].first_token + starts[2].first_token) / 2)
    with pytest.raises(EngineError, match="ended with 3"):
        start_once([sys.executable, "-c", "raise SystemExit(3)"], {}, cold=False)
