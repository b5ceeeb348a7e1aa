"""Routes that vLLM has beside OpenAI's."""

import pytest

from quire.config.server_args import ServerArgs
from serving import error_of

PROMPT = {"prompt": "a", "max_tokens": 3, "temperature": 0}
CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3, "temperature": 0}


def test_invocations_are_told_apart(http):
    completion = http.post("/invocations", json=PROMPT).json()
    assert completion["object"] == "text_completion"
    assert completion["choices"] == http.post("/v1/completions", json=PROMPT).json()["choices"]
    chat = http.post("/invocations", json=CHAT).json()
    assert chat["object"] == "chat.completion"
    assert chat["choices"] == http.post("/v1/chat/completions", json=CHAT).json()["choices"]
    streamed = http.post("/invocations", json=CHAT | {"stream": True})
    assert streamed.headers["content-type"].startswith("text/event-stream") and streamed.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("body", [{}, {"input": "a"}, [], "a", {"messages": "a"}, {"prompt": "a", "n": -1}])
def test_invocations_that_are_nothing(http, body):
    assert error_of(http.post("/invocations", json=body))["code"] == 400


@pytest.mark.parametrize("path", ["/v1/audio/transcriptions", "/v1/audio/speech"])
def test_endpoints_of_other_models_say_what_this_one_does(http, path):
    error = error_of(http.post(path, json={"input": "a"}))
    assert (error["code"], error["type"]) == (404, "NotFoundError")
    for said in (path, "`tiny` generates text", "/v1/chat/completions"):
        assert said in error["message"]


@pytest.mark.parametrize(
    ("path", "switch"),
    [
        ("/load", "--enable-server-load-tracking"),
        ("/tokenizer_info", "--enable-tokenizer-info-endpoint"),
        ("/server_info", "QUIRE_SERVER_DEV_MODE=1"),
        ("/start_profile", '--profiler-config \'{"profiler": "torch"'),
    ],
)
def test_what_is_switched_off_says_how_to_switch_it_on(http, path, switch):
    error = error_of(http.get(path))
    assert error["code"] == 404
    assert error["message"].startswith(f"{path} is switched off here: start the server with {switch}")


def test_tokenizer_info(server, http):
    with server.serve(ServerArgs(enable_tokenizer_info_endpoint=True)) as telling:
        told = telling.get("/tokenizer_info").json()
    assert told["tokenizer_class"] and told["chat_template"] == server.llm.tokenizer.chat_template
    assert not any(name.endswith("_file") for name in told)


@pytest.mark.parametrize(
    "path",
    [
        "/v1/embeddings",
        "/v1/embed",
        "/v2/embed",
        "/pooling",
        "/score",
        "/v1/score",
        "/rerank",
        "/v1/rerank",
        "/v2/rerank",
        "/classify",
    ],
)
def test_pooling_endpoints_of_a_model_that_generates_say_how_to_have_them(http, path):
    error = error_of(http.post(path, json={"input": "a"}))
    assert (error["code"], error["param"]) == (400, "model")
    assert error["message"].startswith(
        f"{path} is not available: the model `tiny` generates text. It answers /v1/chat/completions"
    )
    convert = "classify" if path == "/classify" else "embed"
    assert f"--runner pooling --convert {convert}" in error["message"]


@pytest.mark.parametrize("path", ["/reset_prefix_cache", "/collective_rpc", "/abort_requests", "/inference/v1/generate"])
def test_developer_routes_say_how_to_switch_them_on(http, path):
    error = error_of(http.post(path, json={}))
    assert error["code"] == 404
    assert error["message"].startswith(f"{path} is switched off here: start the server with QUIRE_SERVER_DEV_MODE=1")


@pytest.mark.parametrize("path", ["/sleep", "/wake_up", "/pause", "/update_weights", "/fault_tolerance/status"])
def test_developer_routes_that_are_not_built_say_why(http, path):
    error = error_of(http.post(path, json={}))
    assert error["code"] == 404 and error["message"].startswith(f"{path} is not available here: ")


def test_developer_routes(server, monkeypatch):
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    with server.serve(ServerArgs()) as http:
        body = {"prompt": "the quick brown fox jumps over the lazy dog", "max_tokens": 1}
        cached = [
            http.post("/v1/completions", json=body).json()["usage"]["prompt_tokens_details"]["cached_tokens"] for _ in range(2)
        ]
        server.wait_idle()
        assert http.post("/reset_prefix_cache").json() == {"success": True}
        again = http.post("/v1/completions", json=body).json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached[1] > 0 and again == 0
        assert http.get("/get_world_size").json() == {"world_size": 1}
        [rank] = http.post("/collective_rpc", json={"method": "describe_rank"}).json()["results"]
        assert rank["ranks"] == 1 and rank["parameters"] > 0
        assert error_of(http.post("/collective_rpc", json={"method": "exec"}))["code"] == 400
        assert error_of(http.post("/collective_rpc", json={}))["code"] == 400
        assert error_of(http.post("/sleep"))["message"].startswith("/sleep is not available here")
