"""Ollama's API: its official Python client, unchanged, against a real socket, and bodies that no client would send."""

import asyncio
import json

import numpy as np
import ollama
import pytest
from front_desk import Desk
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scripted import Scripted, byte_tokenizer
from test_fuzz import INTEGERS, JUNK, REALS, TEXTS, mostly
from test_fuzz_protocols import CHAT_TOOLS, send
from test_official_clients import ASK, CALLS, PARAMETERS, SCRIPT, listening

from parse_samples import hermes
from quire.serve.ollama.models import API_VERSION
from quire.serve.ollama.protocol import HINTS, REFUSED, WORKING
from serving import NAME, Running
from tiny_model import make_model

MODEL = "scripted"
GREEDY = {"temperature": 0, "num_predict": 12}
WEATHER = [{"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 9}}, "required": ["a"]}


@pytest.fixture
def real(http):
    with ollama.Client(host=str(http.base_url)) as client:
        yield client


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    tokenizer = byte_tokenizer(tmp_path_factory.mktemp("bytes"))
    server = Scripted(tokenizer, tool_call_parser="hermes", reasoning_parser="qwen3")
    with listening(server.app) as url:
        yield server, url


@pytest.fixture
def scripted(served):
    server = served[0].say(SCRIPT)
    server.llm.seen.clear()
    return server


@pytest.fixture
def client(scripted, served):
    with ollama.Client(host=served[1]) as client:
        yield client


def error_of(response):
    assert set(response.json()) == {"error"}
    return response.status_code, response.json()["error"]


# ---- answers of a real engine


def test_whole_and_streamed_answers_are_those_of_the_other_protocols(real, http):
    body = {"messages": ASK, "temperature": 0, "max_tokens": 12}
    expected = http.post("/v1/chat/completions", json=body).json()
    text = expected["choices"][0]["message"]["content"]
    for model in (NAME, f"{NAME}:latest"):
        whole = real.chat(model, ASK, options=GREEDY)
        assert (whole.message.content, whole.message.role, whole.model) == (text, "assistant", model)
        *parts, last = real.chat(model, ASK, stream=True, options=GREEDY)
        assert "".join(part.message.content for part in parts) == text and len(parts) > 2
        assert not any(part.done for part in parts) and last.done and last.message.content == ""
        for end in (whole, last):
            assert (end.done_reason, end.eval_count) == ("length", 12)
            assert end.prompt_eval_count == expected["usage"]["prompt_tokens"]
            assert 0 < end.prompt_eval_duration + end.eval_duration <= end.total_duration
            assert min(end.prompt_eval_duration, end.eval_duration) > 0
    prompt = ASK[0]["content"]
    assert real.generate(NAME, prompt, options=GREEDY).response == text
    assert "".join(part.response for part in real.generate(NAME, prompt, stream=True, options=GREEDY)) == text
    completion = http.post("/v1/completions", json={"prompt": "the quick", "temperature": 0, "max_tokens": 12}).json()
    assert real.generate(NAME, "the quick", raw=True, options=GREEDY).response == completion["choices"][0]["text"]


@pytest.mark.parametrize("raw", [False, True])
def test_an_answer_ends_with_the_context_where_num_predict_is_more(real, raw):
    *_, last = real.generate(NAME, "the quick", raw=raw, stream=True, options={"temperature": 0, "num_predict": 10**6})
    assert last.done_reason == "length" and last.prompt_eval_count + last.eval_count == 256


def test_logprobs(real, http):
    whole = real.chat(NAME, ASK, options=GREEDY, logprobs=True, top_logprobs=2)
    body = {"messages": ASK, "temperature": 0, "max_tokens": 12, "logprobs": True, "top_logprobs": 2}
    expected = http.post("/v1/chat/completions", json=body).json()["choices"][0]["logprobs"]["content"]
    assert [(one.token, one.logprob) for one in whole.logprobs] == [(one["token"], one["logprob"]) for one in expected]
    assert all(len(one.top_logprobs) == 2 for one in whole.logprobs)
    parts = real.chat(NAME, ASK, stream=True, options=GREEDY, logprobs=True, top_logprobs=2)
    assert [one for part in parts for one in part.logprobs or ()] == whole.logprobs
    assert len(real.generate(NAME, "the", raw=True, options=GREEDY, logprobs=True).logprobs) == 12


def test_format(real):
    options = {"temperature": 1, "seed": 1, "num_predict": 100}
    chat, generated = (
        real.chat(NAME, ASK, format=SCHEMA, options=options),
        real.generate(NAME, "x", format=SCHEMA, options=options),
    )
    bare = real.generate(NAME, "x", raw=True, format=SCHEMA, options=options)
    for text in (chat.message.content, generated.response, bare.response):
        assert json.loads(text)["a"] <= 9
    assert real.generate(NAME, "x", format="json", options=options).response.lstrip().startswith("{")
    for raw in (False, True):
        for stream in (False, True):
            with pytest.raises(ollama.ResponseError, match=r"^format: .*objekt.*\(status code: 400\)"):
                list(real.generate(NAME, "x", raw=raw, format={"type": "objekt"}, stream=stream))


def test_what_is_said_of_models(real, http):
    tags = real.list().models
    assert [one.model for one in tags] == [f"{NAME}:latest", "also-tiny:latest"]
    assert len(tags[0].digest) == 64 and tags[0].size > 0 and tags[0].details.family == "llama"
    [running, _] = real.ps().models
    assert running.context_length == 256 and running.digest == tags[0].digest and running.size_vram == 0
    shown = real.show(NAME)
    assert shown.modelinfo["general.architecture"] == "llama" and shown.modelinfo["llama.context_length"] == 256
    assert shown.capabilities == ["completion", "tools"] and shown.details == tags[0].details
    assert http.post("/api/show", json={"name": "also-tiny:latest"}).json()["details"] == shown.details.model_dump()
    assert http.get("/api/version").json()["version"] == API_VERSION
    with pytest.raises(ollama.ResponseError, match="404"):
        real.show("nobody")


def test_requests_without_a_prompt_load_the_model(real):
    for answer in (real.generate(NAME), real.chat(NAME), real.chat(NAME, [], keep_alive=-1), *real.chat(NAME, stream=True)):
        assert answer.done and answer.done_reason == "load"
    for keep_alive in (0, "0", "0s"):
        with pytest.raises(ollama.ResponseError, match=r"keep_alive=0 cannot unload .*400"):
            real.generate(NAME, keep_alive=keep_alive)
    assert real.generate(NAME, "x", keep_alive=0, options=GREEDY).eval_count == 12


# ---- embeddings


@pytest.fixture(scope="module")
def embedder(tmp_path_factory):
    running = Running(make_model(tmp_path_factory.mktemp("embedder")), runner="pooling", hf_overrides={"is_matryoshka": True})
    yield running
    running.close()


@pytest.fixture
def embedding(embedder):
    with ollama.Client(host=str(embedder.http.base_url)) as client:
        yield client
    embedder.wait_idle()


def test_embeddings(embedder, embedding):
    http, client = embedder.http, embedding

    def vectors(texts, **more):
        answer = http.post("/v1/embeddings", json={"input": texts, **more}).json()
        return [one["embedding"] for one in answer["data"]], answer["usage"]["prompt_tokens"]

    texts, long = ["the quick", "brown fox"], "fox " * 300
    several = client.embed(f"{NAME}:latest", texts, options={"num_ctx": 256, "temperature": 0.5}, keep_alive=-1)
    assert several.prompt_eval_count == vectors(texts)[1]
    assert several.model == f"{NAME}:latest" and several.total_duration > 0
    for found, expected in (
        (several.embeddings, vectors(texts)),
        (client.embed(NAME, texts[0], dimensions=8).embeddings, vectors(texts[0], dimensions=8)),
        ([client.embeddings(NAME, texts[0]).embedding], vectors(texts[0], use_activation=False)),
        (client.embed(NAME, long).embeddings, vectors(long, truncate_prompt_tokens=-1, truncation_side="right")),
    ):
        np.testing.assert_allclose(found, expected[0], atol=1e-5)
    assert client.embed(NAME, []).embeddings == client.embed(NAME, "").embeddings == []
    assert client.embeddings(NAME).embedding == []
    assert client.show(NAME).capabilities == ["embedding"]
    refused = [
        (lambda: client.embed(NAME, long, truncate=False), "send truncate=true"),
        (lambda: client.embed(NAME, ["a", ""]), r"input\[1\] is empty"),
        (lambda: client.embed(NAME, "a", dimensions=10**6), "dimensions"),
        (lambda: client.embed(NAME, "a", options={"mirostat": 1}), "options.mirostat"),
        (lambda: client.embed("nobody", "a"), "404"),
        (lambda: client.chat(NAME, ASK), "/api/chat is not available.*It answers /api/embed, .*serve a generative model"),
        (lambda: list(client.generate(NAME, "a", stream=True)), "serve a generative model"),
    ]
    for ask, words in refused:
        with pytest.raises(ollama.ResponseError, match=words):
            ask()
    for body in ({"input": 5}, {"input": [5]}, {"input": "a", "dimensions": -1}, {"prompt": "a"}, {"input": ["a"] * 2049}):
        assert error_of(http.post("/api/embed", json=body))[0] == 400


# ---- what comes to the engine


@pytest.mark.parametrize(
    ("option", "value", "field"),
    [
        ("temperature", 0.5, "temperature"), ("top_p", 0.5, "top_p"), ("top_k", 7, "top_k"), ("min_p", 0.25, "min_p"),
        ("seed", 5, "seed"), ("num_predict", 9, "max_tokens"), ("stop", ["x"], "stop"),
        ("repeat_penalty", 1.5, "repetition_penalty"), ("presence_penalty", 0.5, "presence_penalty"),
        ("frequency_penalty", 0.5, "frequency_penalty"),
    ],
)  # fmt: skip
def test_options(client, scripted, option, value, field):
    for raw in (False, True):
        client.generate(MODEL, "x", raw=raw, options={option: value})
        assert getattr(scripted.llm.seen[-1][1], field) == value
        client.generate(MODEL, "x", raw=raw, options={option: None})
        assert getattr(scripted.llm.seen[-1][1], field) != value
    assert option in WORKING


def test_hints_change_nothing(client, scripted):
    values = {"num_ctx": 1 << 20, "mirostat_tau": 5.0, "mirostat_eta": 0.1, "num_gpu": 99, "num_thread": 8}
    hints = {name: values.get(name, name.startswith(("num", "main", "draft"))) for name in HINTS}
    hints |= {name: int(hints[name]) for name in ("num_keep", "num_batch", "main_gpu", "draft_num_predict")}
    hints["numa"] = True
    neutral = {name: value for name, (value, _) in REFUSED.items()} | {"repeat_last_n": 64}
    client.chat(MODEL, ASK)
    client.chat(MODEL, ASK, options=hints | neutral, keep_alive="5m")
    (prompt, params), (same, others) = scripted.llm.seen
    assert prompt == same and params == others


def test_tools_and_thinking(client, scripted):
    whole = client.chat(MODEL, ASK, tools=WEATHER, think=True)
    parts = list(client.chat(MODEL, ASK, tools=WEATHER, stream=True))
    assert whole.message.content == "".join(part.message.content for part in parts) == "Let me look."
    assert whole.message.thinking == "".join(part.message.thinking or "" for part in parts) == "rain?"
    streamed = [call for part in parts for call in part.message.tool_calls or ()]
    for calls in (whole.message.tool_calls, streamed):
        assert [(call.function.name, call.function.arguments) for call in calls] == CALLS
    assert whole.done_reason == parts[-1].done_reason == "stop"
    assert client.chat(MODEL, ASK, tools=[]).message.tool_calls is None
    assert client.chat(MODEL, ASK, tools=WEATHER, think=False).message.thinking is None
    assert client.generate(MODEL, "x").thinking == "rain?"
    assert client.generate(MODEL, "x", raw=True).response == SCRIPT

    history = [
        *ASK,
        whole.message,
        {"role": "tool", "tool_name": "get_weather", "content": "wet"},
        {"role": "tool", "content": "dry"},
    ]
    client.chat(MODEL, history, tools=WEATHER)
    prompt = scripted.llm.seen[-1][0]
    assert '[get_weather:{"city": "Köln", "days": 2}]' in prompt and "<tools>get_weather</tools>" in prompt
    assert "<tool>wet</s>" not in prompt and "<tool>wet(call00000)" in prompt and "<tool>dry(call00001)" in prompt


def test_think_reaches_the_template(tmp_path):
    template = "{{ messages[0].content }}{{ enable_thinking }}{{ reasoning_effort }}<assistant>"
    server = Scripted(byte_tokenizer(tmp_path, template), reasoning_parser="qwen3").say("hm</think>Hi")
    for think in (True, False, "high"):
        assert server.post("/api/generate", {"prompt": "x", "think": think, "stream": False}).status_code == 200
    assert [prompt for prompt, _ in server.llm.seen] == ["xTrue<assistant>", "xFalse<assistant>", "xTruehigh<assistant>"]


def test_a_call_that_was_cut_off_is_left_out(scripted, client):
    scripted.say(hermes([("get_weather", {"city": "Köln"}), ("get_weather", {"city": "Rom"})])[:-20], finish="length")
    whole = client.chat(MODEL, ASK, tools=WEATHER)
    parts = list(client.chat(MODEL, ASK, tools=WEATHER, stream=True))
    for calls in (whole.message.tool_calls, [call for part in parts for call in part.message.tool_calls or ()]):
        assert [call.function.arguments for call in calls] == [{"city": "Köln"}]
    assert whole.done_reason == parts[-1].done_reason == "length"


def test_a_model_without_a_chat_template_completes(tmp_path):
    tokenizer = byte_tokenizer(tmp_path)
    tokenizer.chat_template = None
    server = Scripted(tokenizer).say("Hi")
    assert server.post("/api/generate", {"prompt": "x", "stream": False}).json()["response"] == "Hi"
    assert server.llm.seen[-1][0] == "x"
    assert error_of(server.post("/api/generate", {"prompt": "x", "system": "y"}))[0] == 400


def test_lines(scripted):
    """A line end in the text is none of the stream, whatever a client counts as one."""
    scripted.say("a\n\u2028\u0085b" + '\n<tool_call>\n{"name": "get_weather", "arguments": {\n"city":\r\n"Rom"}}\n</tool_call>')
    answer = scripted.post("/api/chat", {"messages": ASK, "tools": WEATHER})
    assert answer.headers["content-type"] == "application/x-ndjson"
    lines = [json.loads(line) for line in answer.text.splitlines()]
    assert "".join(line["message"]["content"] for line in lines).startswith("a\n\u2028\u0085b")
    assert [call["function"]["arguments"] for line in lines for call in line["message"].get("tool_calls", ())] == [
        {"city": "Rom"}
    ]


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_an_error_in_the_middle_of_a_stream_is_its_last_line(scripted, client, path, monkeypatch):
    generate = scripted.llm.generate

    async def break_off(*args, **options):
        count = 0
        async for output in generate(*args, **options):
            yield output
            if (count := count + 1) == 20:
                raise RuntimeError("/secret/path")

    monkeypatch.setattr(scripted.llm, "generate", break_off)
    answer = scripted.post(path, {"messages": ASK} if "chat" in path else {"prompt": "x"})
    lines = [json.loads(line) for line in answer.text.splitlines()]
    assert set(lines[-1]) == {"error"} and "internal error" in lines[-1]["error"] and len(lines) > 1
    with pytest.raises(ollama.ResponseError, match="internal error"):
        list(client.chat(MODEL, ASK, stream=True) if "chat" in path else client.generate(MODEL, "x", stream=True))


# ---- refusals

X = {"prompt": "x"}
BAD = {
    "no such model": ("/api/generate", X | {"model": "nobody"}, 404, "`nobody` does not exist"),
    "empty model": ("/api/generate", X | {"model": ""}, 404, "does not exist"),
    "a long name": ("/api/generate", X | {"model": "x" * 9999}, 400, "model may have at most 256 characters"),
    "model of a wrong type": ("/api/chat", {"model": 5, "messages": ASK}, 400, "model: "),
    "prompt of a wrong type": ("/api/generate", {"prompt": 5}, 400, "prompt: "),
    "stream of a wrong type": ("/api/generate", X | {"stream": "yes"}, 400, "stream: "),
    "options of a wrong type": ("/api/generate", X | {"options": [1]}, 400, "options: "),
    "an option of a wrong type": ("/api/generate", X | {"options": {"top_k": "many"}}, 400, "options.top_k: "),
    "a boolean is no number": ("/api/generate", X | {"options": {"temperature": True}}, 400, "options.temperature: "),
    "an unknown option": ("/api/generate", X | {"options": {"temprature": 1}}, 400, "Send temperature"),
    "an option in the wrong place": ("/api/generate", X | {"temperature": 1}, 400, "Send it in options"),
    "another protocol's field": ("/api/chat", {"messages": ASK, "max_tokens": 5}, 400, "max_tokens cannot be used"),
    "temperature": ("/api/generate", X | {"options": {"temperature": -1}}, 400, "options.temperature must be"),
    "top_p": ("/api/generate", X | {"raw": True, "options": {"top_p": 1.5}}, 400, "options.top_p must be"),
    "top_k": ("/api/generate", X | {"options": {"top_k": 10**30}}, 400, "options.top_k: "),
    "seed": ("/api/generate", X | {"options": {"seed": 2**64}}, 400, "options.seed: "),
    "repeat_penalty": ("/api/generate", X | {"options": {"repeat_penalty": 0}}, 400, "options.repeat_penalty must be"),
    "num_predict": ("/api/generate", X | {"options": {"num_predict": -3}}, 400, "options.num_predict must be at least -2"),
    "num_ctx": ("/api/generate", X | {"options": {"num_ctx": 2**21}}, 400, "at most the model's context of 1048576 tokens"),
    "stop": ("/api/generate", X | {"options": {"stop": ["a"] * 9}}, 400, "options.stop may have at most"),
    "an empty stop": ("/api/generate", X | {"raw": True, "options": {"stop": [""]}}, 400, "options.stop must not"),
    "repeat_last_n": ("/api/generate", X | {"options": {"repeat_penalty": 2, "repeat_last_n": 9}}, 400, "repeat_last_n must"),
    **{name: ("/api/generate", X | {"options": {name: 2}}, 400, f"options.{name} must be") for name in REFUSED},
    "format": ("/api/generate", X | {"format": "xml"}, 400, 'format: should be "json"'),
    "think": ("/api/generate", X | {"think": "very"}, 400, "think: should be"),
    "think of a raw prompt": ("/api/generate", X | {"think": True, "raw": True}, 400, "think requires a chat template"),
    "system of a raw prompt": ("/api/generate", X | {"system": "y", "raw": True}, 400, "system requires a chat template"),
    "keep_alive": ("/api/generate", X | {"keep_alive": "5 minutes"}, 400, "keep_alive: should be"),
    "top_logprobs": ("/api/generate", X | {"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs: "),
    "top_logprobs alone": ("/api/generate", X | {"top_logprobs": 2}, 400, "top_logprobs requires logprobs"),
    **{name: ("/api/generate", X | {name: value}, 400, f"{name} cannot be used") for name, value in {
        "suffix": "y", "template": "y", "context": [1], "width": 5, "shift": True}.items()},
    "chat of generate": ("/api/generate", {"messages": ASK}, 400, "they belong to /api/chat"),
    "generate of chat": ("/api/chat", X, 400, "it belongs to /api/generate"),
    "a long prompt": ("/api/generate", {"prompt": "x" * (1 << 20)}, 400, "This model's maximum context length is 1048576"),
    "messages of a wrong type": ("/api/chat", {"messages": "hi"}, 400, "messages: "),
    "a message that is none": ("/api/chat", {"messages": [5]}, 400, "messages.0: "),
    "no role": ("/api/chat", {"messages": [{"content": "a"}]}, 400, "messages[0].role must be"),
    "parts": ("/api/chat", {"messages": [{"role": "user", "content": [1]}]}, 400, "messages[0].content must be a string"),
    "images": (
        "/api/chat", {"messages": [{"role": "user", "images": ["aGk="]}]}, 400,
        "messages[0].images[0]: image input is not supported by Scripted, which reads text only",
    ),
    "images of a prompt": ("/api/generate", X | {"images": ["aGk="]}, 400, "images[0]: image input is not supported"),
    "images of a chat": ("/api/chat", {"messages": ASK, "images": ["aGk="]}, 400, "send them in a message"),
    "images of a raw prompt": ("/api/generate", X | {"images": ["aGk="], "raw": True}, 400, "images requires a chat template"),
    "one image": ("/api/chat", {"messages": [{"role": "user", "images": "aGk="}]}, 400, "images must be a list of images"),
    "an image that is none": ("/api/chat", {"messages": [{"role": "user", "images": [5]}]}, 400, "messages[0].images[0] must"),
    "calls": ("/api/chat", {"messages": [{"role": "assistant", "tool_calls": 5}]}, 400, "tool_calls must be a list"),
    "a call": ("/api/chat", {"messages": [{"role": "assistant", "tool_calls": [{}]}]}, 400, "tool_calls[0] must have"),
    "tools": ("/api/chat", {"messages": ASK, "tools": [{"type": "function"}]}, 400, "tools[0].function needs a name"),
    "embed": ("/api/embed", {"input": "x"}, 400, "serve an embedding model"),
    "embeddings": ("/api/embeddings", {"prompt": "x"}, 400, "--convert embed"),
    **{name: (f"/api/{name}", {"model": "x"}, 400, remedy) for name, remedy in {
        "pull": "quire pull", "create": "quire serve", "copy": "--served-model-name", "push": "hub"}.items()},
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_requests_have_one_sentence(scripted, case):
    path, body, status, words = BAD[case]
    answer = scripted.post(path, body)
    assert answer.status_code == status, answer.text
    assert words in error_of(answer)[1]
    assert scripted.llm.seen == []


def test_other_methods_and_files(scripted, client):
    with pytest.raises(ollama.ResponseError, match="quire rm"):
        client.delete("x")
    assert scripted.call("HEAD", "/api/blobs/sha256:00").status_code == 400
    assert error_of(scripted.call("GET", "/api/chat")) == (405, "GET is not a method of this path; there is POST")
    for raw, words in (
        (b"{", "not valid JSON"),
        (b"\xff", "not valid JSON"),
        (b'{"prompt": "\xff"}', "not valid"),
        (b"", "not valid"),
    ):
        answer = scripted.call("POST", "/api/generate", content=raw)
        assert error_of(answer)[0] == 400 and words in answer.json()["error"]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"content-type": "application/x-www-form-urlencoded"}, 200),  # curl -d
        ({}, 200),
        ({"content-type": "application/json", "origin": "http://a"}, 200),
        ({"content-type": "text/plain", "origin": "http://a"}, 400),
        ({"content-type": "text/plain", "origin": "null"}, 400),
        ({"sec-fetch-site": "cross-site"}, 400),
    ],
)
def test_a_web_page_cannot_send_a_form(scripted, headers, status):
    assert scripted.call("POST", "/api/generate", content=b'{"prompt": "x"}', headers=headers).status_code == status


def test_the_front():
    assert Desk().ask("/", "HEAD").status_code == 200  # the heartbeat of Ollama's clients
    keyed = Desk(api_key=["k"])
    assert error_of(keyed.ask("/api/tags"))[0] == 401
    assert error_of(Desk(loaded=False).ask("/api/chat", "POST"))[0] == 503


OPTIONS = st.dictionaries(
    st.one_of(st.sampled_from([*WORKING, *HINTS, *REFUSED, "repeat_last_n"]), TEXTS),
    st.one_of(INTEGERS, REALS, TEXTS, JUNK),
    max_size=3,
)
CALLED = st.fixed_dictionaries({"function": mostly(st.fixed_dictionaries({"name": TEXTS, "arguments": mostly(st.just({}))}))})
TURNS = st.lists(
    st.fixed_dictionaries(
        {"role": mostly(st.sampled_from(["user", "assistant", "tool", "system"])), "content": mostly(TEXTS)},
        optional={
            "tool_calls": mostly(st.lists(CALLED, max_size=2)),
            **dict.fromkeys(("tool_name", "thinking", "tool_call_id"), mostly(TEXTS)),
            "images": JUNK,
        },
    ),
    max_size=4,
)  # fmt: skip
COMMON = {
    "model": mostly(st.just(MODEL)),
    "stream": mostly(st.booleans()),
    "options": mostly(OPTIONS),
    "format": st.sampled_from(["json", "", SCHEMA, {}, None, "x", 5]),
    "think": st.sampled_from([True, False, "low", "x", None, 0]),
    "keep_alive": st.one_of(INTEGERS, REALS, TEXTS, st.just("5m")),
    "logprobs": mostly(st.booleans()),
    "top_logprobs": INTEGERS,
    "images": mostly(st.just([])),
}
BODIES = st.one_of(
    st.tuples(st.just("/api/chat"), st.fixed_dictionaries({"messages": TURNS}, optional=COMMON | {"tools": CHAT_TOOLS})),
    st.tuples(
        st.just("/api/generate"),
        st.fixed_dictionaries({"prompt": TEXTS}, optional=COMMON | {"raw": st.booleans(), "system": TEXTS, "context": JUNK}),
    ),
    st.tuples(st.sampled_from(["/api/chat", "/api/generate"]), JUNK),
)  # fmt: skip


def test_no_body_is_the_servers_fault(scripted):
    seen = set()

    @settings(max_examples=25, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(st.lists(BODIES, min_size=8, max_size=8))
    def fuzz(requests):
        for (path, _), response in zip(requests, asyncio.run(send(scripted.app, requests)), strict=True):
            assert response.status_code in (200, 400, 404), response.text
            lines = [json.loads(line) for line in response.text.splitlines()]
            assert ("error" in lines[-1]) == (response.status_code != 200), lines[-1]
            assert lines[-1].get("done", True) and lines[-1].get("error", "x")
            seen.add((path, response.status_code))

    fuzz()
    assert {(path, status) for path in ("/api/chat", "/api/generate") for status in (200, 400)} <= seen
