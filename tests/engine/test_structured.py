"""Structured outputs through the whole engine, on the tiny model: its random weights would never write JSON by themselves."""

import json
import re
from dataclasses import replace

import jsonschema
import pytest
from tiny import TEXT, open_model

from quire import BeamSearchParams, SamplingParams
from quire.sampling_params import StructuredOutputsParams
from quire.types.errors import InvalidParameter, NotSupported

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["cat", "dog"]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}
PHONE = r"[0-9]{3}-[0-9]{4}"


def constrained(max_tokens=120, seed=None, **constraint) -> SamplingParams:
    options = {name: constraint.pop(name) for name in list(constraint) if name in SamplingParams.__struct_fields__}
    return SamplingParams(max_tokens=max_tokens, seed=seed, structured_outputs=StructuredOutputsParams(**constraint), **options)


def replaced(params: SamplingParams, **changes) -> SamplingParams:
    twin = params.clone()
    for name, value in changes.items():
        setattr(twin, name, value)
    return twin


def generate(llm, prompts, params):
    return [choice for output in llm.generate(prompts, params, use_tqdm=False) for choice in output.outputs]


@pytest.fixture(scope="module")
def ahead(tiny_model):
    """Steps are planned while the last one runs."""
    return open_model(tiny_model, async_scheduling=True)


@pytest.mark.parametrize("depth", [0, 1])
def test_every_answer_is_within_its_grammar(llm, ahead, depth):
    engine = (llm, ahead)[depth]
    assert engine.llm_engine.core.depth == depth
    wanted = [
        ({"json": PERSON, "disable_any_whitespace": True}, lambda text: jsonschema.validate(json.loads(text), PERSON) is None),
        ({"regex": PHONE}, lambda text: re.fullmatch(PHONE, text)),
        ({"choice": ["yes", "no", "wörld ☃"]}, lambda text: text in ("yes", "no", "wörld ☃")),
        ({"grammar": 'root ::= "a" ("b" | "c" root)'}, lambda text: re.fullmatch("(ac)*ab", text)),
        ({"grammar": 'root ::= word "x"\nword ::= [a-z]{1,9}'}, lambda text: re.fullmatch("[a-z]{1,9}x", text)),
    ]
    params = [constrained(seed=i, **constraint) for i in range(8) for constraint, _ in wanted]
    free = SamplingParams(max_tokens=20, seed=1, ignore_eos=True)
    answers = generate(engine, [TEXT[0]] * (len(params) + 1), [*params, free])
    for answer, (_, fits) in zip(answers, wanted * 8, strict=False):
        assert answer.finish_reason == "stop" and fits(answer.text), answer
    assert len({answer.text for answer in answers[::5]}) > 4, "what is left open is sampled"
    assert answers[-1].token_ids == generate(engine, TEXT[0], free)[0].token_ids, "who has no grammar does not notice"


def test_neither_overlap_nor_logprobs_nor_company_change_the_tokens(llm, ahead, tiny_model):
    """A request with logprobs draws every token; without them, tokens without a choice are taken without a draw."""
    params = constrained(seed=3, json=PERSON)
    expected = generate(llm, TEXT[0], params)[0].token_ids
    small = open_model(tiny_model, num_gpu_blocks_override=24, max_model_len=96)
    assert generate(ahead, TEXT[0], params)[0].token_ids == expected
    reported = generate(llm, TEXT[0], constrained(seed=3, json=PERSON, logprobs=2))[0]
    assert reported.token_ids == expected and len(reported.logprobs) == len(expected)
    beside = generate(
        small, [TEXT[0]] * 4, [params, constrained(seed=4, json=PERSON), constrained(seed=5, regex="a{60}"), params]
    )
    assert beside[0].token_ids == beside[3].token_ids == expected
    assert small.llm_engine.core.stats.preemptions, "this was meant to run out of pages"


@pytest.mark.gpu
def test_recorded_steps_give_the_same_tokens(llm, tiny_model):
    """On a GPU, with graphs and a step ahead: the tokens of the CPU, constrained or free, alone and beside others."""
    recorded = open_model(tiny_model, device="cuda", dtype="float32", async_scheduling=True)
    params = [constrained(seed=i, json=PERSON) for i in range(6)] + [constrained(seed=i, regex=PHONE) for i in range(6)]
    params += [SamplingParams(max_tokens=50, seed=i, ignore_eos=True) for i in range(6)]
    params += [constrained(seed=i, json=PERSON, logprobs=1, temperature=0.7, top_k=50) for i in range(3)]
    prompts = [TEXT[i % 2] for i in range(len(params))]
    expected = [answer.token_ids for answer in generate(llm, prompts, params)]
    assert [answer.token_ids for answer in generate(recorded, prompts, params)] == expected
    assert [generate(recorded, prompts[i], params[i])[0].token_ids for i in (0, 7, 13, 19)] == [
        expected[i] for i in (0, 7, 13, 19)
    ]
    assert recorded.llm_engine.core.executor._runner.graphs.replays > 20


@pytest.mark.parametrize("depth", [0, 1])
def test_tokens_without_a_choice_cost_no_step(llm, ahead, depth):
    engine = (llm, ahead)[depth]
    core, taken = engine.llm_engine.core, []
    step = core.step

    def counting():
        taken.append(1)
        return step()

    core.step = counting
    try:
        answer = generate(engine, TEXT[0], constrained(choice=["the quick brown fox jumps over the lazy dog!"]))[0]
    finally:
        core.step = step
    assert answer.text == "the quick brown fox jumps over the lazy dog!" and answer.finish_reason == "stop"
    assert len(answer.token_ids) > 12 > len(taken)


def test_n_answers_are_each_their_own(llm):
    answers = generate(llm, TEXT[0], constrained(seed=2, n=6, json=PERSON, max_tokens=100))
    assert len({answer.text for answer in answers}) > 3
    for answer in answers:
        jsonschema.validate(json.loads(answer.text), PERSON)


def test_how_an_answer_ends(llm):
    def one(**options):
        return generate(llm, TEXT[0], constrained(**options))[0]

    assert one(regex="a{50}", max_tokens=5).finish_reason == "length"
    assert one(regex="a{5}", min_tokens=40).text == "aaaaa", "a complete text ends, whatever min_tokens says"
    assert len(one(regex="(a|b)*", min_tokens=12, max_tokens=200, seed=1).token_ids) >= 12
    endless = one(regex="(a|b)*", ignore_eos=True, max_tokens=40)
    assert (endless.finish_reason, len(endless.token_ids)) == ("length", 40)
    assert one(regex="a{5}", ignore_eos=True).finish_reason == "stop"
    stopped = one(regex="abcdef", stop="cd")
    assert (stopped.text, stopped.finish_reason, stopped.stop_reason) == ("ab", "stop", "cd")


@pytest.fixture(scope="module")
def drafting(tiny_model):
    """It has drafts for whatever was said before."""
    asked = {"method": "suffix", "num_speculative_tokens": 20, "suffix_decoding_min_token_prob": 0.0, "adaptive": False}
    return open_model(tiny_model, speculative_config={**asked, "suffix_decoding_max_spec_factor": 50.0})


def test_what_a_request_forbids_is_not_forced_on_it(llm, ahead, drafting):
    """Nor does it depend on drafts, logprobs, company or planning ahead whether a token without a choice was drawn."""
    digits, [b] = [llm.get_tokenizer().encode(digit)[0] for digit in "0123456789"], llm.get_tokenizer().encode("b")
    told = {
        "bad word": constrained(regex="[0-9]{2}abc", seed=1, bad_words=["b"]),
        "not allowed": constrained(regex="[0-9]{2}abc", seed=1, allowed_token_ids=digits),
        "too early": constrained(regex="[0-9]{2}abc", seed=1, min_tokens=9, stop_token_ids=[b]),
        "unlikely": constrained(regex="[0-9]{2}abc", seed=1, logit_bias={b: -100.0}),
        "stopped": constrained(regex="[0-9]{2}abc", seed=1, min_tokens=2, stop_token_ids=[b]),
        "the end is the grammar's": constrained(regex="[0-9]{4}", seed=1, allowed_token_ids=digits, bad_words=["</s>"]),
    }
    for params in told.values():
        params.max_tokens = 20
    expected = dict(zip(told, generate(llm, [TEXT[0]] * len(told), list(told.values())), strict=True))
    assert [answer.finish_reason for answer in expected.values()] == ["error"] * 3 + ["stop"] * 3
    assert "no token is allowed" in expected["bad word"].error and expected["bad word"].text[2:] == "a"
    assert expected["not allowed"].text.isdigit() and expected["unlikely"].text[2:] == "abc"
    assert (expected["stopped"].text[2:], expected["stopped"].stop_reason) == ("a", b)
    assert re.fullmatch("[0-9]{4}", expected["the end is the grammar's"].text)
    reporting = [replaced(params, logprobs=1) for params in told.values()]
    for engine, params in ((ahead, [*told.values()]), (llm, reporting), *[(drafting, [*told.values()])] * 3):
        for got, wanted in zip(generate(engine, [TEXT[0]] * len(told), params), expected.values(), strict=True):
            assert (got.token_ids, got.text, got.finish_reason, got.error) == (
                wanted.token_ids, wanted.text, wanted.finish_reason, wanted.error,
            )  # fmt: skip
    assert drafting.llm_engine.core.stats.drafts.accepted


def test_a_grammar_may_start_later(llm):
    tokenizer, places = llm.get_tokenizer(), []
    first, second = (tokenizer.encode(word)[0] for word in ("dog", "the"))
    for seed in range(4):
        params = constrained(seed=seed, regex="[0-9]{4}", max_tokens=200, ignore_eos=True, logit_bias={first: 9.0, second: 9.0})
        params.structured_outputs.starts_after = [first, second]
        answer = generate(llm, TEXT[0], params)[0]
        ids = answer.token_ids
        places.append(next(i for i in range(len(ids)) if ids[i : i + 2] == [first, second]))
        assert answer.finish_reason == "stop"
        assert re.fullmatch("[0-9]{4}", tokenizer.decode(ids[places[-1] + 2 :]))
    assert max(places) > 0, "before that, the text was free"


def test_a_resumed_request_goes_on_where_it_was(llm):
    engine = llm.llm_engine
    params = constrained(seed=8, json=PERSON)
    whole = generate(llm, TEXT[0], params)[0]
    for told in range(0, len(whole.token_ids) - 1, 7):
        [request] = engine.prepare("again", TEXT[0], params).requests
        engine.core.add(replace(request, resumed=tuple(whole.token_ids[:told])))
        tokens = []
        while engine.core.has_unfinished:
            tokens += [token for delta in engine.core.step() for token in delta.token_ids]
        assert whole.token_ids[:told] + tokens == whole.token_ids


@pytest.mark.parametrize(
    ("constraint", "words"),
    [
        ({"json": {"type": "object", "properties": {"a": {"items": {"type": "arr"}}}}}, "$.properties.a.items: Invalid type"),
        ({"json": {"type": "array", "uniqueItems": True}, "strict": True}, "$: uniqueItems is more than a grammar can hold to"),
        ({"json": "{"}, "not JSON"),
        ({"regex": "a(b"}, "unclosed group"),
        ({"grammar": "start: nothing"}, "nothing"),
        ({"grammar": 'root ::= ("a"'}, "expected ')'"),
        ({"structural_tag": {"structures": [], "triggers": ["<a"]}}, "structures"),
        (
            {"json": {"oneOf": [{"type": "string"}] * 2}, "strict": True},
            "$: oneOf cannot be distinguished from anyOf: alternatives 0 and",
        ),
        ({"json": {"enum": ["x" * 300_000]}}, "262144"),
    ],
)
def test_a_bad_grammar_is_refused_before_anything_runs(llm, constraint, words):
    with pytest.raises(InvalidParameter, match=re.escape(words)) as caught:
        llm.generate([TEXT[0], TEXT[1]], [SamplingParams(), constrained(**constraint)], use_tqdm=False)
    assert caught.value.parameter == "structured_outputs"


def test_what_is_not_held_to_is_told(llm):
    schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True, "maxItems": 2}
    with pytest.warns(UserWarning, match="uniqueItems"):
        answer = generate(llm, TEXT[0], constrained(seed=1, json=schema))[0]
    assert isinstance(json.loads(answer.text), list)


def test_objects_have_the_keys_they_name_unless_told_otherwise(llm, tiny_model):
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    answers = generate(llm, [TEXT[0]] * 6, [constrained(seed=i, json=schema, max_tokens=60) for i in range(6)])
    assert {frozenset(json.loads(answer.text)) for answer in answers} == {frozenset("a")}
    open_ones = [constrained(seed=i, json=schema, max_tokens=60, disable_additional_properties=False) for i in range(6)]
    assert any(json_keys_beyond(answer.text) for answer in generate(llm, [TEXT[0]] * 6, open_ones))
    wide = open_model(tiny_model, structured_outputs_config={"disable_additional_properties": False})
    params = [constrained(seed=i, json=schema, max_tokens=60) for i in range(6)]
    assert any(json_keys_beyond(answer.text) for answer in generate(wide, [TEXT[0]] * 6, params))


def json_keys_beyond(text: str) -> bool:
    """Does it go on behind its first value?"""
    return re.match(r'\s*\{\s*"a"\s*:\s*(true|false)\s*,', text) is not None


def test_who_leaves_early_leaves_nothing(llm):
    core = llm.llm_engine.core
    for turns in (0, 1, 3):
        llm.llm_engine.add_request("leaver", TEXT[0], constrained(regex="(a|b){200}", max_tokens=200))
        for _ in range(turns):
            core.step()
        llm.llm_engine.abort_request("leaver")
        core.step()
        assert "leaver" not in core.constraints.grammars and not len(core.constraints.grammars)


def test_what_cannot_be_constrained_says_so(tiny_model):
    with pytest.raises(NotSupported, match="beam"):
        BeamSearchParams(beam_width=2, max_tokens=3, structured_outputs=StructuredOutputsParams(regex="a"))
    bare = open_model(tiny_model, skip_tokenizer_init=True)
    with pytest.raises(InvalidParameter, match="tokenizer"):
        bare.generate([[1, 2]], SamplingParams(detokenize=False, structured_outputs=StructuredOutputsParams(regex="a")))
