"""A draft model with another vocabulary: the same tokens, and sooner where both read a text alike."""

import json
import logging
import random
import shutil

import pytest
from test_speculation import STEM, same, some_params
from tiny import make_model, open_model

from quire import SamplingParams
from quire.types.errors import ModelError
from twin_model import make_twin, pad, say_words

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
PROMPTS = ["the quick brown fox", "a page is a page,", "héllo wörld ☃ 漢字", "the quick brown fox jumps over"]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    model = say_words(make_model(tmp_path_factory.mktemp("words")))
    return model, make_twin(tmp_path_factory.mktemp("twin"), model)


@pytest.fixture(scope="module")
def expected(models):
    """Requests of all kinds, and the answers without drafts."""
    llm, rng = open_model(models[0], dtype="float32"), random.Random(5)
    prompts = [*PROMPTS, *({"prompt_token_ids": [*STEM[: rng.choice((1, 9, 33))], rng.randrange(5, 99)]} for _ in range(12))]
    params = [GREEDY] * len(PROMPTS) + [some_params(rng, ["the", "a"]) for _ in prompts[len(PROMPTS) :]]
    params[4] = SamplingParams(temperature=0.9, seed=3, n=3, max_tokens=12, ignore_eos=True)
    answers = llm.generate(prompts, params, use_tqdm=False)
    llm.llm_engine.shutdown()
    return prompts, params, answers


def start(models, **more):
    asked = {"model": str(models[1]), "num_speculative_tokens": 3, **more}
    return open_model(
        models[0],
        dtype="float32",
        max_num_seqs=6,
        num_gpu_blocks_override=36,
        max_num_batched_tokens=24,
        speculative_config=asked,
    )


@pytest.fixture(scope="module")
def llm(models):
    llm = start(models, adaptive=False)
    yield llm
    llm.llm_engine.shutdown()


def test_the_same_tokens(llm, expected):
    """In little memory: with preemption, pieces of prompts, prefix hits and forks; twice."""
    prompts, params, answers = expected
    same(llm.generate(prompts, params, use_tqdm=False), answers)
    same(llm.generate(prompts[::-1], params[::-1], use_tqdm=False), answers[::-1])
    core = llm.llm_engine.core
    core.step()
    core.scheduler.roster.check()
    drafter = core.scheduler.speculation._batch_drafter
    assert not drafter._broken and not drafter._readers and core.stats.preemptions > 0
    assert core.stats.free_pages == core.stats.pages and drafter._core.stats.free_pages == drafter._core.stats.pages


def test_what_both_read_alike_is_right(llm):
    before = llm.llm_engine.core.stats.drafts
    llm.generate(PROMPTS[1], GREEDY, use_tqdm=False)
    after = llm.llm_engine.core.stats.drafts
    assert after.accepted - before.accepted == after.tokens - before.tokens == 24 - 1 - (after.rows - before.rows)


def test_tokens_that_its_model_does_not_have(llm, expected, monkeypatch):
    """Texts with such have no drafts, and others do."""
    prompts, params, answers = expected
    drafter, before = llm.llm_engine.core.scheduler.speculation._batch_drafter, llm.llm_engine.core.stats.drafts
    monkeypatch.setattr(drafter, "_rows", 2)
    same(llm.generate(prompts[:5], params[:5], use_tqdm=False), answers[:5])
    assert llm.llm_engine.core.stats.drafts == before and not drafter._broken
    monkeypatch.undo()
    llm.generate(PROMPTS[1], GREEDY, use_tqdm=False)
    assert llm.llm_engine.core.stats.drafts.accepted > before.accepted


def test_a_recurrent_model_drafts(models, expected, tmp_path):
    """It has states and no pages."""
    transformers = pytest.importorskip("transformers")
    size = json.loads((models[1] / "config.json").read_text())["vocab_size"]
    config = transformers.MambaConfig(vocab_size=size, hidden_size=16, num_hidden_layers=1)
    transformers.MambaForCausalLM(config).save_pretrained(tmp_path)
    for file in models[1].glob("tokenizer*"):
        shutil.copy(file, tmp_path)
    llm = start((models[0], tmp_path), adaptive=False, use_heterogeneous_vocab=True)
    prompts, params, answers = expected
    same(llm.generate(prompts[:6], params[:6], use_tqdm=False), answers[:6])
    assert llm.llm_engine.core.stats.drafts.rows > 0
    llm.llm_engine.shutdown()


@pytest.mark.parametrize("harm", [{"model": {"vocab": [[], [1]]}}, {"added_tokens": [{"id": float("inf"), "content": "x"}]}])
def test_a_tokenizer_that_cannot_be_read(models, tmp_path, harm):
    shutil.copytree(models[1], tmp_path, dirs_exist_ok=True)
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | harm).replace("Infinity", "1e400"))
    with pytest.raises(ModelError, match=f"{tmp_path}/tokenizer.json: .* cannot read it"):
        start((models[0], tmp_path))


def test_one_that_fails_costs_nobody_an_answer(models, expected, caplog, monkeypatch):
    prompts, params, answers = expected
    llm = start(models)  # as many as pay
    drafter = llm.llm_engine.core.scheduler.speculation._batch_drafter
    same(llm.generate(prompts[:5], params[:5], use_tqdm=False), answers[:5])
    llm.llm_engine.core.scheduler.speculation._adaptive = False
    monkeypatch.setattr(drafter._core, "step", lambda: 1 / 0)
    with caplog.at_level(logging.ERROR):
        same(llm.generate(prompts[:5], params[:5], use_tqdm=False), answers[:5])
    assert sum("the draft model failed" in record.message for record in caplog.records) == 1
    llm.llm_engine.shutdown()


@pytest.mark.parametrize("more", [3, -7])
def test_a_vocabulary_that_is_padded_otherwise_is_the_same(models, expected, tmp_path, more):
    """Its model drafts by tokens. Of the 320 numbers here, the last are no tokens."""
    padded = pad(tmp_path / "padded", models[0], more)
    prompts, params, answers = expected
    llm = open_model(
        models[0], dtype="float32", speculative_config={"model": str(padded), "num_speculative_tokens": 3, "adaptive": False}
    )
    core = llm.llm_engine.core
    assert not core.scheduler.speculation.by_host
    same(llm.generate(prompts, params, use_tqdm=False), answers)
    before = core.stats.drafts
    llm.generate([{"prompt_token_ids": [319, 5, 6, 7]}, PROMPTS[1]], GREEDY, use_tqdm=False)  # the first is none
    after = core.stats.drafts
    assert after.accepted - before.accepted > 24 - 1 - 10
    llm.llm_engine.shutdown()
