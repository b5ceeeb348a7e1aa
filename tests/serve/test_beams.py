"""use_beam_search: the same beams as the offline search finds."""

import pytest

from quire import LLM, BeamSearchParams
from serving import error_of

PROMPT = [5, 9, 30, 7]


@pytest.fixture(scope="module")
def offline(serve_model):
    llm = LLM(str(serve_model), device="cpu", block_size=4, max_num_seqs=16, kv_cache_memory_bytes=4 << 20)
    yield llm
    llm.llm_engine.shutdown()


@pytest.mark.parametrize("penalty", [1.0, 0.0, 2.0])
@pytest.mark.parametrize("ignore_eos", [True, False])
def test_same_as_offline(http, offline, penalty, ignore_eos):
    params = BeamSearchParams(beam_width=3, max_tokens=8, length_penalty=penalty, ignore_eos=ignore_eos)
    expected = [tuple(beam.tokens[4:]) for beam in offline.beam_search([PROMPT], params)[0].sequences]
    body = {"prompt": PROMPT, "n": 3, "max_tokens": 8, "use_beam_search": True, "length_penalty": penalty}
    answer = http.post("/v1/completions", json={**body, "ignore_eos": ignore_eos, "return_token_ids": True}).json()
    found = [choice["token_ids"] for choice in answer["choices"]]
    assert [
        tuple(ids[:-1] if choice["finish_reason"] == "stop" else ids)
        for ids, choice in zip(found, answer["choices"], strict=True)
    ] == expected
    assert answer["usage"]["completion_tokens"] == sum(map(len, found))
    for ids, choice in zip(found, answer["choices"], strict=True):
        assert choice["stop_reason"] == (ids[-1] if choice["finish_reason"] == "stop" else None)


def test_several_prompts_and_logprobs(http):
    body = {"prompt": [PROMPT, [6]], "n": 2, "max_tokens": 4, "use_beam_search": True, "logprobs": 1, "ignore_eos": True}
    choices = http.post("/v1/completions", json=body).json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    assert all(1 <= len(top) <= 2 for choice in choices for top in choice["logprobs"]["top_logprobs"])


def test_in_chat(http):
    body = {"messages": [{"role": "user", "content": "a"}], "n": 2, "max_tokens": 4, "use_beam_search": True}
    choices = http.post("/v1/chat/completions", json=body).json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1]


@pytest.mark.parametrize(
    "body, param",
    [
        ({"top_k": 5}, "top_k"),
        ({"temperature": 0.5}, "temperature"),
        ({"stop": "a"}, "stop"),
        ({"n": 11}, "n"),
        ({"echo": True}, "echo"),
    ],
)
def test_what_a_search_does_not_take(http, body, param):
    response = http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 4, "use_beam_search": True, **body})
    assert response.status_code == 400 and error_of(response)["param"] == param
