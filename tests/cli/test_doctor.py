"""`quire bench collectives` and `quire doctor`: right ranks pass, ranks that add wrongly are found."""

import json
import subprocess
import sys

import pytest
import torch

from patience import PATIENCE
from quire.cli.main import main
from quire.device.base import LinkRemark
from quire.device.cuda.links import check_variables
from quire.device.registry import open_device
from quire.dist.shared_memory import SharedMemoryGroup

CPU = ["--device", "cpu"]


def test_collectives_are_measured_on_two_machines(tmp_path, capsys):
    result, port = tmp_path / "result.json", "29617"
    line = ["bench", "collectives", "-tp", "2", "--sizes", "1", "5K", "--nnodes", "2", "--master-port", port, *CPU]
    other = subprocess.Popen([sys.executable, "-m", "quire.cli.main", *line, "--node-rank", "1"], stderr=subprocess.DEVNULL)
    try:
        assert main([*line, "--output-json", str(result)]) == 0
        assert other.wait(PATIENCE) == 0
    finally:
        other.kill()
        other.wait()
    found = json.loads(result.read_text())
    assert [(each["collective"], each["bytes"], each["right"]) for each in found] == [
        ("all-reduce", 1, True), ("all-gather", 1, True), ("all-reduce", 5120, True), ("all-gather", 5120, True),
    ]  # fmt: skip
    assert all(each["microseconds"] > 0 for each in found)
    assert capsys.readouterr().out.count("right") == 4


def test_ranks_that_add_wrongly_are_found(capsys, monkeypatch):
    add = SharedMemoryGroup.add
    monkeypatch.setattr(SharedMemoryGroup, "add", lambda group, part: add(group, part) + torch.ones_like(part))
    monkeypatch.setattr(open_device("cpu").__class__, "check_links", lambda *_: [LinkRemark("a slow link", problem=True)])
    assert main(["doctor", "--parallel", *CPU]) == 1  # two ranks; the other one adds rightly
    out = capsys.readouterr().out
    assert "PROBLEM  a slow link" in out
    assert out.count("wrong bits") == 2 and out.count("right bits") == 2  # sums, and gathered parts
    assert "6 of 6 answers have other tokens than in one process" in out
    assert out.endswith("verdict: 4 problems were found\n")


def test_a_machine_without_a_problem(capsys):
    assert main(["doctor", *CPU]) == 0
    out = capsys.readouterr().out
    assert "it gives the same tokens twice" in out and out.endswith("verdict: no problem was found\n")


def test_an_engine_that_does_not_start_is_a_problem(capsys):
    assert main(["doctor", "--max-model-len", "100000", *CPU]) == 1
    out = capsys.readouterr().out
    assert "PROBLEM  max_model_len 100000 is longer" in out and "1 problem was found" in out


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["bench", "collectives"], "collectives are of tensor-parallel ranks; give --tensor-parallel-size of at least 2"),
        (
            ["bench", "collectives", "-tp", "2", "--sizes", "4X"],
            "numbers of bytes from 1 to 1G, such as 4096, 64K or 1M; got 4X",
        ),
        (["bench", "collectives", "-tp", "2", "--sizes", "2G"], "got 2G"),
        (["bench", "collectives", "-tp", "2", "-dp", "2"], "--data-parallel-size"),
        (["doctor", "-tp", "2"], "2 ranks are checked with --parallel; add it"),
    ],
)
def test_wrong_use(line, message, capsys):
    assert main(line) == 2
    assert message in capsys.readouterr().err


def test_variables_of_nccl():
    def problems(**variables):
        return [remark.text for remark in check_variables(variables, ["lo", "eth0"])]

    assert problems(NCCL_P2P_DISABLE="0", NCCL_SOCKET_IFNAME="eth") == []
    assert problems(NCCL_SOCKET_IFNAME="^docker") == problems(NCCL_SOCKET_IFNAME="=eth0,eth1") == []
    assert problems(NCCL_P2P_DISABLE="1") == ["NCCL_P2P_DISABLE=1: NCCL copies through host memory"]
    [wrong] = problems(NCCL_SOCKET_IFNAME="=eth")
    assert "names no interface of this machine; it has lo, eth0" in wrong
