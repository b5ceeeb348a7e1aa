"""Every row of the table of bounds."""

import json

import httpx
import pytest

from patience import PATIENCE
from quire.config.server_args import ServerArgs
from quire.serve.app import build_app
from quire.serve.body import parse_json
from quire.serve.errors import HttpError
from quire.serve.limits import LIMITS, ServerLimits
from quire.types.errors import ConfigError
from serving import NAME, error_of

JSON = {"content-type": "application/json"}
USER = {"role": "user", "content": "a"}


def test_body_bytes(http):
    large = b'{"prompt": "' + b"x" * LIMITS.body_bytes + b'"}'
    response = http.post("/v1/completions", content=large, headers=JSON)
    assert response.status_code == 413 and str(LIMITS.body_bytes) in error_of(response)["message"]
    chunks = (large[i : i + 2**20] for i in range(0, len(large), 2**20))
    assert http.post("/v1/completions", content=chunks, headers=JSON).status_code == 413  # its length is not declared


def test_header_bytes(http):
    headers = {f"x-{i}": "y" * 4000 for i in range(LIMITS.header_bytes // 4000 + 1)}
    assert http.post("/v1/completions", json={"prompt": "a"}, headers=headers).status_code == 431


@pytest.mark.parametrize(
    "path, body, param",
    [
        ("completions", {"prompt": ["a"] * (LIMITS.prompts + 1)}, "prompt"),
        ("completions", {"prompt": [[5]] * (LIMITS.prompts + 1)}, "prompt"),
        ("completions", {"prompt": "a", "n": LIMITS.n + 1}, "n"),
        ("completions", {"prompt": ["a"] * 5, "n": LIMITS.n}, "n"),
        ("completions", {"prompt": "a" * (LIMITS.prompt_characters + 1)}, "prompt"),
        ("completions", {"prompt": [[5] * 21000] * 100}, "prompt"),
        ("completions", {"prompt": "a", "stop": ["x"] * (LIMITS.stop + 1)}, "stop"),
        ("completions", {"prompt": "a", "stop": "x" * (LIMITS.stop_characters + 1)}, "stop"),
        ("completions", {"prompt": "a", "stop_token_ids": [1] * (LIMITS.stop_token_ids + 1)}, "stop_token_ids"),
        ("completions", {"prompt": "a", "logit_bias": {str(i): 1 for i in range(LIMITS.logit_bias + 1)}}, "logit_bias"),
        ("completions", {"prompt": "a", "bad_words": ["x"] * (LIMITS.bad_words + 1)}, "bad_words"),
        ("completions", {"prompt": "a", "bad_words": ["x" * (LIMITS.bad_word_characters + 1)]}, "bad_words"),
        ("completions", {"prompt": "a", "allowed_token_ids": [1] * (LIMITS.allowed_token_ids + 1)}, "allowed_token_ids"),
        ("completions", {"prompt": "a", "logprob_token_ids": [1] * (LIMITS.logprob_token_ids + 1)}, "logprob_token_ids"),
        ("completions", {"prompt": "a", "cache_salt": "x" * (LIMITS.identifier_characters + 1)}, "cache_salt"),
        ("completions", {"prompt": "a", "user": "x" * (LIMITS.identifier_characters + 1)}, "user"),
        ("completions", {"prompt": "a", "request_id": "x" * (LIMITS.identifier_characters + 1)}, "request_id"),
        ("completions", {"prompt": "a", "model": "x" * (LIMITS.identifier_characters + 1)}, "model"),
        ("chat/completions", {"messages": [USER] * (LIMITS.messages + 1)}, "messages"),
        ("chat/completions", {"messages": [{"role": "user", "content": ["a"] * (LIMITS.message_parts + 1)}]}, "messages"),
        ("chat/completions", {"messages": [{"role": "user", "content": "a" * (LIMITS.prompt_characters + 1)}]}, "messages"),
        ("chat/completions", {"messages": [USER], "n": LIMITS.n + 1}, "n"),
        ("chat/completions", {"messages": [USER], "tools": [{}] * (LIMITS.tools + 1)}, "tools"),
        ("chat/completions", {"messages": [USER], "documents": [{}] * (LIMITS.documents + 1)}, "documents"),
        (
            "chat/completions",
            {"messages": [USER], "chat_template": "x" * (LIMITS.chat_template_characters + 1)},
            "chat_template",
        ),
        (
            "chat/completions",
            {"messages": [USER], "chat_template_kwargs": {str(i): i for i in range(LIMITS.chat_template_kwargs + 1)}},
            "chat_template_kwargs",
        ),
    ],
)
def test_sizes(http, path, body, param):
    response = http.post(f"/v1/{path}", json=body)
    assert response.status_code == 400
    assert error_of(response)["param"] == param and "may have at most" in error_of(response)["message"]


def test_stop_sequences_of_messages(http):
    body = {"messages": [USER], "max_tokens": 1, "stop_sequences": ["x"] * (LIMITS.stop + 1)}
    response = http.post("/v1/messages", json=body)
    assert response.status_code == 400
    assert "stop_sequences may have at most 4 entries, got 5" in response.json()["error"]["message"]


@pytest.mark.parametrize("name", ["VLLM_MAX_STOP_STRINGS", "QUIRE_MAX_STOP_STRINGS"])
def test_the_environment_bounds_stop_strings(monkeypatch, name):
    monkeypatch.setenv(name, "9")
    assert (ServerLimits().stop, LIMITS.stop) == (9, 4)
    monkeypatch.setenv(name, "many")
    with pytest.raises(ConfigError, match=f"{name} must be an integer of at least 0; got 'many'"):
        ServerLimits()


def test_detokenize_tokens(http):
    response = http.post("/detokenize", json={"tokens": [1] * (LIMITS.detokenize_tokens + 1)})
    assert response.status_code == 400 and error_of(response)["param"] == "tokens"


def test_depth():
    small = ServerLimits(json_depth=4)
    assert parse_json(b'{"a": [[["[[[[[[{{{{{{"]]]}', small) == {"a": [[["[[[[[[{{{{{{"]]]}
    for deep in (b"[[[[[]]]]]", b'{"a": {"b": {"c": {"d": {}}}}}', b"[" * 100_000 + b"]" * 100_000):
        with pytest.raises(HttpError, match="deep"):
            parse_json(deep, small)
    with pytest.raises(HttpError, match="at most 10 arrays"):
        parse_json(json.dumps([[]] * 10).encode(), ServerLimits(json_containers=10))


def test_depth_over_http(http):
    nested = "[" * 90 + "]" * 90
    response = http.post("/v1/completions", content=f'{{"prompt": "a", "x": {nested}}}', headers=JSON)
    assert response.status_code == 400 and "64 deep" in error_of(response)["message"]


def test_large_bodies_that_wait_to_be_read_are_bounded_together(server):
    body = json.dumps({"model": NAME, "prompt": "a", "max_tokens": 1, "nobody_reads_this": "y" * 150_000})

    async def ask(limits: ServerLimits, times: int) -> list[int]:
        app = build_app(server.llm, ServerArgs(), limits)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=PATIENCE) as client:
            answers = [await client.post("/v1/completions", content=body, headers=JSON) for _ in range(times)]
        assert app.state.server.unparsed.bytes == 0
        return [answer.status_code for answer in answers]

    assert server.call(ask(ServerLimits(unparsed_bytes=100_000), 1)) == [503]
    assert server.call(ask(ServerLimits(unparsed_bytes=200_000), 3)) == [200, 200, 200]  # each makes room when it was read
