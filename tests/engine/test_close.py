"""A closed or deleted LLM gives everything back: processes, threads, files, and memory of a GPU."""

import gc
import weakref

import pytest
import torch
from tiny import TEXT, open_model

from quantized_checkpoints import write
from quire import LLM, SamplingParams
from quire.types.errors import EngineDead

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
PROMPTS = [list(range(3, 3 + count)) for count in (40, 5, 18)]
FEATURES = {
    "plain": {},
    "eager": {"enforce_eager": True},
    "lora": {"enable_lora": True, "max_loras": 2},
    "ngram": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    "fp8 cache": {"kv_cache_dtype": "fp8"},
}


def weights(llm):
    return weakref.ref(next(llm.llm_engine.core.executor._runner._model.parameters()))


def test_a_closed_llm_gives_back_its_weights_and_refuses_requests(tiny_model, traces):
    llm = open_model(tiny_model)
    kept = weights(llm)
    llm.close()
    llm.close()
    gc.collect()
    assert kept() is None
    with pytest.raises(EngineDead, match="has been shut down"):
        llm.generate(TEXT, GREEDY, use_tqdm=False)


def test_a_with_statement_closes(tiny_model):
    with open_model(tiny_model) as llm:
        kept = weights(llm)
        assert llm.generate(TEXT[0], GREEDY, use_tqdm=False)[0].finished
    gc.collect()
    assert kept() is None


@pytest.mark.parametrize("size", [{}, {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=str)
def test_a_deleted_llm_leaves_nothing_behind(tiny_model, size, traces):
    for _ in range(2):
        llm = open_model(tiny_model, **size)
        assert llm.generate(TEXT[0], GREEDY, use_tqdm=False)[0].finished
        kept = weights(llm)
        del llm
        gc.collect()
        assert kept() is None


def test_a_failed_start_gives_back_its_weights(tiny_model, monkeypatch, traces):
    kept = []

    def fail(runner, *_):
        kept.append(weakref.ref(next(runner._model.parameters())))
        raise RuntimeError("no cache")

    monkeypatch.setattr("quire.runner.step.Runner.allocate", fail)
    with pytest.raises(RuntimeError, match="no cache") as caught:
        open_model(tiny_model)
    gc.collect()
    assert caught.value is not None and kept[0]() is None  # although the traceback is still held


def on_the_card(model, **options):
    llm = LLM(str(model), device="cuda", dtype="bfloat16", skip_tokenizer_init=True, max_num_seqs=64, **options)
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    answers = [list(output.outputs[0].token_ids) for output in llm.generate(prompts, GREEDY, use_tqdm=False)]
    return llm, answers


@pytest.mark.gpu
@pytest.mark.parametrize("feature", FEATURES)
def test_the_next_llm_has_the_whole_card(tiny_model, feature):
    """Each takes nearly all memory that is free."""
    seen = []
    for _ in range(3):
        llm, answers = on_the_card(tiny_model, gpu_memory_utilization=0.85, **FEATURES[feature])
        pages = llm.llm_engine.core.stats.pages
        del llm
        seen.append((answers, torch.cuda.memory_allocated() >> 26))
        assert torch.cuda.memory_reserved() < 1 << 28, pages
    assert seen[0] == seen[1] == seen[2]


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["bamba", "mixtral", "deepseek-v3"])
def test_other_families_give_it_back_too(checkpoint, family):
    for _ in range(2):
        llm, _ = on_the_card(checkpoint(family).directory, gpu_memory_utilization=0.85)
        llm.close()
        assert torch.cuda.memory_reserved() < 1 << 28


@pytest.mark.gpu
def test_quantized_weights_are_given_back_too(tmp_path):
    directory = write("awq", tmp_path)
    for _ in range(2):
        llm, _ = on_the_card(directory, gpu_memory_utilization=0.85)
        del llm
        assert torch.cuda.memory_reserved() < 1 << 28


@pytest.mark.gpu
@pytest.mark.parametrize("size", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=str)
def test_ranks_that_share_a_card_give_it_back(tiny_model, size, monkeypatch):
    monkeypatch.setenv("QUIRE_CUDA_RANKS", "1")
    free = []
    for _ in range(3):
        llm, _ = on_the_card(tiny_model, kv_cache_memory_bytes=1 << 28, **size)
        del llm
        free.append(torch.cuda.mem_get_info()[0])
    assert free[2] >= free[0]  # the first start loaded kernels, which stay
