"""thinking_token_budget: reasoning that does not end by itself is ended."""

import re

import pytest
from tiny import TEXT, open_model

from quire import SamplingParams, StructuredOutputsParams
from quire.types.errors import InvalidParameter, NotSupported

END = [40, 41]


@pytest.fixture(scope="module")
def ahead(tiny_model):
    return open_model(tiny_model, async_scheduling=True)


def tokens(llm, **params) -> list[int]:
    given = SamplingParams(**({"max_tokens": 24, "seed": 4, "ignore_eos": True} | params))
    return llm.generate(TEXT[0], given, use_tqdm=False)[0].outputs[0].token_ids


@pytest.mark.parametrize("budget", [0, 1, 7])
def test_the_end_comes_after_the_budget(llm, ahead, budget):
    free = tokens(llm)
    cut = tokens(llm, thinking_token_budget=budget, thinking_end_ids=END)
    assert cut[:budget] == free[:budget] and cut[budget : budget + 2] == END and len(cut) == 24
    assert cut == tokens(ahead, thinking_token_budget=budget, thinking_end_ids=END)
    assert tokens(llm, thinking_token_budget=30, thinking_end_ids=END) == free, "a budget that is not used up changes nothing"


def test_an_end_that_came_by_itself_is_enough(llm, ahead):
    free = tokens(llm)
    for own in (free[3:5], free[6:7]):
        assert tokens(llm, thinking_token_budget=7, thinking_end_ids=own) == free
        assert tokens(ahead, thinking_token_budget=7, thinking_end_ids=own) == free


def test_logprobs_are_told_for_every_token(llm):
    given = SamplingParams(max_tokens=9, thinking_token_budget=3, thinking_end_ids=END, logprobs=1)
    answer = llm.generate(TEXT[0], given, use_tqdm=False)[0].outputs[0]
    assert all(token in entry for token, entry in zip(answer.token_ids, answer.logprobs, strict=True))


@pytest.mark.parametrize("depth", [0, 1])
def test_a_grammar_begins_where_the_reasoning_was_cut(llm, ahead, depth):
    engine = (llm, ahead)[depth]
    grammar = StructuredOutputsParams(regex="[0-9]{3}", starts_after=END)
    ids = tokens(engine, thinking_token_budget=5, thinking_end_ids=END, structured_outputs=grammar, max_tokens=60)
    assert ids[5:7] == END
    assert re.fullmatch("[0-9]{3}", engine.get_tokenizer().decode(ids[7:]))


def test_what_is_refused():
    with pytest.raises(NotSupported, match="thinking_token_budget"):
        SamplingParams(thinking_token_budget=3)
    with pytest.raises(InvalidParameter, match="thinking_token_budget"):
        SamplingParams(thinking_token_budget=-1, thinking_end_ids=[3])
