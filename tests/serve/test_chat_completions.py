"""/v1/chat/completions on the wire."""

import pytest

from quire.config.server_args import ServerArgs
from serving import NAME, error_of, events_of

HELLO = [{"role": "user", "content": "héllo"}]


def chat(http, **body):
    response = http.post("/v1/chat/completions", json={"messages": HELLO, "max_tokens": 6, "temperature": 0, **body})
    assert response.status_code == 200, response.text
    return response.json()


def stream(http, **body):
    body = {"messages": HELLO, "max_tokens": 6, "temperature": 0, "stream": True, **body}
    response = http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    events = events_of(response.text)
    assert events[-1] == "[DONE]"
    return events[:-1]


def refused(http, **body):
    response = http.post("/v1/chat/completions", json={"messages": HELLO, "max_tokens": 4, **body})
    assert response.status_code == 400, response.text
    return error_of(response)


def test_the_whole_answer(http):
    answer = chat(http)
    choice = answer["choices"][0]
    assert answer["id"].startswith("chatcmpl-") and answer["object"] == "chat.completion" and answer["model"] == NAME
    assert choice["message"]["role"] == "assistant" and isinstance(choice["message"]["content"], str)
    assert "tool_calls" not in choice["message"] and choice["message"]["refusal"] is None
    assert (choice["index"], choice["finish_reason"], choice["stop_reason"], choice["logprobs"]) == (0, "length", None, None)
    assert answer["usage"]["completion_tokens"] == 6
    assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"] + 6


def test_length_is_the_rest_of_the_context(http):
    body = {"messages": HELLO, "temperature": 0, "ignore_eos": True}
    assert http.post("/v1/chat/completions", json=body).json()["usage"]["total_tokens"] == 256


def test_max_completion_tokens_wins(http):
    assert chat(http, max_completion_tokens=2)["usage"]["completion_tokens"] == 2


def test_stream_order(http):
    events = stream(http, stream_options={"include_usage": True})
    first, *rest, last = events
    assert first["object"] == "chat.completion.chunk"
    assert first["choices"][0] == {
        "index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None,
    }  # fmt: skip
    assert all("role" not in chunk["choices"][0]["delta"] for chunk in rest)
    assert [chunk["choices"][0]["finish_reason"] for chunk in rest] == [None] * (len(rest) - 1) + ["length"]
    assert "stop_reason" in rest[-1]["choices"][0]
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 6
    assert all("usage" not in chunk for chunk in events[:-1])
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in events}) == 1


def test_continuous_usage(http):
    events = stream(http, stream_options={"include_usage": True, "continuous_usage_stats": True})
    assert [event["usage"]["completion_tokens"] for event in events] == [0, 1, 2, 3, 4, 5, 6, 6]


@pytest.mark.parametrize("body", [{}, {"temperature": 1.0, "seed": 11}])
@pytest.mark.parametrize("content", ["the quick brown", "héllo wörld ☃ 漢字"])
def test_streamed_text_is_the_text(http, content, body):
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 60, **body}
    body |= {"logprobs": True, "top_logprobs": 2}
    whole = chat(http, **body)["choices"][0]
    chunks = [chunk["choices"][0] for chunk in stream(http, **body)]
    assert "".join(chunk["delta"]["content"] for chunk in chunks) == whole["message"]["content"]
    told = [entry for chunk in chunks if chunk["logprobs"] for entry in chunk["logprobs"]["content"]]
    assert [entry["token"] for entry in told] == [entry["token"] for entry in whole["logprobs"]["content"]]
    tops = [[[top["bytes"] for top in entry["top_logprobs"]] for entry in one] for one in (told, whole["logprobs"]["content"])]
    assert tops[0] == tops[1]
    # a character may be spread over tokens: their bytes put together are the text
    joined = bytes(byte for entry in told for byte in entry["bytes"]).decode("utf-8", "replace")
    assert joined.removesuffix("</s>") == whole["message"]["content"]


def test_logprobs(http):
    entries = chat(http, logprobs=True, top_logprobs=3)["choices"][0]["logprobs"]["content"]
    assert len(entries) == 6
    for entry in entries:
        values = [top["logprob"] for top in entry["top_logprobs"]]
        assert len(values) == 3 and values == sorted(values, reverse=True)
        assert entry["logprob"] == values[0]  # greedy
        assert set(entry["top_logprobs"][0]) == {"token", "logprob", "bytes"}
    assert chat(http, logprobs=True)["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []
    sampled = chat(http, logprobs=True, top_logprobs=1, temperature=2.0, seed=1, max_tokens=20)
    assert any(e["logprob"] < e["top_logprobs"][0]["logprob"] for e in sampled["choices"][0]["logprobs"]["content"])
    named = chat(http, logprobs=True, return_tokens_as_token_ids=True, return_token_ids=True)["choices"][0]
    assert [entry["token"] for entry in named["logprobs"]["content"]] == [f"token_id:{i}" for i in named["token_ids"]]


def test_n(http):
    body = {"n": 3, "temperature": 1.0, "seed": 3, "max_tokens": 10}
    choices = chat(http, **body)["choices"]
    assert [c["index"] for c in choices] == [0, 1, 2] and len({c["message"]["content"] for c in choices}) > 1
    events = stream(http, **body)
    assert [e["choices"][0]["index"] for e in events[:3]] == [0, 1, 2]
    assert all(e["choices"][0]["delta"].get("role") == "assistant" for e in events[:3])
    streamed = [""] * 3
    for event in events:
        streamed[event["choices"][0]["index"]] += event["choices"][0]["delta"]["content"]
    assert streamed == [c["message"]["content"] for c in choices]


def test_what_the_template_gets(http):
    text = chat(http, return_prompt_text=True)["prompt_text"]
    assert text == "<user>héllo</s><assistant>"
    bare = chat(http, return_prompt_text=True, add_generation_prompt=False)
    assert bare["prompt_text"] == "<user>héllo</s>" and bare["choices"][0]["message"]["role"] == "user"
    parts = [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "input_text", "text": "two"}]}]
    assert chat(http, messages=parts, return_prompt_text=True)["prompt_text"] == "<user>one\ntwo</s><assistant>"


def test_the_last_message_can_be_continued(http):
    messages = [*HELLO, {"role": "assistant", "content": "the quick"}]
    body = {"messages": messages, "add_generation_prompt": False, "continue_final_message": True, "return_prompt_text": True}
    answer = chat(http, **body)
    assert answer["prompt_text"] == "<user>héllo</s><assistant>the quick"
    assert answer["choices"][0]["message"]["role"] == "assistant"
    echoed = chat(http, echo=True, **body)["choices"][0]["message"]["content"]
    assert echoed == "the quick" + answer["choices"][0]["message"]["content"]
    events = stream(http, echo=True, **body)
    assert "".join(event["choices"][0]["delta"]["content"] for event in events) == echoed
    assert refused(http, messages=messages, continue_final_message=True)["param"] == "continue_final_message"


def test_prompt_logprobs_and_ids(http):
    answer = chat(http, prompt_logprobs=0, return_token_ids=True)
    assert len(answer["prompt_logprobs"]) == len(answer["prompt_token_ids"]) == answer["usage"]["prompt_tokens"]
    assert answer["prompt_logprobs"][0] is None
    assert [str(i) for i in answer["prompt_token_ids"][1:]] == [next(iter(p)) for p in answer["prompt_logprobs"][1:]]


def test_templates_of_requests_are_not_trusted(http, server):
    from quire.config.server_args import ServerArgs

    body = {
        "chat_template": "{{ messages[0].content }}!{{ tone }}",
        "return_prompt_text": True,
        "messages": HELLO,
        "max_tokens": 1,
    }
    body["chat_template_kwargs"] = {"tone": "loud"}
    assert refused(http, **body)["param"] == "chat_template"
    with server.serve(ServerArgs(trust_request_chat_template=True)) as trusting:
        assert trusting.post("/v1/chat/completions", json=body).json()["prompt_text"] == "héllo!loud"
    for name in ("chat_template", "tokenize", "messages", "tools"):
        assert refused(http, chat_template_kwargs={name: "x"})["param"] == "chat_template_kwargs"


def test_a_templates_variables_may_have_any_other_name(http):
    chat(http, chat_template_kwargs=dict.fromkeys(("cut", "most", "describe_tools", "variables", "job", "kwargs"), 1))


@pytest.mark.parametrize(
    "body, param",
    [
        ({"tools": []}, "tools"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, "response_format"),
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"choice": ["a"]}}, "response_format"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "json_object": True}}, "structured_outputs"),
        ({"structured_outputs": {"rgx": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a("}}, "structured_outputs"),
        ({"guided_regex": "a+"}, "guided_regex"),
        ({"guided_json": {}}, "guided_json"),
        ({"thinking_token_budget": 3}, "thinking_token_budget"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "no role"}]}, "messages[0].role"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -2}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"n": 2, "temperature": 0}, "n"),
        ({"priority": 3}, "priority"),
        ({"length_penalty": 2.0}, "length_penalty"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1000}, "max_tokens"),
    ],
)
def test_what_is_refused(http, body, param):
    error = refused(http, **body)
    assert error["param"] == param and error["type"] == "BadRequestError"


def test_what_is_not_refused(http):
    chat(http, response_format={"type": "text"}, user="someone", parallel_tool_calls=False, tool_choice="none")
    chat(http, tools=[{"type": "function", "function": {"name": "f"}}], tool_choice="none")
    chat(http, guided_json=None, guided_json_object=False)
    chat(http, session_id="s", stream_options=None, logprobs=None, stop=[], frequency_penalty=None, n=None)


def test_what_templates_get_as_content(server):
    template = "{% for m in messages %}{% if m.content is string %}[{{ m.content }}]{% else %}{{ m.content | length }} parts{% endif %}{% endfor %}"  # noqa: E501
    body = {
        "messages": [{"role": "user", "content": "a"}],
        "max_tokens": 1,
        "chat_template": template,
        "return_prompt_text": True,
    }
    for form, prompt in (("auto", "[a]"), ("string", "[a]"), ("openai", "1 parts")):
        settings = ServerArgs(chat_template_content_format=form, trust_request_chat_template=True)
        with server.serve(settings) as http:
            assert http.post("/v1/chat/completions", json=body).json()["prompt_text"] == prompt
