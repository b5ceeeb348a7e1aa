"""Speculation changes no token: random requests with every parameter, through LLM, with every drafter of the host."""

import random

import pytest
from tiny import make_model, open_model

from quire import SamplingParams
from quire.sched.draft.choice import Choice
from quire.types.sampling import RepetitionDetectionParams

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
GRAMMARS = ({"json": SCHEMA}, {"regex": "[a-f ]{3,9}(one|two)[0-9]+x"}, {"choice": ["the quick dog", "the lazy dog", "a"]})
STEM = [5 + i * 7 % 40 for i in range(60)]
RIGHT, WRONG = (
    {"method": "synthetic", "synthetic_acceptance_rates": [rate], "num_speculative_tokens": 5} for rate in (1.0, 0.0)
)
DRAFTERS = {
    "ngram": {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3, "num_speculative_tokens": 4},
    "suffix": {"method": "suffix", "num_speculative_tokens": 7, "suffix_decoding_max_spec_factor": 2.0},
    "right": RIGHT,
    "wrong": WRONG,
    "itself": {"method": "draft_model", "num_speculative_tokens": 3},
    "smaller": {"method": "draft_model", "num_speculative_tokens": 2},
    "custom": {"method": "custom_class", "model": "test_speculation:Last", "num_speculative_tokens": 2},
}


class Last:
    """Everything comes again."""

    def propose(self, text, most):
        return [text.tokens[-1]] * most


def some_params(rng: random.Random, words: list[str]) -> SamplingParams:
    """Of everything that a request may ask for, some."""

    def maybe(value, chance=0.25):
        return value if rng.random() < chance else None

    chosen = {
        "temperature": rng.choice((0.0, 0.0, 0.7, 1.3)),
        "seed": rng.randrange(99),
        "max_tokens": rng.randrange(2, 40),
        "ignore_eos": rng.random() < 0.7,
        "top_p": maybe(0.8), "top_k": maybe(rng.choice((1, 5, 40))), "min_p": maybe(0.05),
        "presence_penalty": maybe(0.8), "frequency_penalty": maybe(0.4), "repetition_penalty": maybe(1.2),
        "logit_bias": maybe({7: 3.0, 60: -4.0, 70: 1.0}),
        "bad_words": maybe([rng.choice(words)]),
        "stop": maybe([rng.choice(words)[:2]]),
        "include_stop_str_in_output": rng.random() < 0.5,
        "stop_token_ids": maybe([rng.randrange(5, 200), 7]),
        "min_tokens": maybe(rng.randrange(1, 9)),
        "allowed_token_ids": maybe(list(range(2, 200)), 0.1),
        "logprobs": maybe(rng.randrange(0, 4), 0.4), "prompt_logprobs": maybe(1, 0.15),
        "n": maybe(rng.randrange(2, 4), 0.15),
        "repetition_detection": maybe(RepetitionDetectionParams(max_pattern_size=3, min_pattern_size=1, min_count=4), 0.1),
    }  # fmt: skip
    kind = rng.random()
    if kind < 0.3:
        chosen["structured_outputs"] = rng.choice(GRAMMARS)
        chosen |= {"bad_words": maybe([rng.choice(("a", "o", "the", "x", "d"))], 0.6), "ignore_eos": rng.random() < 0.3}
        chosen |= {"allowed_token_ids": maybe(list(range(rng.choice((3, 40)), 300)), 0.3)}
        if rng.random() < 0.3:  # ids of letters, which end the text or must not yet
            chosen |= {"min_tokens": rng.randrange(1, 9), "stop_token_ids": rng.sample(range(66, 92), 5)}
    elif kind < 0.4:
        chosen |= {"thinking_token_budget": rng.randrange(2, 12), "thinking_end_ids": rng.choice(([40, 41], [7]))}
        chosen |= {"allowed_token_ids": None, "bad_words": None}
    if chosen["min_tokens"] is not None:
        chosen["min_tokens"] = min(chosen["min_tokens"], chosen["max_tokens"])
    if chosen["temperature"] == 0.0:
        chosen["n"] = None
    return SamplingParams(**{name: value for name, value in chosen.items() if value is not None})


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """A model, requests, and what it answers without drafts."""
    directory = make_model(tmp_path_factory.mktemp("speculation"), eos_token_id=[1, 250])
    llm = open_model(directory, dtype="float32")
    rng = random.Random(28)
    words = [llm.generate({"prompt_token_ids": STEM[:9]}, SamplingParams(temperature=0, max_tokens=9), use_tqdm=False)[0]]
    text = words[0].outputs[0].text
    pieces = [text[i : i + 3] for i in range(max(1, len(text) - 3))]
    prompts = [{"prompt_token_ids": [*STEM[: rng.choice((1, 2, 9, 17, 33, 60))], rng.randrange(5, 9)]} for _ in range(30)]
    params = [some_params(rng, [*pieces, "the"]) for _ in prompts]
    answers = llm.generate(prompts, params, use_tqdm=False)
    bound = [answer.outputs[0].finish_reason for answer, param in zip(answers, params, strict=True) if param.structured_outputs]
    assert min(map(bound.count, ("stop", "error", "length"))) > 0, "grammars that are followed, cut off, and leave no token"
    return directory, prompts, params, answers


def same(got, wanted, close=1e-5) -> None:
    """All that users see; logprobs may differ by `close`."""
    for i, (one, other) in enumerate(zip(got, wanted, strict=True)):
        for mine, theirs in zip(one.outputs, other.outputs, strict=True):
            assert list(mine.token_ids) == list(theirs.token_ids), i
            assert (mine.text, mine.finish_reason, mine.stop_reason) == (theirs.text, theirs.finish_reason, theirs.stop_reason)
            assert mine.error == theirs.error
            alike(mine.logprobs, theirs.logprobs, close)
        alike(one.prompt_logprobs, other.prompt_logprobs, close)


def alike(got, wanted, close) -> None:
    assert (got is None) == (wanted is None)
    for one, other in zip(got or (), wanted or (), strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert {token: p.rank for token, p in one.items()} == {token: p.rank for token, p in other.items()}
            for token, p in one.items():
                assert p.logprob == pytest.approx(other[token].logprob, abs=close)


@pytest.fixture(scope="module")
def smaller(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("smaller"), num_hidden_layers=1, hidden_size=64, num_attention_heads=2)


@pytest.mark.parametrize("name", DRAFTERS)
def test_the_same_tokens_with_every_drafter(expected, name, smaller):
    directory, prompts, params, answers = expected
    model = {"itself": {"model": str(directory)}, "smaller": {"model": str(smaller)}}.get(name, {})
    llm = open_model(
        directory, dtype="float32", max_num_seqs=6, num_gpu_blocks_override=40, max_num_batched_tokens=24,
        speculative_config={**DRAFTERS[name], **model, "adaptive": False}, async_scheduling=name in ("suffix", "right"),
    )  # fmt: skip
    core = llm.llm_engine.core
    same(llm.generate(prompts, params, use_tqdm=False), answers)
    if name in ("suffix", "right", "wrong"):  # they know the answers now
        same(llm.generate(prompts[::-1], params[::-1], use_tqdm=False), answers[::-1])
    core.step()
    core.scheduler.roster.check()
    stats = core.stats
    assert stats.free_pages == stats.pages and stats.preemptions > 0 and stats.drafts.tokens > 50
    if name == "wrong":
        assert not stats.drafts.accepted
    elif name == "right":
        assert stats.drafts.accepted > 0.9 * stats.drafts.tokens  # but for ends that came before
    else:
        assert 0 < stats.drafts.accepted < stats.drafts.tokens
    llm.llm_engine.shutdown()


@pytest.fixture(scope="module", params=[False, True], ids=["one step at a time", "ahead"])
def adaptive(expected, request):
    llm = open_model(
        expected[0], dtype="float32", speculative_config=DRAFTERS["ngram"], disable_log_stats=False,
        async_scheduling=request.param,
    )  # fmt: skip
    yield llm
    llm.llm_engine.shutdown()


def test_by_default_it_depends_on_what_drafts_cost(expected, adaptive):
    _, prompts, params, answers = expected
    same(adaptive.generate(prompts, params, use_tqdm=False), answers)


def test_aborts(expected, adaptive):
    _, prompts, params, answers = expected
    engine, rng = adaptive.llm_engine, random.Random(3)
    for i, (prompt, param) in enumerate(zip(prompts, params, strict=True)):
        engine.add_request(f"r{i}", prompt, param)
    left = {i for i in range(len(prompts)) if rng.random() < 0.6}
    outputs = {}
    for turn in range(10_000):
        for output in engine.step():
            outputs[output.request_id] = output
        if turn % 2 == 0 and (going := [i for i in range(len(prompts)) if i not in left]):
            engine.abort_request(f"r{going[turn % len(going)]}")
        if not engine.has_unfinished_requests():
            break
    kept = sorted(left)
    same([outputs[f"r{i}"] for i in kept], [answers[i] for i in kept])
    engine.core.step()
    engine.core.scheduler.roster.check()


def test_what_is_counted(expected, adaptive):
    loop = {"prompt_token_ids": [9, 8, 7, 6] * 12}
    [output] = adaptive.generate([loop], SamplingParams(temperature=0, max_tokens=120, ignore_eos=True), use_tqdm=False)
    metrics = {m.name.removeprefix("vllm:"): m for m in adaptive.get_metrics() if "spec_decode" in m.name}
    total = adaptive.llm_engine.core.stats.drafts
    assert metrics["spec_decode_num_drafts"].value == total.rows
    assert metrics["spec_decode_num_draft_tokens"].value == total.tokens
    assert metrics["spec_decode_num_accepted_tokens"].value == total.accepted
    counted = output.metrics
    assert counted.num_accepted_draft_tokens <= counted.num_draft_tokens <= 4 * counted.num_spec_steps
    assert counted.num_generation_tokens == 120


def test_a_draft_model_that_is_the_model_is_right(expected):
    """Also behind prefix hits, pieces of prompts and forks: it has seen whatever the model has."""
    directory = expected[0]
    config = {"model": str(directory), "num_speculative_tokens": 3}
    llm = open_model(directory, dtype="float32", max_num_batched_tokens=24, speculative_config={**config, "adaptive": False})
    prompts = [{"prompt_token_ids": [*STEM[:size], 5 + i]} for i, size in enumerate((60, 33, 60, 9, 1, 17))]
    greedy = SamplingParams(temperature=0, max_tokens=33, ignore_eos=True)
    for _ in range(2):
        outputs = llm.generate(prompts, greedy, use_tqdm=False)
        assert all(len(output.outputs[0].token_ids) == 33 for output in outputs)
    llm.generate(prompts[0], SamplingParams(temperature=1, top_k=1, n=3, max_tokens=9, ignore_eos=True, seed=1), use_tqdm=False)
    counts = llm.llm_engine.core.stats.drafts
    assert counts.per_position[0] == counts.rows > 90  # later ones may lie where no page was yet
    llm.llm_engine.shutdown()


@pytest.mark.parametrize("itself", [True, False])
def test_a_draft_model_that_is_asked_now_and_then(expected, itself, smaller, monkeypatch):
    """For as many tokens of each row as it comes; in between it runs nothing, steps are planned ahead, and prefixes that are
    found are not all its own."""
    directory, prompts, params, answers = expected
    dice = random.Random(3)

    def choose(_, drafting, *__):
        depth = dice.choice((0, 0, 0, 1, 2, 3))
        return [dice.randrange(depth + 1) for _ in drafting], depth

    monkeypatch.setattr(Choice, "choose", choose)
    config = {"model": str(directory if itself else smaller), "num_speculative_tokens": 3}
    few = {"max_num_seqs": 6, "num_gpu_blocks_override": 40, "max_num_batched_tokens": 24}
    llm = open_model(directory, dtype="float32", speculative_config=config, async_scheduling=itself, **few)
    same(llm.generate(prompts[:16], params[:16], use_tqdm=False), answers[:16])
    same(llm.generate(prompts[:6], params[:6], use_tqdm=False), answers[:6])
    core = llm.llm_engine.core
    core.step()
    core.scheduler.roster.check()
    drafts = core.stats.drafts
    assert core.stats.free_pages == core.stats.pages and drafts.tokens > 50 and (not itself or drafts.accepted > 50)
    llm.llm_engine.shutdown()
