"""Ranks on GPUs: two of them on one card add the same, and give the tokens of one process."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny import TEXT

from mps import mps
from quire import LLM, SamplingParams
from quire.device.cuda.group import COLLECTIVES
from quire.types.errors import ConfigError

RANKS = Path(__file__).with_name("cuda_ranks.py")
SUMS = Path(__file__).with_name("cuda_sums.py")
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)


@pytest.mark.gpu
def test_parts_are_added_in_the_order_of_ranks():
    ran = subprocess.run([sys.executable, str(SUMS)], env=os.environ, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "the same bits" in ran.stdout


@pytest.mark.gpu
def test_two_ranks_on_one_card(tiny_model, monkeypatch):
    monkeypatch.setenv("QUIRE_CUDA_RANKS", "1")
    settings = {"device": "cuda", "dtype": "float32", "kv_cache_memory_bytes": 64 << 20, "skip_tokenizer_init": True}
    prompts = [list(range(3, 3 + n)) for n in (33, 5, 18)]
    said = []
    for size in (1, 2):
        llm = LLM(str(tiny_model), tensor_parallel_size=size, enforce_eager=True, **settings)
        said.append([list(output.outputs[0].token_ids) for output in llm.generate(prompts, GREEDY, use_tqdm=False)])
        llm.llm_engine.shutdown()
    assert said[0] == said[1]


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["bamba", "mamba2", "jamba", "qwen3-next", "kimi-linear", "lfm2", "minimax"])
def test_two_ranks_of_recurrent_layers_on_one_card(checkpoint, family, monkeypatch):
    monkeypatch.setenv("QUIRE_CUDA_RANKS", "1")
    settings = {"device": "cuda", "dtype": "float32", "kv_cache_memory_bytes": 256 << 20, "skip_tokenizer_init": True}
    prompts = [list(range(3, 3 + n)) for n in (33, 5, 18)]
    said = []
    for size in (1, 2):
        llm = LLM(str(checkpoint(family).directory), tensor_parallel_size=size, max_num_seqs=4, block_size=16, **settings)
        for _ in range(2):  # the second time from saved states
            said.append([list(output.outputs[0].token_ids) for output in llm.generate(prompts, GREEDY, use_tqdm=False)])
        llm.llm_engine.shutdown()
    assert said == [said[0]] * 4


def tokens_of(directory, **sizes):
    """Twice: the second time from cached prefixes, or from saved states."""
    settings = {"device": "cuda", "dtype": "float32", "kv_cache_memory_bytes": 256 << 20, "skip_tokenizer_init": True}
    llm = LLM(str(directory), max_num_seqs=4, block_size=16, **settings, **sizes)
    prompts = [list(range(3, 3 + n)) for n in (33, 5, 18)]
    said = [[list(output.outputs[0].token_ids) for output in llm.generate(prompts, GREEDY, use_tqdm=False)] for _ in range(2)]
    llm.llm_engine.shutdown()
    return said


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["bamba", "mamba2", "jamba", "qwen3-next", "lfm2"])
def test_two_stages_of_recurrent_layers_on_one_card(checkpoint, family, monkeypatch):
    monkeypatch.setenv("QUIRE_CUDA_RANKS", "1")
    directory = checkpoint(family).directory
    assert tokens_of(directory, pipeline_parallel_size=2) == tokens_of(directory)


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}])
def test_a_draft_model_on_two_ranks_of_one_card(tiny_model, sizes, monkeypatch):
    """It is whole on both ranks of the first stage. Its own drafts are all accepted."""
    monkeypatch.setenv("QUIRE_CUDA_RANKS", "1")
    drafts = {"method": "draft_model", "model": str(tiny_model), "num_speculative_tokens": 3}
    assert tokens_of(tiny_model, speculative_config=drafts, **sizes) == tokens_of(tiny_model)


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [1, 2])
def test_engines_that_share_experts_on_one_card(checkpoint, ranks, monkeypatch):
    monkeypatch.setenv("QUIRE_CUDA_RANKS", "1")
    directory = checkpoint("mixtral").directory
    shared = tokens_of(directory, data_parallel_size=2, enable_expert_parallel=True, tensor_parallel_size=ranks)
    assert shared == tokens_of(directory)


@pytest.mark.gpu
def test_two_nodes_on_one_card(tiny_model, monkeypatch):
    """Their sums go through host memory: NCCL refuses two ranks on one GPU."""
    monkeypatch.setenv("QUIRE_CUDA_RANKS", "1")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    where = ["--nnodes", "2", "--node-rank", "1", "--master-addr", "127.0.0.1", "--master-port", str(port)]
    command = [sys.executable, "-m", "quire", "serve", str(tiny_model), "--headless", "-tp", "2", *where]
    with subprocess.Popen(command) as other:
        try:
            assert tokens_of(tiny_model, tensor_parallel_size=2, nnodes=2, master_port=port) == tokens_of(tiny_model)
            assert other.wait(60) == 0
        finally:
            other.kill()


@pytest.mark.gpu
def test_each_has_a_gpu_unless_they_are_to_share(tiny_model, monkeypatch):
    monkeypatch.delenv("QUIRE_CUDA_RANKS", raising=False)
    count = torch.cuda.device_count()
    with pytest.raises(ConfigError, match=rf"and {count} are visible; .* QUIRE_CUDA_RANKS=1 lets ranks share a GPU"):
        LLM(str(tiny_model), device="cuda", tensor_parallel_size=count + 1)


@pytest.fixture
def symmetric(tmp_path):
    """Environment of processes whose ranks share the GPU and use collectives on it. MPS may not outlive a killed process."""
    with mps(tmp_path) as settings:
        yield settings | {"QUIRE_CUDA_RANKS": "1", COLLECTIVES: "symmetric"}


def run_ranks(symmetric, model, *what):
    settings = os.environ | symmetric | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, str(RANKS), str(model), *what]
    ran = subprocess.run(command, env=settings, capture_output=True, text=True, timeout=420, check=False)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


@pytest.mark.gpu
def test_sums_of_the_symmetric_kernel(symmetric):
    settings = os.environ | symmetric
    ran = subprocess.run([sys.executable, str(SUMS)], env=settings, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "the same bits" in ran.stdout


@pytest.mark.gpu
def test_ranks_and_stages_replay_graphs_with_the_tokens_of_one(tiny_model, symmetric):
    sizes = [
        {},
        {"tensor_parallel_size": 2},
        {"tensor_parallel_size": 3},
        {"tensor_parallel_size": 2, "enforce_eager": True},
        {"pipeline_parallel_size": 2},
        {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    ]
    one, *others = run_ranks(symmetric, tiny_model, json.dumps(sizes))
    for size, found in zip(sizes[1:], others, strict=True):
        assert found["tokens"] == one["tokens"], size
        assert (found["replays"] > 0) != ("enforce_eager" in size), size
        assert found["exchanges"] == 0, size
        assert all(each["right"] for rank in found["sums"] for each in rank), found["sums"]


@pytest.mark.gpu
@pytest.mark.parametrize(("family", "size"), [("qwen3", 4), ("qwen3-moe", 2)])
def test_four_ranks_and_whole_experts(checkpoint, symmetric, family, size):
    wide = {"tensor_parallel_size": size} | ({"enable_expert_parallel": True} if "moe" in family else {})
    one, ranks = run_ranks(symmetric, checkpoint(family).directory, json.dumps([{}, wide]))
    assert ranks["tokens"] == one["tokens"] and ranks["replays"] > 0 and ranks["exchanges"] == 0


@pytest.mark.gpu
def test_two_engines_of_one_process(tiny_model, symmetric):
    one, *others = run_ranks(symmetric, tiny_model, "beside")
    assert others == [one] * 5


@pytest.mark.gpu
@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize("way", ["SIGKILL", "SIGSTOP"])
def test_a_lost_rank_leaves_nothing_behind(tiny_model, symmetric, rank, way):
    """Kernels of the others wait for it; they end, and the GPU can be used again by the same process."""
    found = run_ranks(symmetric, tiny_model, str(rank), way)
    said = "ended with signal SIGKILL" if way == "SIGKILL" else "is stopped (SIGSTOP)"
    assert found["error"].startswith(f"rank {rank} (process {found['lost']}) {said}")
    assert not any(Path(f"/proc/{pid}").exists() for pid in found["pids"])
    assert found["tokens"] == run_ranks(symmetric, tiny_model, json.dumps([{}]))[0]["tokens"][0]


@pytest.mark.gpu
@pytest.mark.parametrize("way", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("whose", ["engine", "rank"])
def test_streams_outlive_any_lost_rank(tiny_model, symmetric, monkeypatch, whose, way):
    pytest.importorskip("httpx")
    from test_lost_ranks import ranks_of

    from serving import NAME, Running

    for name, value in symmetric.items():
        monkeypatch.setenv(name, value)
    settings = {"device": "cuda", "dtype": "float32", "kv_cache_memory_bytes": 64 << 20, "block_size": 16}
    running = Running(tiny_model, quick=False, tensor_parallel_size=2, **settings)
    try:
        body = {"model": NAME, "prompt": TEXT, "temperature": 0, "ignore_eos": True, "max_tokens": 160}
        alone = running.http.post("/v1/completions", json=body).json()["choices"]
        engine, came, lost = running.llm.engine_pid, [""] * len(TEXT), 0
        with running.http.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    [choice] = json.loads(line.removeprefix("data: "))["choices"]
                    came[choice["index"]] += choice["text"]
                if min(map(len, came)) > 40 and not lost:
                    lost = engine if whose == "engine" else ranks_of(engine)[0]
                    os.kill(lost, way)
        assert came == [choice["text"] for choice in alone] and lost
        assert not Path(f"/proc/{lost}").exists()
    finally:
        running.close()
