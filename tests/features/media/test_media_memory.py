"""`quire plan` counts encoder and encoder cache of models that read images, as an engine holds them."""

import pytest
from media_models import MediaCase

from quire import LLM
from quire.cli.memory_plan import make_plan
from quire.cli.plan import render, size
from quire.config.args import EngineArgs
from quire.config.memory import largest_step
from quire.features.media.device import MediaPart

ARGS = {"dtype": "float32", "max_num_batched_tokens": 64, "max_model_len": 512, "max_num_seqs": 4}
OFF = {"image": 0, "video": 0}
WIDTH = 32  # of the language model


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    return MediaCase("qwen3-vl", tmp_path_factory.mktemp("plan"))


def plan(case, **options):
    args = EngineArgs.from_kwargs(model=str(case.directory), device="cuda", enforce_eager=True, **ARGS, **options)
    return make_plan(args, 4 << 30)


def test_encoder_and_its_cache_take_memory_from_pages(case):
    weights = 4 * sum(values.numel() for name, values in case.model.named_parameters() if ".visual." in name)
    whole, without, small = plan(case), plan(case, limit_mm_per_prompt=OFF), plan(case, mm_encoder_cache_size=1000)
    assert (whole.encoder_weights, without.encoder_weights, without.encoder_cache) == (weights, 0, 0)
    assert whole.encoder_cache == whole.encoder_embeddings * case.family.levels * WIDTH * 4
    assert (small.encoder_embeddings, small.encoder_cache) == (1000, 1000 * case.family.levels * WIDTH * 4)
    assert small.cache - whole.cache == whole.encoder_cache - small.encoder_cache
    steps = whole.activations - without.activations
    assert steps > 0
    assert without.cache - whole.cache == weights + whole.encoder_cache + steps
    assert plan(case, skip_mm_profiling=True).activations == without.activations
    assert f"its cache {size(small.encoder_cache)} for 1,000 embeddings" in render(small)
    assert "encoder" not in render(without)


def test_each_rank_has_the_whole_encoder(case):
    one, two = plan(case, tensor_parallel_size=1), plan(case, tensor_parallel_size=2)
    assert (two.encoder_weights, two.encoder_cache) == (one.encoder_weights, one.encoder_cache)
    language = 4 * sum(values.numel() for name, values in case.model.named_parameters() if ".visual." not in name)
    assert abs(two.cache + two.collectives - one.cache - language // 2) < 16


def test_an_engine_holds_what_the_plan_says(case):
    found = plan(case)
    with LLM(str(case.directory), device="cpu", kv_cache_memory_bytes=1 << 20, **ARGS) as llm:
        runner = llm.llm_engine.core.executor._runner
        assert 4 * llm.collective_rpc("describe_rank")[0]["encoder_parameters"] == found.encoder_weights
        beyond = max(0, found.activations - largest_step(llm.llm_engine.config))
        assert runner.part(MediaPart).reserved_bytes(4, False) == found.encoder_cache + beyond
        assert llm.llm_engine.core.scheduler._encoding._capacity == found.encoder_embeddings
