"""Ranks on GPUs: two of them on one card add the same, and give the tokens of one process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from quire import LLM, SamplingParams
from quire.types.errors import ConfigError

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


@pytest.mark.gpu
def test_each_has_a_gpu_unless_they_are_to_share(tiny_model, monkeypatch):
    monkeypatch.delenv("QUIRE_CUDA_RANKS", raising=False)
    count = torch.cuda.device_count()
    with pytest.raises(ConfigError, match=rf"and {count} are visible; .* QUIRE_CUDA_RANKS=1 lets ranks share a GPU"):
        LLM(str(tiny_model), device="cuda", tensor_parallel_size=count + 1)
