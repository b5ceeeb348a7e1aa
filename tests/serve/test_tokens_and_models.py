"""/tokenize, /detokenize and /v1/models."""

import pytest

from serving import NAME, error_of


def test_tokenize(http):
    answer = http.post("/tokenize", json={"prompt": "the quick", "return_token_strs": True}).json()
    assert answer == {"count": 2, "max_model_len": 256, "tokens": answer["tokens"], "token_strs": ["the", "Ġquick"]}
    assert http.post("/tokenize", json={"prompt": "the quick"}).json()["token_strs"] is None
    assert http.post("/tokenize", json={"prompt": ""}).json()["tokens"] == []


def test_tokenize_messages(http):
    body = {"messages": [{"role": "user", "content": "hi"}]}
    ids = http.post("/tokenize", json=body).json()["tokens"]
    assert http.post("/detokenize", json={"tokens": ids}).json() == {"prompt": "<user>hi</s><assistant>"}
    answer = http.post("/v1/chat/completions", json={**body, "max_tokens": 1, "return_token_ids": True}).json()
    assert answer["prompt_token_ids"] == ids
    shorter = http.post("/tokenize", json={**body, "add_generation_prompt": False}).json()
    assert shorter["count"] < len(ids)
    assert http.post("/tokenize", json={**body, "tools": []}).status_code == 400


@pytest.mark.parametrize("text", ["plain", "héllo ☃ 漢字 🙂", " two  spaces ", "</s>"])
def test_round_trip(http, text):
    tokens = http.post("/tokenize", json={"prompt": text}).json()["tokens"]
    assert http.post("/detokenize", json={"tokens": tokens}).json() == {"prompt": text}


@pytest.mark.parametrize("tokens", [[-1], [2**40], ["a"], "abc", None])
def test_tokens_that_are_none(http, tokens):
    assert http.post("/detokenize", json={"tokens": tokens}).status_code == 400


def test_neither_prompt_nor_messages(http):
    error = error_of(http.post("/tokenize", json={}))
    assert error["param"] == "body" and error["message"].endswith("body: give a prompt or messages")
    assert "body.prompt" in error_of(http.post("/tokenize", json={"prompt": 3}))["param"]


def test_models(http):
    cards = http.get("/v1/models").json()
    assert cards["object"] == "list" and [card["id"] for card in cards["data"]] == [NAME, "also-tiny"]
    card = cards["data"][0]
    assert card["object"] == "model" and card["owned_by"] == "quire" and card["parent"] is None
    assert card["max_model_len"] == 256 and card["permission"][0]["object"] == "model_permission"
    assert http.get(f"/v1/models/{NAME}").json() == card
    assert error_of(http.get("/v1/models/org/other"))["param"] == "model"


def test_docs(http):
    schema = http.get("/openapi.json").json()
    posts = {path for path, item in schema["paths"].items() if "post" in item}
    generating = {
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/responses",
        "/v1/responses/{response_id}/cancel",
        "/v1/messages",
        "/api/chat",
        "/api/generate",
        "/api/show",
    }
    assert posts == generating | {"/v1/messages/count_tokens", "/tokenize", "/detokenize", "/invocations"}
    fields = schema["components"]["schemas"]["ChatRequest"]["properties"]
    assert {"messages", "max_completion_tokens", "stream_options", "repetition_detection"} <= set(fields)


def test_docs_can_be_off(server):
    from quire.config.server_args import ServerArgs

    with server.serve(ServerArgs(disable_fastapi_docs=True)) as http:
        assert {http.get(path).status_code for path in ("/docs", "/redoc", "/openapi.json")} == {404}
