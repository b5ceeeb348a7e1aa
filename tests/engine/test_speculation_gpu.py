"""On a GPU: rows with drafts are replayed as rows of one token each, a step ahead where there are none, and change no token."""

import random

import pytest
from test_draft_heads import eagle, model, trained  # noqa: F401
from test_speculation import DRAFTERS, STEM, same, some_params
from tiny import make_model, open_model

from quire.features.speculation.device.part import SpeculationPart

pytestmark = pytest.mark.gpu
CLOSE = 1e-4  # of logprobs: batches of other sizes add in another order
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
        same(llm.generate(prompts, params, use_tqdm=False), answers, CLOSE)
    core.step()
    core.scheduler.roster.check()
    drafts = core.stats.drafts
    assert graphs.replays > 50 and core.stats.free_pages == core.stats.pages
    if not adaptive:
        assert drafts.tokens > 50
        assert not drafts.accepted if name == "wrong" else drafts.accepted > 0
    llm.llm_engine.shutdown()


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize("name", ["itself", "eagle3", "medusa", "eagle"])
def test_models_and_heads(name, eager, model, trained, eagle):  # noqa: F811
    rng = random.Random(7)
    prompts = [{"prompt_token_ids": [*STEM[: rng.choice((1, 9, 33, 60))], rng.randrange(5, 9)]} for _ in range(16)]
    params = [some_params(rng, ["the", "a"]) for _ in prompts]
    answers = open_model(model, **ARGS, enforce_eager=eager).generate(prompts, params, use_tqdm=False)
    path = {"itself": model, "eagle": eagle[0]}.get(name) or trained[name]
    asked = {"model": str(path), "num_speculative_tokens": 3, **({"method": "eagle"} if name == "eagle" else {})}
    asked["adaptive"] = False
    llm = open_model(model, **ARGS, enforce_eager=eager, speculative_config=asked)
    core, runner = llm.llm_engine.core, llm.llm_engine.core.executor._runner
    assert core.depth == (name == "itself")
    for _ in range(2):
        same(llm.generate(prompts, params, use_tqdm=False), answers, CLOSE)
    core.step()
    core.scheduler.roster.check()
    assert core.stats.drafts.tokens > 50 and core.stats.free_pages == core.stats.pages
    assert name == "eagle" or core.stats.drafts.accepted > 0
    if not eager:
        assert runner.graphs.replays > 20
        assert name != "itself" or runner.part(SpeculationPart).drafter._graphs.replays > 40
    llm.llm_engine.shutdown()
