"""Ranks that somebody else starts, as torchrun does: two processes run the same script, and both have the same answers."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import external_rank
import pytest

from quire import LLM
from quire.engine.executor.launch import choose_gpu
from quire.types.errors import ConfigError, EngineDead

SIZES = [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}]


@pytest.fixture
def launched(monkeypatch):
    """This process is rank 0 of two."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    ours = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, value in ours.items():
        monkeypatch.setenv(name, value)
    return os.environ | {"RANK": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}


def test_all_ranks_have_the_same_answers(tiny_model, launched, shared_llm):
    script = Path(external_rank.__file__)
    command = [sys.executable, str(script), str(tiny_model), *map(json.dumps, SIZES)]
    with subprocess.Popen(command, env=launched, stdout=subprocess.PIPE, text=True) as other:
        ours = [external_rank.script(str(tiny_model), **size) for size in SIZES]
        assert json.loads(other.stdout.readline()) == json.loads(json.dumps(ours))
        expected = shared_llm.generate(external_rank.PROMPTS, external_rank.GREEDY, use_tqdm=False)
        for said in ours:
            assert [one[0][0] for one in said[0]] == [list(output.outputs[0].token_ids) for output in expected]
            assert said[3].startswith("PromptTooLong") and "regex" in said[4] and said[5:] == [[0, 1], True]
        llm = LLM(
            str(tiny_model), device="cpu", kv_cache_memory_bytes=4 << 20, tensor_parallel_size=2,
            distributed_executor_backend="external_launcher",
        )  # fmt: skip
        with pytest.raises(EngineDead, match="rank 1"):
            llm.generate(external_rank.TEXT[:1], external_rank.GREEDY, use_tqdm=False)
        assert "rank 1 called 'add' and rank 0 'add' with other arguments" in other.stdout.readline()
        llm.llm_engine.shutdown()
    assert other.returncode == 0


@pytest.mark.gpu
def test_two_ranks_on_one_card(tiny_model, launched, monkeypatch):
    """Their sums go through host memory: NCCL refuses two ranks on one GPU."""
    monkeypatch.setenv("QUIRE_CUDA_RANKS", "1")
    sizes = [{"device": "cuda", **size} for size in SIZES]
    command = [sys.executable, external_rank.__file__, str(tiny_model), *map(json.dumps, sizes)]
    environ = launched | {"QUIRE_CUDA_RANKS": "1", "LOCAL_RANK": "1"}
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) as other:
        ours = [external_rank.script(str(tiny_model), **size) for size in sizes]
        assert json.loads(other.stdout.readline()) == json.loads(json.dumps(ours))
    assert other.returncode == 0
    alone = LLM(str(tiny_model), device="cuda", dtype="float32", block_size=16, kv_cache_memory_bytes=4 << 20)
    expected = alone.generate(external_rank.PROMPTS, external_rank.GREEDY, use_tqdm=False)
    for said in ours:
        assert [one[0][0] for one in said[0]] == [list(output.outputs[0].token_ids) for output in expected]


@pytest.mark.parametrize(
    ("environ", "count", "expected"),
    [
        ({"LOCAL_RANK": "3"}, 8, 3),
        ({"LOCAL_RANK": "3"}, 1, 0),  # the launcher shows each rank its own
        ({}, 1, 0),
        ({"LOCAL_RANK": "3", "QUIRE_CUDA_RANKS": "1"}, 2, 1),
        ({"RANK": "5"}, 2, "rank 5: LOCAL_RANK must be the index of its GPU among the 2 of this machine.*; got ''. Set it"),
        ({"RANK": "5", "LOCAL_RANK": "-1"}, 2, "rank 5: LOCAL_RANK must be .*; got '-1'"),
        ({"RANK": "7", "LOCAL_RANK": "3"}, 2, "rank 7: LOCAL_RANK=3 requires 4 GPUs on this machine, and 2 are visible. Start"),
    ],
)
def test_the_gpu_of_a_launched_rank(environ, count, expected):
    if isinstance(expected, int):
        assert choose_gpu(environ, count) == expected
        return
    with pytest.raises(ConfigError, match=expected):
        choose_gpu(environ, count)


def test_what_a_launcher_has_to_tell(tiny_model, monkeypatch):
    def start(**args):
        LLM(str(tiny_model), device="cpu", distributed_executor_backend="external_launcher", **args)

    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match="RANK and WORLD_SIZE and MASTER_ADDR and MASTER_PORT are missing"):
        start(tensor_parallel_size=2)
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "3"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29500")):
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"RANK 1 of WORLD_SIZE 3, but tensor_parallel_size times .* is 2"):
        start(tensor_parallel_size=2)
    monkeypatch.setenv("MASTER_PORT", "x")
    with pytest.raises(ConfigError, match="MASTER_PORT must be numbers"):
        start(tensor_parallel_size=3)
    with pytest.raises(ConfigError, match="is for LLM, whose script every rank runs"):
        start(data_parallel_size=2)
