"""Pages that come back to a GPU from host memory and disk: the tokens are those of an engine without tiers."""

from pathlib import Path

import pytest
from test_disk_tier import start, stop
from test_host_tier import check, counts, plain_turns, turns

from quire import LLM

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("exact_products")]
GPU = {"device": "cuda", "dtype": "float32"}


@pytest.mark.parametrize("args", [{}, {"enforce_eager": True}, {"kv_cache_dtype": "fp8_e4m3"}, {"kv_offloading_eager": True}])
def test_grouped_heads_come_back(model: str, args: dict):
    check(model, plain_turns(model, **GPU, **args), **GPU, **args)


@pytest.mark.parametrize(("family", "pages"), [("mistral-window", 30), ("qwen2-some-windows", 64), ("deepseek-v2", 30)])
def test_windows_and_latents_come_back(checkpoint, family: str, pages: int):
    directory = str(checkpoint(family).directory)
    args = {**GPU, "skip_tokenizer_init": True, "num_gpu_blocks_override": pages}
    check(directory, plain_turns(directory, **args), **args)


def test_the_next_engine_finds_pages_on_disk(model: str, tmp_path: Path):
    expected = plain_turns(model, **GPU)
    for start_number in range(2):
        llm: LLM = start(model, tmp_path, **GPU)
        assert bool(counts(llm).on_disk) == bool(start_number)
        assert turns(llm) == expected
        assert counts(llm).lost == 0 and (counts(llm).read > 0 or not start_number)
        stop(llm)
