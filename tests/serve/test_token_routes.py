"""/inference/v1/generate and /abort_requests, which developers switch on."""

import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from patience import wait_for
from quire.config.server_args import ServerArgs
from serving import error_of, events_of

IDS = [5, 6, 7, 8]


@pytest.fixture
def developer(server: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[httpx.Client]:
    monkeypatch.setenv("QUIRE_SERVER_DEV_MODE", "1")
    with server.serve(ServerArgs()) as http:
        yield http


def generate(http: httpx.Client, params: dict[str, Any], **fields: Any) -> httpx.Response:
    return http.post("/inference/v1/generate", json={"token_ids": IDS, "sampling_params": params, **fields})


def test_token_ids_in_and_out(developer: httpx.Client) -> None:
    params = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}
    expected = developer.post("/v1/completions", json={"prompt": IDS, "return_token_ids": True, **params}).json()
    answer = generate(developer, params | {"logprobs": 2, "prompt_logprobs": 1}, request_id="mine").json()
    [choice] = answer["choices"]
    assert answer["request_id"] == "mine" and len(answer["prompt_logprobs"]) == len(IDS)
    assert choice["token_ids"] == expected["choices"][0]["token_ids"] and choice["finish_reason"] == "length"
    assert [len(token["top_logprobs"]) for token in choice["logprobs"]["content"]] == [2] * 6
    *events, done = events_of(generate(developer, params, stream=True).text)
    assert done == "[DONE]"
    assert [token for event in events for token in event["choices"][0]["token_ids"]] == choice["token_ids"]
    assert events[-1]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("fields", "parameter"),
    [
        ({"sampling_params": {"temperature": 9}}, "temperature"),
        ({"sampling_params": {"detokenize": False}}, "sampling_params.detokenize"),
        ({"token_ids": []}, "body.token_ids"),
        ({"token_ids": [10**6]}, "prompt"),
    ],
)
def test_what_is_refused(developer: httpx.Client, fields: dict[str, Any], parameter: str) -> None:
    error = error_of(developer.post("/inference/v1/generate", json={"token_ids": IDS, "sampling_params": {}, **fields}))
    assert (error["code"], error["param"]) == (400, parameter)


def test_requests_are_aborted_by_their_ids(server: Any, developer: httpx.Client) -> None:
    answers: list[dict[str, Any]] = []
    params = {"max_tokens": 240, "ignore_eos": True}

    def ask() -> None:
        answers.append(generate(developer, params, request_id="long").json())

    asking = threading.Thread(target=ask)
    asking.start()
    wait_for(lambda: server.llm.open_ids or not asking.is_alive())
    assert developer.post("/abort_requests", json={"request_ids": ["absent"]}).json() == {"aborted": 0}
    aborted = developer.post("/abort_requests", json={"request_ids": ["long"]}).json()["aborted"]
    asking.join()
    assert (answers[0]["choices"][0]["finish_reason"] == "abort") == (aborted == 1)
