"""Drafts in a pipeline: random requests with every parameter have the tokens that one process without drafts gives them, and
every stage has a step."""

import random
from collections import Counter

import pytest
from test_draft_heads import eagle, write  # noqa: F401
from test_speculation import DRAFTERS, RIGHT, STEM, WRONG, same, some_params
from tiny import make_model, open_model

from forked import nursery
from quire.engine.executor import workers
from quire.features.speculation.device.drafter import DeviceDrafter
from quire.types.errors import ConfigError

FEW = {"max_num_seqs": 6, "num_gpu_blocks_override": 40, "max_num_batched_tokens": 24}  # some have to give way


@pytest.fixture(scope="module", autouse=True)
def _forked(tmp_path_factory):
    with nursery(tmp_path_factory.mktemp("nursery"), "rank") as command, pytest.MonkeyPatch.context() as patch:
        patch.setattr(workers, "COMMAND", command)
        yield


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """A model, requests, and what one process answers without drafts."""
    directory = make_model(tmp_path_factory.mktemp("staged"), eos_token_id=[1, 250], num_hidden_layers=3)
    llm = open_model(directory, dtype="float32")
    rng = random.Random(28)
    prompts = [{"prompt_token_ids": [*STEM[: rng.choice((1, 2, 9, 17, 33, 60))], rng.randrange(5, 9)]} for _ in range(16)]
    params = [some_params(rng, ["the", "qu", "a"]) for _ in prompts]
    answers = llm.generate(prompts, params, use_tqdm=False)
    llm.llm_engine.shutdown()
    return directory, prompts, params, answers


@pytest.mark.parametrize(
    ("name", "drafter", "grid"),
    [("suffix", DRAFTERS["suffix"], (1, 2)), ("right", RIGHT, (2, 2)), ("wrong", WRONG, (1, 3))],
    ids=["suffix, 2 stages", "right, 2 stages of 2 ranks", "wrong, 3 stages"],
)
def test_the_same_tokens(expected, name, drafter, grid, monkeypatch):
    directory, prompts, params, answers = expected
    llm = open_model(
        directory, dtype="float32", tensor_parallel_size=grid[0], pipeline_parallel_size=grid[1], **FEW,
        speculative_config={**drafter, "adaptive": False},
    )  # fmt: skip
    try:
        core, in_flight = llm.llm_engine.core, Counter()
        submit = core.executor.submit

        def note(plan):
            flight = submit(plan)
            if plan.drafts.any():
                in_flight[len(core.executor._open)] += 1
            return flight

        monkeypatch.setattr(core.executor, "submit", note)
        same(llm.generate(prompts, params, use_tqdm=False), answers)
        same(llm.generate(prompts[::-1], params[::-1], use_tqdm=False), answers[::-1])  # it knows the answers now
        core.step()
        core.scheduler.roster.check()
        stats = core.stats
        assert stats.free_pages == stats.pages and stats.preemptions > 0 and stats.drafts.tokens > 50
        assert stats.hits > 0
        accepted = {"suffix": 0 < stats.drafts.accepted < stats.drafts.tokens, "wrong": not stats.drafts.accepted}
        assert accepted.get(name, stats.drafts.accepted > 0.9 * stats.drafts.tokens)
        assert in_flight[grid[1]] > 0  # others' steps beside rows with drafts
    finally:
        llm.llm_engine.shutdown()


@pytest.mark.parametrize(("name", "grid"), [("itself", (2, 2)), ("head", (1, 2))])
def test_models_that_draft(expected, eagle, name, grid, monkeypatch):  # noqa: F811
    """On the first stage, a step at a time. They guess what they guess in one process: a head reads the last stage's states."""
    directory, prompts, params, answers = expected
    drafter = {"model": str(directory if name == "itself" else eagle[0]), "num_speculative_tokens": 3, "adaptive": False}
    guessed, heard, told = DeviceDrafter.guessed, {}, []

    def note(self, plan):
        found = guessed(self, plan)
        heard[plan.step] = found.tolist()
        return found

    monkeypatch.setattr(DeviceDrafter, "guessed", note)
    free = [i for i, each in enumerate(params) if not each.needs_masks]  # whose steps wait for nobody
    for more in ({}, {"tensor_parallel_size": grid[0], "pipeline_parallel_size": grid[1]}):
        llm = open_model(directory, dtype="float32", speculative_config=drafter, **FEW, **more)
        try:
            outputs = llm.generate([prompts[i] for i in free], [params[i] for i in free], use_tqdm=False)
            same(outputs, [answers[i] for i in free])
            told.append((dict(heard), llm.llm_engine.core.stats.drafts))
            if name == "itself":
                same(llm.generate(prompts, params, use_tqdm=False), answers)
            heard.clear()
        finally:
            llm.llm_engine.shutdown()
    assert told[0] == told[1] and told[0][1].tokens > 50


def test_what_cannot_be_had(expected, tmp_path):
    directory = expected[0]
    two = {"pipeline_parallel_size": 2}
    with pytest.raises(ConfigError, match="async_scheduling plans steps before the last one's"):
        open_model(directory, **two, async_scheduling=True, speculative_config={"model": str(directory)})
    config = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 48}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1, "vocab_size": 320}
    write(tmp_path, {}, config)
    with pytest.raises(ConfigError, match="method eagle3 is not supported with pipeline_parallel_size=2: it reads the states"):
        open_model(directory, **two, speculative_config={"model": str(tmp_path), "method": "eagle3"})
