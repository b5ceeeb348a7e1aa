"""Every number of a request at its extremes: it is answered or refused by its name, and whoever runs beside it gets the same
tokens as alone."""

import math

import pytest
from tiny import TEXT

from quire import SamplingParams
from quire.types.errors import InvalidParameter

REALS = [
    0.0, -0.0, 5e-324, 1e-320, 1e-46, 1e-45, 1e-40, 1.1e-38, 1e-30, 1e-6, 0.005, 0.999999999999, 1.0, 2.0, 1e30, 3.4e38, 3.5e38,
    1e300, 1.7e308, math.inf, -math.inf, math.nan, -1e-46, -2.0, -1e300, 10**400, -(10**400), 10**5000,
]  # fmt: skip
INTEGERS = [
    0, -1, -2, 1, 2**15, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 2**70, 10**400, 10**5000,
    -(2**31), -(2**63), -(2**63) - 1, -(10**5000),
]  # fmt: skip
FIELDS = {
    **dict.fromkeys(("temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty"), REALS),
    **dict.fromkeys(
        ("top_k", "seed", "n", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs", "stream_interval"), INTEGERS
    ),
}
LISTS = {
    "logit_bias": [{5: value} for value in REALS] + [{value: 1.0} for value in INTEGERS],
    "stop_token_ids": [[value] for value in INTEGERS],
    "allowed_token_ids": [[value] for value in INTEGERS],
    "logprob_token_ids": [[value] for value in INTEGERS],
}
BESIDE = [
    SamplingParams(temperature=0, max_tokens=5, ignore_eos=True),
    SamplingParams(
        temperature=0.9, top_p=0.8, top_k=50, min_p=0.01, repetition_penalty=1.2, seed=3, max_tokens=5, ignore_eos=True
    ),
]


def cases(field):
    """Parameters with one number at an extreme: alone, and beside filters of every kind."""
    usual = {"max_tokens": 4, "temperature": 0.8, "seed": 1, "ignore_eos": True}
    filters = {"top_p": 0.7, "top_k": 20, "min_p": 0.001, "repetition_penalty": 1.1}
    for value in FIELDS.get(field) or LISTS[field]:
        for company in ({}, filters):
            try:
                params = SamplingParams(**(usual | company | {field: value}))
            except InvalidParameter as error:
                assert error.parameter in (field, "n", "min_tokens"), error
            else:
                if params.n < 10:
                    yield params


@pytest.mark.filterwarnings("ignore:temperature")
@pytest.mark.parametrize("field", [*FIELDS, *LISTS])
def test_extremes_of_one_are_not_felt_by_its_neighbours(llm, field):
    alone = [llm.generate(TEXT[0], params, use_tqdm=False)[0].outputs[0].token_ids for params in BESIDE]
    fitting = []
    for params in cases(field):
        try:
            llm.llm_engine.inputs.prepare("probe", TEXT[1], params, arrival=0.0)
        except InvalidParameter as error:
            assert error.parameter == field, error
        else:
            fitting.append(params)
    assert fitting or field in LISTS
    for begin in range(0, len(fitting), 4):
        odd = fitting[begin : begin + 4]
        outputs = llm.generate([TEXT[0], TEXT[0], *[TEXT[1]] * len(odd)], [*BESIDE, *odd], use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs[:2]] == alone
        for params, output in zip(odd, outputs[2:], strict=True):
            assert {completion.finish_reason for completion in output.outputs} == {"length"}, params


EXTREME_SHARES = [5e-324, 1e-46, 1e-45, 1e-39, 1.2e-38]


@pytest.mark.parametrize("top_p", EXTREME_SHARES)
def test_the_smallest_share_is_the_likeliest_token(llm, top_p):
    greedy = llm.generate(TEXT, SamplingParams(temperature=0, max_tokens=6), use_tqdm=False)
    drawn = llm.generate(TEXT, SamplingParams(temperature=1, top_p=top_p, max_tokens=6), use_tqdm=False)
    assert [output.outputs[0].token_ids for output in drawn] == [output.outputs[0].token_ids for output in greedy]
