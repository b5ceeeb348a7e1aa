"""A closed or deleted LLM gives everything back: processes, threads, files, and memory of a GPU."""

import gc
import weakref

import pytest
import torch
from tiny import TEXT, open_model
from torch import distributed as dist

from quantized_checkpoints import write
from quire import LLM, LoRARequest, SamplingParams, StructuredOutputsParams
from quire.device.cuda import shared_bytes
from quire.device.cuda.nccl import LOOPBACK, NCCL
from quire.dist.mesh import Position
from quire.types.errors import EngineDead

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
PROMPTS = [list(range(3, 3 + count)) for count in (40, 5, 18)]
CACHE_BYTES = 4 << 30
WORKSPACE_BYTES = 1 << 28  # what cuBLAS keeps
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


@pytest.mark.parametrize(
    "use",
    [
        lambda llm: llm.reset_prefix_cache(),
        lambda llm: llm.collective_rpc("check_health"),
        lambda llm: llm.generate("a", SamplingParams(structured_outputs=StructuredOutputsParams(regex="a+"))),
        lambda llm: llm.llm_engine.add_lora(LoRARequest("x", 1, "x")),
        lambda llm: llm.llm_engine.remove_lora(1),
        lambda llm: llm.llm_engine.pin_lora(1),
    ],
)
def test_a_closed_llm_refuses_everything_that_its_engine_would_do(closed, use):
    with pytest.raises(EngineDead, match="has been shut down"):
        use(closed)


@pytest.fixture(scope="module")
def closed(tiny_model):
    llm = open_model(tiny_model)
    llm.close()
    return llm


def test_closing_during_a_step_ends_generate_with_the_reason(tiny_model, monkeypatch):
    llm = open_model(tiny_model)
    core = llm.llm_engine.core
    step = core.step

    def close_first():
        llm.close()
        return step()

    monkeypatch.setattr(core, "step", close_first)
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
    """Start an LLM whose cache has 4 GiB: tests in other processes use the same card."""
    settings = {"device": "cuda", "dtype": "bfloat16", "skip_tokenizer_init": True, "max_num_seqs": 64}
    llm = LLM(str(model), **{**settings, "kv_cache_memory_bytes": CACHE_BYTES, **options})
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    answers = [list(output.outputs[0].token_ids) for output in llm.generate(prompts, GREEDY, use_tqdm=False)]
    return llm, answers


@pytest.fixture
def is_given_back():
    """Check that no more of the card is reserved than before the test: other tests may hold engines in this process."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()

    def check():
        assert torch.cuda.memory_reserved() < before + WORKSPACE_BYTES

    return check


@pytest.mark.gpu
@pytest.mark.parametrize("feature", FEATURES)
def test_a_deleted_llm_gives_back_the_cards_memory(tiny_model, feature, is_given_back):
    seen = []
    for _ in range(3):
        llm, answers = on_the_card(tiny_model, **FEATURES[feature])
        del llm
        is_given_back()
        seen.append(answers)
    assert seen[0] == seen[1] == seen[2]


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["bamba", "mixtral", "deepseek-v3"])
def test_other_families_give_it_back_too(checkpoint, family, is_given_back):
    for _ in range(2):
        llm, _ = on_the_card(checkpoint(family).directory)
        llm.close()
        is_given_back()


@pytest.mark.gpu
def test_quantized_weights_are_given_back_too(tmp_path, is_given_back):
    directory = write("awq", tmp_path)
    for _ in range(2):
        llm, _ = on_the_card(directory)
        del llm
        is_given_back()


@pytest.mark.gpu
def test_ranks_unmap_the_memory_that_they_share(tiny_model, monkeypatch):
    monkeypatch.setenv("QUIRE_CUDA_RANKS", "1")
    released = []

    def spy(name):
        release = getattr(shared_bytes, name)
        monkeypatch.setattr(f"quire.device.cuda.host_group.{name}", lambda memory: released.append((name, release(memory))))

    spy("free_bytes")
    spy("close_bytes")
    for _ in range(2):
        llm, _ = on_the_card(tiny_model, tensor_parallel_size=2)
        del llm
    assert released == [("close_bytes", None), ("free_bytes", None)] * 2


@pytest.mark.gpu
def test_two_groups_and_the_programs_own_live_in_one_process(tmp_path):
    """NCCL takes one rank for each card, so these have one rank each."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        for _ in range(2):
            ranks = NCCL(Position(0, 1), lambda message: [message], LOOPBACK, torch.device("cuda"), lambda seconds: None)
            part = torch.randn(1 << 20, device="cuda")
            assert torch.equal(ranks.gather(part)[0], part) and torch.equal(ranks.add(part), part)
            ranks.close()
    finally:
        dist.destroy_process_group()
