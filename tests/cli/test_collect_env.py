import json
import subprocess
import sys
from pathlib import Path

import pytest

from quire.cli import collect_env
from quire.cli.main import main


def test_text_and_json_say_the_same(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert main(["collect-env", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {*found} == {"quire", "system", "cpu", "gpus", "plugins", "libraries", "chosen", "environment"}
    assert found["chosen"]["device"]["value"] in ("cpu", "cuda") and found["chosen"]["device"]["reason"]
    assert found["chosen"]["attention"]["value"] in ("cpu", "triton", "reference")
    assert all({"value", "reason"} == {*choice} for choice in found["chosen"].values())
    assert found["libraries"]["torch"] and found["cpu"]["usable_cores"] >= 1
    text = collect_env.render(found)
    for value in (
        found["libraries"]["torch"],
        found["cpu"]["name"],
        found["chosen"]["device"]["reason"],
        found["system"]["kernel"],
    ):
        assert value in text


def test_no_secret_is_shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    secret = "hunter2-secret"
    for name in ("QUIRE_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "MY_PASSWORD", "WANDB_API_KEY"):
        monkeypatch.setenv(name, secret)
    monkeypatch.setenv("HTTPS_PROXY", f"http://user:{secret}@proxy:1")
    monkeypatch.setenv("QUIRE_MAX_STOP_STRINGS", "7")
    for line in (["collect-env"], ["collect-env", "--json"]):
        assert main(line) == 0
        out = capsys.readouterr().out
        assert secret not in out and "HF_TOKEN" in out and "HTTPS_PROXY" in out and "AWS_SECRET" not in out
    shown = collect_env.environment({"QUIRE_MAX_STOP_STRINGS": "7", "QUIRE_API_KEY": secret, "HF_TOKEN": "", "OTHER": "x"})
    assert shown == {"QUIRE_API_KEY": "(set)", "QUIRE_MAX_STOP_STRINGS": "7"}
    assert not {*collect_env.SHOWN_VARIABLES} & {*collect_env.HIDDEN_VARIABLES}
    assert not [
        name for name in collect_env.SHOWN_VARIABLES if any(word in name for word in ("KEY", "TOKEN", "SECRET", "PASS"))
    ]


def test_it_works_where_torch_does_not() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; from quire.cli.main import main; assert main(['collect-env', '--json']) == 0"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    device = json.loads(done.stdout)["chosen"]["device"]
    assert device["value"] is None and "torch" in device["reason"]


@pytest.mark.parametrize(
    ("script", "found", "reason"),
    [
        ("echo 'NVIDIA H200, 570.1, 143771 MiB, 9.0, 00000000:01:00.0'", 1, None),
        ("echo 'NVIDIA-SMI has failed'; exit 9", 0, "nvidia-smi: NVIDIA-SMI has failed"),
        (None, 0, "nvidia-smi is not installed"),
    ],
)
def test_gpus(script: str | None, found: int, reason: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if script is not None:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    gpus = collect_env._gpus()
    assert (len(gpus["found"]), gpus["reason"]) == (found, reason)


def test_instruction_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collect_env, "CPU_INFO", tmp_path / "cpuinfo")
    assert collect_env.cpu_flags() == set()
    (tmp_path / "cpuinfo").write_text("processor : 0\nFeatures : fp asimd asimddp i8mm\n")
    assert {"asimddp", "i8mm"} <= collect_env.cpu_flags()
