"""Images and videos on a GPU: decode steps in CUDA graphs and outside of them give transformers' tokens, also where rotary
positions differ from positions."""

import pytest
from media_models import MediaCase

from quire import LLM, SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("processed_here", "exact_products")]

TOKENS = 24
GREEDY = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
CLOSE = {"float32": 1e-3, "bfloat16": 0.3}  # log-probabilities of which either may be the larger one


@pytest.fixture(scope="module", params=["llava", "qwen2.5-vl"])
def case(request, tmp_path_factory):
    return MediaCase(request.param, tmp_path_factory.mktemp(request.param))


def check(case, outputs, asked, close):
    """Compare tokens with transformers', up to one that is as likely as its."""
    compared = 0
    for output, parts in zip(outputs, asked, strict=True):
        tokens, logprobs = case.answer(output.prompt_token_ids, parts, TOKENS)
        for step, (found, wanted) in enumerate(zip(output.outputs[0].token_ids, tokens, strict=True)):
            if found != wanted:
                assert logprobs[step, wanted] - logprobs[step, found] < close, (asked.index(parts), step)
                break
            compared += 1
    assert compared > TOKENS * len(asked) // 4


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("eager", [False, True])
def test_tokens(case, dtype, eager):
    asked = case.prompts
    options = {"enforce_eager": eager, "kv_cache_memory_bytes": 1 << 26, "max_num_batched_tokens": 64, "max_num_seqs": 8}
    with LLM(str(case.directory), device="cuda", dtype=dtype, max_model_len=1024, **options) as llm:
        prompts = [case.prompt(parts) for parts in asked]
        for _ in range(3):  # the first time graphs are recorded; later prompts come from the prefix cache
            check(case, llm.generate(prompts, GREEDY, use_tqdm=False), asked, CLOSE[dtype])
        check(case, llm.generate(prompts[0], GREEDY, use_tqdm=False), asked[:1], CLOSE[dtype])
        graphs = llm.llm_engine.core.executor._runner.graphs
        assert (graphs is None) == eager
        if not eager:
            assert graphs.replays > TOKENS
            # with rotary positions that differ from positions
            assert any(True in bucket.keys for bucket in graphs._recorded) == (case.family.rotary_axes > 1)
