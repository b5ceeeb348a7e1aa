"""On a GPU: rows with drafts are replayed as rows of one token each, a step ahead where there are none, and change no token."""

import random

import pytest
from test_speculation import DRAFTERS, STEM, same, some_params
from tiny import make_model, open_model

pytestmark = pytest.mark.gpu
ARGS = {"device": "cuda", "dtype": "float32", "max_num_seqs": 6, "num_gpu_blocks_override": 40, "max_num_batched_tokens": 24}


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    directory, rng = make_model(tmp_path_factory.mktemp("speculation")), random.Random(24)
    prompts = [{"prompt_token_ids": [*STEM[: rng.choice((1, 2, 9, 17, 33, 60))], rng.randrange(5, 9)]} for _ in range(24)]
    params = [some_params(rng, ["the", "a"]) for _ in prompts]
    llm = open_model(directory, **ARGS)
    return directory, prompts, params, llm.generate(prompts, params, use_tqdm=False)


@pytest.mark.parametrize("adaptive", [False, True], ids=["always", "adaptive"])
@pytest.mark.parametrize("name", ["ngram", "right", "wrong"])
def test_the_same_tokens(expected, name, adaptive):
    directory, prompts, params, answers = expected
    llm = open_model(directory, **ARGS, speculative_config={**DRAFTERS[name], "adaptive": adaptive})
    core, graphs = llm.llm_engine.core, llm.llm_engine.core.executor._runner.graphs
    assert core.depth == 1
    for _ in range(2):  # by the second time the answers are known
        same(llm.generate(prompts, params, use_tqdm=False), answers)
    core.step()
    core.scheduler.check()
    drafts = core.stats.drafts
    assert graphs.replays > 50 and core.stats.free_pages == core.stats.pages
    if not adaptive:
        assert drafts.tokens > 50
        assert not drafts.accepted if name == "wrong" else drafts.accepted > 0
    llm.llm_engine.shutdown()
