"""Requests that another engine had begun."""

from dataclasses import replace

import pytest
from desk import Desk

from quire.types.errors import RequestError


def test_the_tokens_so_far_are_known_but_not_part_of_the_prompt():
    desk = Desk()
    desk.add("a", range(6), max_tokens=8, prompt_logprobs=1)
    desk.finish()
    answer, whole = desk.tokens("a"), desk.specs["a"]
    desk.core.add(replace(whole, id="b", resumed=tuple(answer[:5]), scored=5))
    plan = desk.step()
    [admission] = plan.admitted
    assert (admission.tokens.tolist(), admission.prompt_length) == ([*range(6), *answer[:5]], 6)
    assert (plan.count.tolist(), plan.sample.tolist()) == ([11], [True])
    desk.finish()
    assert desk.tokens("b") == answer[5:]
    assert desk.heard["b"][-1].finish_reason == "length"
    assert all(delta.prompt_logprobs == () for delta in desk.heard["b"])


def test_what_is_found_beyond_the_prompt_is_not_counted_as_cached_prompt():
    desk = Desk()
    desk.add("a", range(6), max_tokens=20)
    desk.finish()
    desk.core.add(replace(desk.specs["a"], id="b", resumed=tuple(desk.tokens("a")[:15])))
    desk.finish()
    assert desk.tokens("b") == desk.tokens("a")[15:]
    assert desk.cached("b") == 5


def test_a_request_that_has_all_its_tokens_cannot_go_on():
    desk = Desk()
    desk.add("a", range(6), max_tokens=4)
    with pytest.raises(RequestError, match="none is left to generate"):
        desk.core.add(replace(desk.specs["a"], id="b", resumed=(1, 2, 3, 4)))
    desk.finish()
