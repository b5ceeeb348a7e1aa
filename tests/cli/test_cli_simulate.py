"""`quire simulate` and `quire bench steps` from the command line, with a config.json and nothing else."""

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest

from quire.bench import front_end
from quire.cli.main import main
from quire.cli.simulate import Setting
from quire.config.args import EngineArgs
from quire.engine.assemble import resolve_here, start_core
from quire.engine.core import EngineCore
from quire.engine.timeline import Stopwatch
from tiny_model import make_tokenizer

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "vocab_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 2048, "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("model")
    (directory / "config.json").write_text(json.dumps(CONFIG))
    return str(directory)


def simulate(model: str, *flags: str) -> int:
    return main(["simulate", model, *flags])


def test_nothing_that_could_run_is_no_success(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate(model, "--card", "l4", "--num-prompts", "3", "--input-len", "4000") == 1
    assert "3 refused" in capsys.readouterr().out


def test_json_table_and_report(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "report.html"
    flags = ["--card", "l4", "--num-prompts", "40", "--request-rate", "200", "--input-len", "100", "--prefix-len", "64"]
    assert simulate(model, *flags, "--replicas", "2", "--html", str(report)) == 0
    table = capsys.readouterr().out
    assert "40 of 40" in table and "Time to first token" in table and "requests placed by balancer" in table
    assert simulate(model, *flags, "--replicas", "2", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["kind"], result["completed"], result["replicas"]) == ("simulation", 40, 2)
    assert result["total_output_tokens"] == 40 * 128
    assert 0 < result["p50_ttft_ms"] <= result["p99_ttft_ms"]
    assert result["prefix_cache_hit_rate"] > 0.3
    assert sum(load["requests"] for load in result["per_replica"]) == 40
    text = report.read_text(encoding="utf-8")
    for drawing in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        ElementTree.fromstring(drawing)
    assert text.count("<svg") == text.count("</svg>") == 6 and text.count("<polyline") == 7
    assert not re.findall(r"(?:src|href)=|https?://|@import|url\(|<script", text)


def test_the_fewest_replicas(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--card", "l4", "--num-prompts", "100", "--request-rate", "1000", "--output-len", "8", "--max-num-seqs", "2"]
    assert simulate(model, *flags, "--slo-ttft", "8", "--slo-percentile", "95", "--json") == 0
    needed = json.loads(capsys.readouterr().out)["slo"]
    count = needed["replicas_needed"]
    assert count > 1 and needed["within"] >= 0.95
    tried = {trial["replicas"]: trial["kept"] for trial in needed["trials"]}
    assert tried[count] and not tried[count - 1]
    assert simulate(model, *flags, "--slo-ttft", "8", "--slo-percentile", "95", "--replicas", str(count - 1), "--json") == 0
    fewer = json.loads(capsys.readouterr().out)["slo"]
    assert fewer["within"] < 0.95 and fewer["replicas_needed"] is None
    assert simulate(model, *flags, "--slo-ttft", "0.001", "--max-replicas", "2") == 1
    assert "more than 2 replicas" in capsys.readouterr().out


def test_traces(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mooncake = tmp_path / "trace.jsonl"
    line = {"timestamp": 0, "input_length": 1200, "output_length": 4, "hash_ids": [1, 2, 3]}
    mooncake.write_text("\n".join(json.dumps(line | {"timestamp": 1000 * i}) for i in range(6)))
    assert simulate(model, "--card", "t4", "--trace", str(mooncake), "--speedup", "10", "--limit", "5", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["num_prompts"], result["total_input_tokens"]) == (5, 6000)
    assert result["prefix_cache_hit_rate"] == pytest.approx(4 * 1184 / 6000)  # whole pages of 16
    assert 0.4 < result["duration"] < 0.6
    azure = tmp_path / "trace.csv"
    azure.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n0.5,5000,10\n1.5,100,10\n")
    assert simulate(model, "--card", "t4", "--trace", str(azure), "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["completed"], result["refused"]) == (1, 1)  # 5,000 tokens are more than the model's context
    assert "none is left to generate" in next(iter(result["refusals"]))
    talks = tmp_path / "talks.json"
    talks.write_text(json.dumps([{"conversations": [{"value": "why " * 10}, {"value": "so " * 10}]}]))
    assert simulate(model, "--card", "t4", "--trace", str(talks)) == 2
    assert "there is no tokenizer" in (told := capsys.readouterr().err) and "--chars-per-token 4" in told
    assert simulate(model, "--card", "t4", "--trace", str(talks), "--chars-per-token", "4", "--json") == 0
    assert json.loads(capsys.readouterr().out)["total_input_tokens"] == 10


def test_a_model_on_several_gpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Slow matrices, so that ranks and stages matter: a replica is as many GPUs as the model is divided among."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"hidden_act": "silu", "rms_norm_eps": 1e-5}))
    model, found = str(tmp_path), {}
    for flags in ((), ("-tp", "2"), ("-tp", "2", "--link", "pcie4"), ("-pp", "2")):
        line = ["--card", "h100", "--bandwidth", "1GB/s", "--flops", "10G", "--num-prompts", "40", "--input-len", "64"]
        assert simulate(model, *line, "--offline", "--output-len", "16", *flags, "--json") == 0
        found[flags] = json.loads(capsys.readouterr().out)
    alone, ranks, slow, stages = found.values()
    assert ", 2 of them with -tp 2 over nvlink4; step times computed" in ranks["device"] and "over" not in alone["device"]
    assert alone["mean_tpot_ms"] / 2 < ranks["mean_tpot_ms"] < slow["mean_tpot_ms"] < alone["mean_tpot_ms"]
    assert alone["duration"] / 2 < stages["duration"] < alone["duration"]
    assert all(each["completed"] == 40 for each in found.values())


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--card", "l4", "--network", "ndr", "--link", "x"], "--link must be one of nvlink3"),
        (["--card", "t4", "-tp", "2"], "--link is required for t4"),
        ([], "a device is required: --card h100, --timing FILE of `quire bench steps`, or all of --memory"),
        (["--card", "h1000"], "--card 'h1000' is unknown; there are a10"),
        (["--bandwidth", "1TB/s", "--flops", "1T"], "a device is required"),
        (["--card", "l4", "--bandwidth", "fast"], "--bandwidth 'fast' is not a rate such as 4.8TB/s"),
        (["--card", "l4", "--timing", "x.json"], "drop --card"),
        (["--card", "l4", "--device", "cpu"], "--card is a GPU, and --device is cpu"),
        (["--card", "l4", "--replicas", "0"], "--replicas must be at least 1, got 0"),
        (["--card", "l4", "--replicas", "5000"], "--replicas must be at most 4096, since each takes memory; got 5000"),
        (["--card", "l4", "--api-token-us", "-1"], "--api-token-us must be microseconds from 0 to 1,000,000, got -1"),
        (["--card", "l4", "--num-prompts", "0"], "--num-prompts must be at least 1, got 0"),
        (["--card", "l4", "--slo-ttft", "-1"], "--slo-ttft must be above 0 milliseconds, got -1"),
        (
            ["--card", "l4", "--slo-ttft", "1", "--slo-percentile", "0"],
            "--slo-percentile must be above 0 and at most 100",
        ),
        (["--card", "l4", "--request-rate", "0"], "--request-rate must be above 0, or inf; got 0.0"),
        (["--card", "l4", "--request-rate", "1e-308"], "requests would come after inf seconds; raise the rate"),
        (
            ["--card", "l4", "--input-len", "99999999999999999999"],
            "--input-len must be at most 16777216, got 99999999999999999999",
        ),
        (["--card", "l4", "--output-len", "99999999999999999999"], "--output-len must be at most 16777216, got"),
        (["--card", "l4", "--prefix-len", "99999999999"], "--prefix-len must be at most 16777216, got"),
        (["--card", "l4", "--num-prefixes", "99999999999999"], "--num-prefixes must be at most 16777216, got"),
        (
            ["--card", "l4", "--num-prompts", "999999999999999"],
            "--num-prompts must be at most 100000000, since each takes memory",
        ),
        (
            ["--card", "l4", "--turns", "3", "--think-time", "1e308"],
            "--think-time 1e+308 is more than 1e+13 seconds for all turns",
        ),
        (["--card", "l4", "--workload", "mixd"], "--workload 'mixd' is unknown; did you mean mixed?"),
        (["--card", "l4", "--workload", "chats", "--request-rate", "3"], "--workload 'chats' is unknown; did you mean chat?"),
        (["--card", "l4", "--workload", "mixed", "--request-rate", "3"], "drop --trace and --request-rate"),
        (["--card", "l4", "--workload", "mixed", "--input-len", "3"], "--input-len does not apply to --workload; drop it"),
        (["--card", "l4", "--speedup", "3"], "--speedup does not apply to generated traffic; drop it"),
        (["--card", "l4", "--trace", "x.csv", "--turns", "3"], "--turns does not apply to a trace of Azure; drop it"),
        (["--card", "l4", "--trace", "x.csv", "--request-rate", "3"], "has arrival times; drop --request-rate"),
        (["--card", "l4", "--trace", "x.csv"], "cannot read --trace x.csv"),
        (["--card", "l4", "--memory", "1MiB"], "does not fit: "),
        (["--card", "l4", "--data-parallel-size", "2"], "data_parallel_size is not simulated: use --replicas"),
        (["--card", "l4", "--distributed-executor-backend", "fake"], "also replaces the device; drop it"),
        (
            ["--card", "l4", "--speculative-config", '{"method": "ngram", "num_speculative_tokens": 2}'],
            "speculative_config is not simulated: acceptance rates are unknown; drop it",
        ),
        (["--card", "l4", "--spec-method", "ngram"], "spec_method is not simulated: acceptance rates are unknown; drop it"),
        (["--card", "l4", "--enable-lora"], "enable_lora is not simulated: simulated requests have no adapter; drop it"),
        (["--card", "l4", "--num-prompts", "2", "--html", "/nowhere/x.html"], "cannot write --html /nowhere/x.html"),
    ],
)
def test_mistakes(model: str, flags: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate(model, *flags) == 2
    error = capsys.readouterr().err
    assert told in error and error.startswith("quire simulate: ") and error.count("\n") == 1


MOONCAKE = '{"timestamp": %s, "input_length": 10, "output_length": 1, "hash_ids": [1]}\n'
TALK = '[{"conversations": [{"value": "hello there"}, {"value": "so it is"}]}]'


@pytest.mark.parametrize(
    ("name", "text", "flags", "told"),
    [
        (
            "a.csv",
            "TIMESTAMP,ContextTokens,GeneratedTokens\n0,10,5\n1e308,10,5\n",
            [],
            "a.csv line 3: TIMESTAMP must be seconds from 0 to 1e+13, got 1e308",
        ),
        (
            "a.jsonl",
            MOONCAKE % 0 + MOONCAKE % 10,
            ["--speedup", "1e-308"],
            "--speedup 1e-308 stretches the trace beyond 1e+13 seconds; raise it",
        ),
        ("a.jsonl", "[" * 100_000, [], "a.jsonl line 1 is not JSON: it is nested too deeply"),
        ("a.json", "[" * 100_000 + "]" * 100_000, ["--chars-per-token", "4"], "a.json is not JSON: it is nested too deeply"),
        ("a.json", TALK, ["--chars-per-token", "1e-308"], "--chars-per-token 1e-308 makes more than 16777216 tokens"),
    ],
)
def test_traces_beyond_all_bounds(
    model: str, name: str, text: str, flags: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_text(text)
    assert simulate(model, "--card", "l4", "--trace", str(tmp_path / name), *flags) == 2
    error = capsys.readouterr().err
    assert told in error and error.startswith("quire simulate: ") and error.count("\n") == 1


def test_policies_beside_the_optimum(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--card", "l4", "--num-prompts", "60", "--request-rate", "4", "--input-len", "40", "--prefix-len", "96"]
    flags += [
        "--num-prefixes",
        "12",
        "--output-len",
        "4",
        "--num-gpu-blocks-override",
        "60",
        "--max-model-len",
        "256",
        "--optimum",
    ]
    rates = []
    for policy in ("lru", "lfu", "cost"):
        assert simulate(model, *flags, "--cache-policy", policy, "--json") == 0
        result = json.loads(capsys.readouterr().out)
        assert 0 < result["prefix_cache_hit_rate"] < result["prefix_cache_hit_rate_optimum"] < 1
        rates.append(result["prefix_cache_hit_rate"])
    assert rates[1] > rates[0]
    assert simulate(model, *flags, "--cache-policy", "lfu") == 0
    assert "lfu; an optimal policy would find" in capsys.readouterr().out
    assert simulate(model, *flags, "--no-enable-prefix-caching") == 0
    assert "optimal" not in capsys.readouterr().out


def test_a_conversation_of_more_turns_than_requests(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--num-prompts", "3", "--input-len", "10", "--output-len", "4", "--turns", "1000000", "--think-time", "1"]
    assert simulate(model, "--card", "l4", *flags, "--json") == 0
    assert json.loads(capsys.readouterr().out)["total_input_tokens"] == 10 + 24 + 38


def test_measured_steps_are_a_device(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The executor without a model takes no time, but its engine is measured all the same, and a server around it: with as few
    positions as the model has, the tokenizer that is asked for, and no key."""
    path = tmp_path / "steps.json"
    make_tokenizer(tmp_path)
    monkeypatch.setenv("QUIRE_API_KEY", "a key")
    monkeypatch.setattr(front_end, "ALONE", 10)
    monkeypatch.setattr(front_end, "ROUNDS", 1)
    engine = ["--model", model, "--distributed-executor-backend", "fake", "--max-num-seqs", "4"]
    steps = ["--rows", "1", "4", "--prompts", "8", "32", "--contexts", "16", "64", "--repeats", "4"]
    flags = ["--max-num-batched-tokens", "64", *steps, "--front-end", "--output-json", str(path)]
    flags += ["--tokenizer", str(tmp_path), "--hf-overrides", '{"max_position_embeddings": 128}']
    assert main(["bench", "steps", *engine, *flags]) == 0
    assert "processor time outside of a step" in (said := capsys.readouterr().out) and "between client and engine" in said
    result = json.loads(path.read_text())
    assert 0 < result["front"]["token"] < result["front"]["request"]
    assert [(point["rows"], point["tokens"]) for point in result["points"]] == [(1, 1), (4, 4)] * 2 + [(1, 8), (1, 32)] * 2
    pairs = [point["pairs"] for point in result["points"][4:]]
    assert pairs == [8 * 9 / 2, 32 * 33 / 2, 64 * 8 + 8 * 9 / 2, 64 * 32 + 32 * 33 / 2]
    assert simulate(model, "--timing", str(path), "--num-prompts", "5", "--input-len", "50", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["completed"] == 5 and "step times measured with" in found["device"]
    for part, name in (("front", "finish"), ("host", "newcomer")):  # each is measured, and what is measured counts
        slower = tmp_path / "slower.json"
        slower.write_text(json.dumps(result | {part: result[part] | {name: result[part][name] + 1.0}}))
        assert simulate(model, "--timing", str(slower), "--num-prompts", "5", "--input-len", "50", "--json") == 0
        assert json.loads(capsys.readouterr().out)["duration"] > found["duration"] + 0.9
    assert simulate(model, "--timing", str(path), "--num-prompts", "5", "--input-len", "50", "--json", "--offline") == 0
    assert json.loads(capsys.readouterr().out)["p50_ttft_ms"] < found["p50_ttft_ms"]
    assert simulate(model, "--timing", str(path), "--device", "cuda") == 2
    assert "was measured on 'cpu', not on 'cuda'" in capsys.readouterr().err
    wider = ["--hf-overrides", '{"vocab_size": 77, "max_position_embeddings": 128}']
    assert simulate(model, "--timing", str(path), *wider) == 2
    assert f"was measured with another model, {model}: its vocab_size " in (told := capsys.readouterr().err)
    assert "not 77; measure" in told
    path.write_text(json.dumps({name: value for name, value in result.items() if name != "sizes"}))  # an older file
    assert simulate(model, "--timing", str(path), "--num-prompts", "5", "--input-len", "50", *wider) == 0
    assert main(["bench", "steps", *engine, "--rows", "4096"]) == 2
    assert "--rows 4096 is more than max_num_seqs 4; use --max-num-seqs 4096" in capsys.readouterr().err


def test_an_engine_that_plans_ahead_is_measured_beside_a_row(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the end of a step to the end of the next, as it is under load; what one may record is recorded first."""
    path, prepared = tmp_path / "steps.json", []

    def idle(self: EngineCore) -> bool:
        prepared.append(self.tokens)
        return len(prepared) < 3

    flags = ["--distributed-executor-backend", "fake", "--max-num-seqs", "9", "--async-scheduling", "--output-json", str(path)]
    flags += ["--rows", "1", "8", "--prompts", "8", "32", "--contexts", "16", "64", "--repeats", "4"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EngineCore, "idle", idle)
        assert main(["bench", "steps", "--model", model, *flags]) == 0
    assert prepared == [0, 0, 0]
    points = json.loads(path.read_text())["points"]
    sizes = [(1, 1), (8, 8)] * 2 + [(2, 8), (2, 32)] * 2 + [(9, 32)]
    assert [(point["rows"], point["tokens"]) for point in points] == sizes
    assert points[-1]["pairs"] == 24 * 25 / 2 and 8 * 64 < points[-1]["keys"] < 8 * (64 + 16)
    assert [point["pairs"] for point in points[4:6]] == [7 * 8 / 2, 31 * 32 / 2] and points[4]["keys"] < 16
    small = [
        "--max-num-seqs",
        "1",
        "--rows",
        "1",
        "--max-model-len",
        "24",
        "--contexts",
        "4",
        "8",
    ]  # nothing beside or before it
    assert main(["bench", "steps", "--model", model, *flags, *small]) == 1
    assert "skipped: a prompt of 32 tokens after 0, more than max_num_batched_tokens" in (told := capsys.readouterr().err)
    assert "`quire simulate --timing` needs more than this: it has steps with decode rows in fewer than 2 sizes" in told
    sizes = [(1, 1)] * 2 + [(1, 8)]
    assert [(point["rows"], point["tokens"]) for point in json.loads(path.read_text())["points"]] == sizes


@pytest.mark.parametrize("serving", [False, True])
def test_the_scheduler_is_made_as_the_engine_makes_it(model: str, serving: bool) -> None:
    args = EngineArgs(model=model, distributed_executor_backend="fake", max_num_seqs=5, long_prefill_token_threshold=64)
    config = resolve_here(args, Stopwatch(), serving=serving)
    started = start_core(config)
    plan = SimpleNamespace(pages=started.pages, max_model_len=started.max_model_len)
    ours, theirs = Setting(config, plan, None, "").scheduler(started.pages), started.core.scheduler
    for name in ("_drafts", "_preallocated_tokens", "_single_rows_share"):
        assert getattr(ours, name) == getattr(theirs, name)
    assert vars(ours._limits) == vars(theirs._limits) and vars(ours.roster.order) == vars(theirs.roster.order)
    assert type(ours._budget) is type(theirs._budget)
    assert (ours.pool.pages, ours.roster.max_seqs) == (theirs.pool.pages, theirs.roster.max_seqs)
    assert ours._tables.prefix_caching == theirs._tables.prefix_caching
    started.core.stop()


def test_no_torch_is_imported(model: str) -> None:
    code = (
        "import sys; from quire.cli.main import main;"
        f"code = main(['simulate', {model!r}, '--card', 'l4', '--num-prompts', '3']);"
        "print(code, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0 False"


def test_host_memory_and_disk(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--card", "l4", "--num-prompts", "90", "--request-rate", "4", "--input-len", "40", "--prefix-len", "96"]
    flags += ["--num-prefixes", "12", "--output-len", "4", "--num-gpu-blocks-override", "40", "--max-model-len", "256"]
    host = ["--kv-offloading-size", "0.0002"]
    disk = [*host, "--kv-disk-path", "anything", "--kv-disk-size", "0.01", "--disk-rate", "9GB/s"]
    rates = []
    for tiers in ([], host, disk):
        assert simulate(model, *flags, *tiers, "--json") == 0
        result = json.loads(capsys.readouterr().out)
        rates.append(result["prefix_cache_hit_rate"])
        if tiers:
            hits = [result[f"kv_tiers_{name}_hits"] for name in ("device", "host", "disk")]
            assert sum(hits) == result["total_cached_tokens"] and (hits[2] > 0) == (tiers is disk)
            assert result["kv_tiers_stored"] >= result["kv_tiers_fetched"] > 0
            assert (result["kv_tiers_written"] > 0) == (result["kv_tiers_read"] > 0) == (tiers is disk)
    assert rates[0] < rates[1] < rates[2]
    assert not Path("anything").exists()
    assert simulate(model, *flags, *disk, "--optimum") == 0
    table = capsys.readouterr().out
    assert "in host memory" in table and "% on disk" in table and "GiB written" in table and "optimal policy" in table
    for wrong, told in (
        (["--host-link", "9GB/s"], "--host-link requires --kv-offloading-size"),
        ([*host, "--disk-rate", "9GB/s"], "--disk-rate requires --kv-disk-path"),
        ([*host, "--host-link", "fast"], "--host-link 'fast' is not a rate"),
        ([*disk[:-1], "0"], "--disk-rate must be above 0"),
    ):
        assert simulate(model, *flags, *wrong) == 2
        assert told in capsys.readouterr().err


@pytest.mark.parametrize("name", ["chat", "agent", "mooncake"])
def test_generated_shapes(name: str, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--card", "l4", "--num-prompts", "12", "--workload", name]
    assert simulate(model, *flags, "--speedup", "2", "--json") in (0, 1)
    result = json.loads(capsys.readouterr().out)
    assert result["num_prompts"] == 12 and result["traffic"].startswith(f"{name}, 2 times as fast")
    assert simulate(model, *flags, "--request-rate", "3") == 2
    assert "has arrival times" in capsys.readouterr().err
