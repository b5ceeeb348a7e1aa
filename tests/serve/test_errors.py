"""What clients are told when something is wrong, and what they are not told."""

import asyncio
import gzip
import logging
import threading

import pytest

from patience import PATIENCE
from quire.config.server_args import ServerArgs
from quire.serve.errors import error_body
from quire.types.errors import EngineDead, NotSupported, RequestError
from serving import error_of, events_of

JSON = {"content-type": "application/json"}
SECRET = "/srv/secret/models/weights.bin line 7"


def refuse(http, status=400, path="/v1/completions", **body):
    response = http.post(path, json={"prompt": "a", "max_tokens": 2, **body})
    assert response.status_code == status, response.text
    return error_of(response)


def test_unknown_model(http):
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        error = refuse(http, 404, path, model="gpt-9", messages=[{"role": "user", "content": "a"}], tokens=[1])
        assert (error["type"], error["param"]) == (
            "NotFoundError",
            "model",
        ) and "`gpt-9` does not exist. This server has `" in error["message"]


@pytest.mark.parametrize(
    "body, param",
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 1.5}, "min_p"),
        ({"n": 0}, "n"),
        ({"n": 2, "temperature": 0}, "n"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"min_tokens": 3}, "min_tokens"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
        ({"stop": ""}, "stop"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -2}, "logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"logit_bias": {"320": 1}}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [320]}, "allowed_token_ids"),
        ({"bad_words": [""]}, "bad_words"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"logprob_token_ids": [1]}, "logprob_token_ids"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [320]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"suffix": "b"}, "suffix"),
        ({"prompt_embeds": "AAAA"}, "prompt_embeds"),
        ({"stream_options": {}}, "stream_options"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"use_beam_search": True, "stream": True}, "stream"),
        ({"priority": 1}, "priority"),
        ({"truncate_prompt_tokens": 257}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"kv_transfer_params": {"a": 1}}, "kv_transfer_params"),
        ({"vllm_xargs": {"a": 1}}, "vllm_xargs"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_values(http, body, param, stream):
    """A stream that cannot begin is an ordinary error."""
    error = refuse(http, **({"stream": stream and "stream_options" not in body} | body))
    assert (error["type"], error["param"]) == ("BadRequestError", param)


@pytest.mark.parametrize(
    "body, param",
    [
        ({"prompt": {"a": 1}}, "body.prompt"),
        ({"prompt": ["a", 1]}, "body.prompt"),
        ({"n": "many"}, "body.n"),
        ({"stream_options": {"include_usage": "perhaps"}, "stream": True}, "body.stream_options.include_usage"),
        ({"stop": [1]}, "body.stop"),
        ({"seed": 2**63}, "body.seed"),
        ({"stream_interval": 0}, "body.stream_interval"),
        ({"cache_salt": ""}, "body.cache_salt"),
        ({"truncation_side": "middle"}, "body.truncation_side"),
    ],
)
def test_bodies_that_are_not_the_schema(http, body, param):
    error = refuse(http, **body)
    assert (error["type"], error["param"]) == ("Bad Request", param)
    assert error["message"].startswith("1 validation error: ")


def test_a_list_with_many_bad_items_is_one_error(http):
    assert len(refuse(http, prompt=[{}] * 5000)["message"]) < 300
    assert refuse(http, path="/v1/chat/completions", messages=["x"] * 3000)["message"].startswith("1 validation error: ")


def test_too_long(http):
    error = refuse(http, prompt=[5] * 200, max_tokens=57)
    assert error["message"].startswith(
        "This model's maximum context length is 256 tokens. However, you requested 57 output tokens"
    )
    assert error["message"].endswith(
        "200 tokens (257 together): ask for at most 56 output tokens, or shorten the prompt by at least 1, "
        "or raise max_model_len"
    )
    assert "shorten" not in refuse(http, prompt=[5] * 20, max_tokens=100_000)["message"], "it has not so many"
    assert error["param"] == "max_tokens"
    error = refuse(http, prompt=[5] * 256)
    assert error["message"].startswith("This model's maximum context length is 256 tokens.") and error["param"] == "prompt"
    said = [{"role": "user", "content": "a"}]
    for path, body, param in (
        ("chat/completions", {"messages": said, "max_tokens": 256}, "max_tokens"),
        ("chat/completions", {"messages": said, "max_completion_tokens": 256}, "max_completion_tokens"),
        ("chat/completions", {"messages": said * 100}, "messages"),
        ("responses", {"input": "a", "max_output_tokens": 256}, "max_output_tokens"),
    ):
        assert error_of(http.post(f"/v1/{path}", json=body))["param"] == param
    assert http.post("/v1/completions", json={"prompt": [5] * 200, "max_tokens": 56}).status_code == 200
    hopeless = refuse(http, prompt="x" * 100_000)
    assert "cannot be fewer than" in hopeless["message"]


@pytest.mark.parametrize(
    "content", [b"", b"{", b"nonsense", b'{"prompt": NaN}', b'{"prompt": "\\ud800"}', b'{"prompt": "\xff"}', b"[]", b"3"]
)
def test_bodies_that_are_not_json_objects(http, content):
    response = http.post("/v1/completions", content=content, headers=JSON)
    assert response.status_code == 400 and error_of(response)["param"] in ("body", None)


def test_content_type(http):
    response = http.post("/v1/completions", content=b'{"prompt": "a"}', headers={"content-type": "text/plain"})
    assert response.status_code == 400 and "application/json" in error_of(response)["message"]
    good = http.post("/v1/completions", content=b'{"prompt": "a"}', headers={"content-type": "Application/JSON; charset=utf-8"})
    assert good.status_code == 200


def test_encoded_bodies_are_refused_by_name(http):
    packed = http.post(
        "/v1/completions", content=gzip.compress(b'{"prompt": "a"}'), headers={**JSON, "content-encoding": "gzip"}
    )
    assert packed.status_code == 415 and "'gzip'" in packed.json()["error"]["message"]
    plain = http.post("/v1/completions", content=b'{"prompt": "a"}', headers={**JSON, "content-encoding": "identity"})
    assert plain.status_code == 200


def test_no_such_route_and_method(http):
    for path in ("/v2/nothing", "/v1/nothing"):
        error = error_of(http.post(path, json={}))
        assert error["type"] == "NotFoundError" and error["message"].startswith("there is no such path here. There are /v1/")
    response = http.get("/v1/completions")
    assert response.status_code == 405 and response.headers["allow"] == "POST"
    error = error_of(response)
    assert (error["type"], error["code"]) == ("MethodNotAllowedError", 405)
    assert error["message"] == "GET is not a method of this path; there is POST"
    assert "there is DELETE and GET" in error_of(http.put("/v1/responses/resp_1"))["message"]


class Broken:
    """Like the engine it stands for, until something is generated."""

    def __init__(self, llm, error, after=0):
        self._llm, self._error, self._after = llm, error, after

    def __getattr__(self, name):
        return getattr(self._llm, name)

    async def generate(self, *args, **kwargs):
        stream = self._llm.generate(*args, **kwargs)
        try:
            for _ in range(self._after):
                yield await anext(stream)
        finally:
            await stream.aclose()
        raise self._error


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("error", [RuntimeError(SECRET), EngineDead(SECRET), KeyError(SECRET)])
def test_failures_are_not_told(server, stream, error, caplog):
    with server.serve(ServerArgs(enable_request_id_headers=True), Broken(server.llm, error)) as http:
        body = {"prompt": "a", "stream": stream}
        response = http.post("/v1/completions", json=body, headers={"X-Request-Id": "find-me"})
    told = error_of(response)
    assert response.status_code == 500 and told["type"] == "InternalServerError" and told["param"] is None
    assert "secret" not in response.text and "Traceback" not in response.text and "find-me" in told["message"]
    assert response.headers["x-request-id"] == "find-me"
    logged = [record for record in caplog.records if record.levelno >= logging.ERROR and "find-me" in record.getMessage()]
    assert logged and all(bool(record.exc_info) != isinstance(error, EngineDead) for record in logged)


def test_failures_inside_a_stream_are_its_last_event(server):
    with server.serve(ServerArgs(), Broken(server.llm, RuntimeError(SECRET), after=2)) as http:
        response = http.post("/v1/completions", json={"prompt": "a", "stream": True})
        assert response.status_code == 200
        *chunks, error, done = events_of(response.text)
        assert len(chunks) == 2 and done == "[DONE]" and error["error"]["code"] == 500 and "secret" not in response.text
        assert http.post("/v1/completions", json={"prompt": "a", "n": 2}).status_code == 500


def test_a_late_refusal_is_an_event(server):
    """One that comes when the stream had to begin already."""

    begun = threading.Event()

    class Late(Broken):
        async def generate(self, *_, **__):
            assert await asyncio.to_thread(begun.wait, PATIENCE)
            raise self._error
            yield

    with server.serve(ServerArgs(), Late(server.llm, RequestError("no", "prompt"))) as http:
        with http.stream("POST", "/v1/completions", json={"prompt": "a", "stream": True}) as response:
            begun.set()
            error, done = events_of(response.read().decode())
        assert response.status_code == 200 and error["error"]["code"] == 400 and done == "[DONE]"


def test_one_prompt_of_a_batch_fails(server):
    """The client gets one error, and the other prompts are gone from the engine."""

    class Picky(Broken):
        async def generate(self, prompt, *args, **kwargs):
            if prompt.ids == [9]:
                raise self._error
            async for output in self._llm.generate(prompt, *args, **kwargs):
                yield output

    with server.serve(ServerArgs(), Picky(server.llm, RequestError("not nine", "prompt"))) as http:
        body = {"prompt": [[5], [9], [6]], "max_tokens": 200, "ignore_eos": True}
        for stream in (False, True):
            response = http.post("/v1/completions", json={**body, "stream": stream})
            assert response.status_code == 400 and error_of(response)["message"] == "not nine"
            server.wait_idle()


def test_who_forbids_all_tokens_is_to_blame(http):
    for stream in (False, True):
        body = {"stream": stream, "allowed_token_ids": [5], "min_tokens": 2, "stop_token_ids": [5]}
        told = http.post("/v1/completions", json={"prompt": "a", "max_tokens": 2, **body}).text
        assert "no token is allowed" in told and '"code":400' in told.replace(" ", "")


def test_engine_errors_of_one_request(server):
    """finish_reason "error" is a 500 with the engine's own short reason."""

    class Failing(Broken):
        async def generate(self, *args, **kwargs):
            async for output in self._llm.generate(*args, **kwargs):
                for choice in output.outputs:
                    choice.finish_reason, choice.error = "error", f"no token is allowed\n  File {SECRET}"
                yield output

    with server.serve(ServerArgs(), Failing(server.llm, None)) as http:
        error = refuse(http, 500)
        assert "no token is allowed" in error["message"] and "secret" not in error["message"]


def test_unsupported_endpoints_are_501(server):
    with server.serve(ServerArgs(), Broken(server.llm, NotSupported("this model only embeds"))) as http:
        assert refuse(http, 501)["type"] == "NotImplementedError"


def test_messages_have_no_paths_and_no_addresses():
    told = error_body(400, "cannot read /usr/lib/python3/site.py (object at 0x7f98eb7cdb10) of and/or, 1/2, http://a/b")[
        "error"
    ]
    assert told["message"] == "cannot read <path> (object at <address>) of and/or, 1/2, http://a/b"
    assert len(error_body(400, "x" * 10_000)["error"]["message"]) == 2000


def test_request_ids_are_told_unless_that_is_turned_off(server, http):
    assert http.get("/v1/models", headers={"X-Request-Id": "mine"}).headers["x-request-id"] == "mine"
    assert len(http.get("/v1/models").headers["x-request-id"]) == 32
    with server.serve(ServerArgs(enable_request_id_headers=False)) as silent:
        assert "x-request-id" not in silent.get("/v1/models").headers
