"""/v1/responses and /v1/messages: the same events in other clothes. Streamed and whole answers are the same there, too."""

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import Scripted, byte_tokenizer
from test_tool_calls import CALLS, PARAMETERS, TEXT

from parse_samples import FAMILIES, hermes
from patience import PATIENCE
from quire.serve.response_objects import ResponseStore, StoredResponse
from serving import error_of

RESPONSE_TOOLS = [{"type": "function", "name": name, "parameters": PARAMETERS} for name in ("get_weather", "add")]
MESSAGE_TOOLS = [{"name": name, "input_schema": PARAMETERS} for name in ("get_weather", "add")]
HELLO = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return byte_tokenizer(tmp_path_factory.mktemp("bytes"))


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def family_server(request, tokenizer):
    tool, thinking, write, together = FAMILIES[request.param]
    server = Scripted(tokenizer, enable_auto_tool_choice=True, tool_call_parser=tool, reasoning_parser=thinking)
    return server, write, together


@pytest.fixture
def server(tokenizer):
    return Scripted(tokenizer, enable_auto_tool_choice=True, tool_call_parser="hermes", reasoning_parser="qwen3")


def named_events(text):
    """Events with names; the name is the type."""
    out = []
    for block in text.split("\n\n"):
        if block:
            name, data = block.split("\n", 1)
            out.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {out[-1]['type']}"
    return out


def respond(server, **body):
    response = server.post("/v1/responses", {"input": "hi", "tools": RESPONSE_TOOLS, **body})
    assert response.status_code == 200, response.text
    return named_events(response.text) if body.get("stream") else response.json()


def message(server, **body):
    request = {"model": "scripted", "max_tokens": 1000, "messages": HELLO, "tools": MESSAGE_TOOLS, **body}
    response = server.post("/v1/messages", request)
    assert response.status_code == 200, response.text
    return named_events(response.text) if body.get("stream") else response.json()


# ---- putting streams together as clients do, checking every step


def fold_response(events):
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    created, progress, *rest, last = events
    assert (created["type"], progress["type"]) == ("response.created", "response.in_progress")
    assert created["response"]["status"] == "in_progress" and created["response"]["output"] == []
    output, texts = [], []
    for event in rest:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert event["output_index"] == len(output) and event["item"]["status"] == "in_progress"
            output.append(event["item"])
            texts.append("")
        elif kind == "output_item.done":
            assert event["item"]["id"] == output[event["output_index"]]["id"]
            output[event["output_index"]] = event["item"]
        elif kind.endswith(".delta"):
            assert event["item_id"] == output[-1]["id"] and event["delta"]
            texts[event["output_index"]] += event["delta"]
        elif kind.endswith(".done") and kind != "content_part.done":
            assert event.get("text", event.get("arguments")) == texts[event["output_index"]]
        else:
            assert kind in ("content_part.added", "content_part.done") and event["content_index"] == 0
    for item, text in zip(output, texts, strict=True):
        told = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        assert told == text
    assert last["response"]["output"] == output
    return last["response"]


def fold_message(events):
    start, *rest, delta, end = events
    assert (start["type"], delta["type"], end["type"]) == ("message_start", "message_delta", "message_stop")
    assert start["message"]["content"] == [] and start["message"]["stop_reason"] is None
    blocks, pieces, closed = [], [], 0
    for event in rest:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks) == closed
            blocks.append(event["content_block"])
            pieces.append("")
        elif event["type"] == "content_block_delta":
            assert event["index"] == len(blocks) - 1 == closed
            pieces[-1] += next(value for key, value in event["delta"].items() if key != "type")
        else:
            assert event["type"] == "content_block_stop" and event["index"] == closed
            closed += 1
    assert closed == len(blocks)
    for block, piece in zip(blocks, pieces, strict=True):
        if block["type"] == "tool_use":
            block["input"] = json.loads(piece or "{}")
        else:
            block[block["type"]] = piece
    return {**start["message"], "content": blocks, **delta["delta"], "usage": delta["usage"]}


def without_ids(value):
    if isinstance(value, list):
        return [without_ids(item) for item in value]
    if isinstance(value, dict):
        hidden = ("id", "call_id", "created_at", "completed_at")
        return {key: without_ids(item) for key, item in value.items() if key not in hidden}
    return value


@settings(max_examples=8, deadline=None)
@given(reasoning=TEXT, text=TEXT, calls=CALLS, data=st.data())
def test_streamed_and_whole_answers_are_the_same(family_server, reasoning, text, calls, data):
    server, write, together = family_server
    if calls and not together:
        text = ""
    server.say(write(reasoning, text, calls), data.draw(st.none() | st.sets(st.integers(0, 200), max_size=10)))

    whole = respond(server)
    assert without_ids(fold_response(respond(server, stream=True))) == without_ids(whole)
    told = {
        kind: [item for item in whole["output"] if item["type"] == kind] for kind in ("message", "reasoning", "function_call")
    }
    assert "".join(item["content"][0]["text"] for item in told["message"]) == text
    assert "".join(item["content"][0]["text"] for item in told["reasoning"]) == reasoning
    assert [(item["name"], json.loads(item["arguments"])) for item in told["function_call"]] == calls

    whole = message(server)
    assert without_ids(fold_message(message(server, stream=True))) == without_ids(whole)
    kinds = {kind: [block for block in whole["content"] if block["type"] == kind] for kind in ("text", "thinking", "tool_use")}
    assert "".join(block["text"] for block in kinds["text"]) == text
    assert "".join(block["thinking"] for block in kinds["thinking"]) == reasoning
    assert [(block["name"], block["input"]) for block in kinds["tool_use"]] == calls
    assert whole["stop_reason"] == ("tool_use" if calls else "end_turn")


# ---- /v1/responses


def test_a_response(server):
    answer = respond(server.say("<think>hm</think>Hi."), metadata={"a": "b"}, instructions="Be kind.", max_output_tokens=50)
    assert answer["id"].startswith("resp_") and answer["object"] == "response" and answer["status"] == "completed"
    assert [item["type"] for item in answer["output"]] == ["reasoning", "message"]
    assert answer["metadata"] == {"a": "b"} and answer["instructions"] == "Be kind." and answer["max_output_tokens"] == 50
    usage = answer["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert usage["output_tokens_details"] == {"reasoning_tokens": 2}
    assert server.llm.seen[-1][0].startswith("<system>Be kind.</s><user>hi</s>")


def test_an_incomplete_response(server):
    answer = respond(server.say("so much", finish="length"))
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    events = respond(server.say("so much", finish="length"), stream=True)
    assert events[-1]["type"] == "response.incomplete"


def test_input_items(server):
    items = [
        {"role": "developer", "content": "rules"},
        {"role": "user", "content": [{"type": "input_text", "text": "2+2?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "easy"}]},
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"n": 4}'},
        {"type": "function_call_output", "call_id": "c1", "output": "4"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "4", "annotations": []}]},
        {"role": "user", "content": "thanks"},
    ]
    respond(server.say("ok"), input=items)
    prompt = server.llm.seen[-1][0]
    assert prompt.startswith('<system>rules</s><user>2+2?</s><assistant>[add:{"n": 4}]</s><tool>4(c1)</s><assistant>4</s>')


def test_the_conversation_goes_on(server):
    first = respond(server.say("<think>hm</think>One." + hermes([("add", {"n": 1})])), instructions="first")
    call = next(item for item in first["output"] if item["type"] == "function_call")
    output = [{"type": "function_call_output", "call_id": call["call_id"], "output": "2"}]
    second = respond(server.say("Two."), input=output, previous_response_id=first["id"])
    prompt = server.llm.seen[-1][0]
    assert prompt.startswith('<user>hi</s><assistant>One.[add:{"n": 1}]</s><tool>2(') and "first" not in prompt
    respond(server.say("Three."), input="and?", previous_response_id=second["id"])
    assert "<assistant>Two.</s><user>and?" in server.llm.seen[-1][0]
    unknown = server.post("/v1/responses", {"input": "x", "previous_response_id": "resp_0"})
    assert unknown.status_code == 404 and error_of(unknown)["param"] == "previous_response_id"


def test_stored_responses(server):
    answer = respond(server.say("Hi."))
    assert server.call("GET", f"/v1/responses/{answer['id']}").json() == answer
    refused = server.call("POST", f"/v1/responses/{answer['id']}/cancel")
    assert refused.status_code == 400
    assert server.call("DELETE", f"/v1/responses/{answer['id']}").json()["deleted"] is True
    assert server.call("GET", f"/v1/responses/{answer['id']}").status_code == 404
    private = respond(server, store=False)
    assert server.call("GET", f"/v1/responses/{private['id']}").status_code == 404
    streamed = respond(server, stream=True)[-1]["response"]
    assert server.call("GET", f"/v1/responses/{streamed['id']}").json() == streamed


def test_what_a_response_was_made_from(server):
    def page(response, **query):
        answer = server.call("GET", f"/v1/responses/{response['id']}/input_items", params=query)
        assert answer.status_code == 200, answer.text
        return answer.json()

    first = respond(server.say("One." + hermes([("add", {"n": 1})])), input="hi")
    call = first["output"][1]
    given = [
        {"type": "function_call_output", "call_id": call["call_id"], "output": "2"},
        {"role": "user", "content": [{"type": "input_text", "text": "go on"}], "id": "msg_mine"},
        {"role": "assistant", "content": "well"},
    ]
    second = respond(server.say("Two."), input=given, previous_response_id=first["id"])
    [item] = page(first)["data"]
    assert item == {
        "id": item["id"], "type": "message", "role": "user", "status": "completed",
        "content": [{"type": "input_text", "text": "hi"}],
    }  # fmt: skip
    everything = page(second, order="asc")
    kinds = [item["type"] for item in everything["data"]]
    assert kinds == ["message", "message", "function_call", "function_call_output", "message", "message"]
    assert everything["data"][:3] == [item, *first["output"]] and everything["data"][4]["id"] == "msg_mine"
    assert everything["data"][5]["content"] == [{"type": "output_text", "annotations": [], "text": "well"}]
    assert everything["has_more"] is False and everything["object"] == "list"
    assert page(second)["data"] == everything["data"][::-1], "the latest first, unless told"
    two = page(second, order="asc", limit=2)
    assert two["has_more"] and (two["first_id"], two["last_id"]) == tuple(item["id"] for item in everything["data"][:2])
    rest = page(second, order="asc", limit=4, after=two["last_id"])
    assert two["data"] + rest["data"] == everything["data"] and not rest["has_more"]
    assert page(second, after=item["id"]) == {
        "object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False,
    }  # fmt: skip
    for query, param in (({"after": "nobody"}, "after"), ({"limit": 0}, "query.limit"), ({"order": "up"}, "query.order")):
        refused = server.call("GET", f"/v1/responses/{second['id']}/input_items", params=query)
        assert refused.status_code == 400 and error_of(refused)["param"] == param
    assert server.call("GET", "/v1/responses/resp_0/input_items").status_code == 404
    refused = server.call("GET", f"/v1/responses/{second['id']}", params={"stream": True})
    assert refused.status_code == 400 and error_of(refused)["param"] == "stream"


def test_a_call_that_broke_off_is_not_part_of_the_conversation(server):
    first = respond(server.say('One.<tool_call>{"name": "add", "arguments": {"n": 1', finish="length"))
    assert [item["status"] for item in first["output"]] == ["completed", "incomplete"]
    respond(server.say("Two."), input="and?", previous_response_id=first["id"])
    assert "<assistant>One.</s><user>and?" in server.llm.seen[-1][0]


def test_the_background(server):
    import asyncio

    import httpx

    async def scenario():
        transport = httpx.ASGITransport(server.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://scripted") as client:
            server.say("Hello there.")
            server.llm.pause = 0.001
            body = {"input": "hi", "background": True}
            begun = (await client.post("/v1/responses", json=body)).json()
            assert begun["status"] == "queued"
            deadline = time.monotonic() + PATIENCE
            while (told := (await client.get(f"/v1/responses/{begun['id']}")).json())["status"] != "completed":
                assert time.monotonic() < deadline
                await asyncio.sleep(0.005)
            assert told["output"][0]["content"][0]["text"] == "Hello there."
            server.llm.pause = 5.0
            slow = (await client.post("/v1/responses", json=body)).json()
            await asyncio.sleep(0.02)
            ended = server.llm.ended
            cancelled = (await client.post(f"/v1/responses/{slow['id']}/cancel")).json()
            assert cancelled["status"] == "cancelled" and server.llm.ended == ended + 1
            again = (await client.post(f"/v1/responses/{slow['id']}/cancel")).json()
            assert again["status"] == "cancelled"

    asyncio.run(scenario())


def test_the_store_has_bounds():
    store = ResponseStore(3, 10_000)
    for i in range(5):
        store.put(StoredResponse({"id": f"r{i}"}, [], None))
    assert len(store) == 3 and store.get("r1", None) is None and store.get("r2", None) is not None
    store.put(StoredResponse({"id": "r5"}, [], None))  # r2 was used just now, so r3 goes
    assert store.get("r3", None) is None and store.get("r2", None) is not None
    store.put(StoredResponse({"id": "big"}, [{"content": "x" * 9_970}], None))
    assert len(store) == 1 and store.bytes <= 10_000
    store.put(StoredResponse({"id": "huge"}, [{"content": "x" * 11_000}], None))
    assert store.get("huge", None) is None and len(store) == 1
    assert store.get("big", "somebody else") is None
    store.drop("big")
    assert len(store) == store.bytes == 0


def token_names(tokens):
    return "".join(token["token"] for token in tokens)


@pytest.mark.parametrize("cuts", [None, [], [2, 11, 13]], ids=["by token", "whole", "in parts"])
def test_a_response_has_the_logprobs_of_its_text(server, cuts, monkeypatch):
    """Of the text only, not of the reasoning, the markers or the call, and the same in a stream."""
    monkeypatch.setattr(server.llm, "scored", True)
    said = "<think>to think, think</think>think to the <end" + hermes([("add", {"n": 1})])
    asked = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    whole = respond(server.say(said, cuts), **asked)
    [part] = next(item for item in whole["output"] if item["type"] == "message")["content"]
    assert part["text"] == token_names(part["logprobs"]) == "think to the <end" and whole["top_logprobs"] == 2
    assert all(bytes(token["bytes"]).decode() == token["token"] for token in part["logprobs"])
    assert all(len(token["top_logprobs"]) == 2 and token["logprob"] < 0 for token in part["logprobs"])
    events = respond(server.say(said, cuts), stream=True, **asked)
    last = fold_response(events)
    assert without_ids(last["output"]) == without_ids(whole["output"])
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert all(token_names(event["logprobs"]) == event["delta"] for event in deltas)
    [done] = [event for event in events if event["type"] == "response.output_text.done"]
    assert done["logprobs"] == [token for event in deltas for token in event["logprobs"]]
    assert set(done["logprobs"][0]) == {"token", "logprob", "top_logprobs"} == {*part["logprobs"][0]} - {"bytes"}


def test_logprobs_of_characters_in_several_tokens(server, monkeypatch):
    monkeypatch.setattr(server.llm, "scored", True)
    whole = respond(server.say("h\u00e9 \u6f22"), include=["message.output_text.logprobs"])
    [part] = whole["output"][0]["content"]
    assert bytes(byte for token in part["logprobs"] for byte in token["bytes"]).decode() == "h\u00e9 \u6f22"
    assert respond(server.say("hi"))["output"][0]["content"][0]["logprobs"] == []
    assert error_of(server.post("/v1/responses", {"input": "hi", "top_logprobs": 21}))["param"] == "top_logprobs"


@pytest.mark.parametrize(
    "body, param",
    [
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": None, "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "add"}}}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"top_logprobs": -1}, "body.top_logprobs"),
        ({"conversation": "c"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"background": True, "stream": True}, "background"),
        ({"background": True, "store": False}, "background"),
        ({"metadata": {"a": 1}}, "body.metadata"),
        ({"max_output_tokens": 0}, "body.max_output_tokens"),
        ({"temperature": 3}, "temperature"),
    ],
)
def test_what_responses_refuse(server, body, param):
    response = server.post("/v1/responses", {"input": "hi", "tools": RESPONSE_TOOLS, **body})
    assert response.status_code == 400 and error_of(response)["param"] == param


# ---- /v1/messages


def test_a_message(server):
    answer = message(
        server.say("<think>hm</think>Hi."), system=[{"type": "text", "text": "Be kind."}], temperature=0.5, top_k=3
    )
    assert answer["id"].startswith("msg") and (answer["type"], answer["role"]) == ("message", "assistant")
    assert [block["type"] for block in answer["content"]] == ["thinking", "text"]
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("end_turn", None)
    prompt, params = server.llm.seen[-1]
    assert prompt.startswith("<system>Be kind.</s><user>hi</s>") and params.top_k == 3
    usage = answer["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == len(server.llm.tokenizer.encode(prompt, False))


def test_why_messages_end(server):
    stopped = message(server.say("one STOP two"), stop_sequences=["STOP"])
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "STOP")
    assert message(server.say("one", finish="length"))["stop_reason"] == "max_tokens"
    cut = message(server.say('<tool_call>{"name": "add", "arguments": {"n": 1, "s": "hal', finish="length"))
    assert cut["stop_reason"] == "max_tokens" and cut["content"][0]["input"] == {"n": 1}
    named = {"type": "tool", "name": "add"}
    answer = message(server.say('x</think>{"n": 1}'), tool_choice=named)
    assert answer["stop_reason"] == "tool_use" and answer["content"][-1]["input"] == {"n": 1}
    assert answer["content"][-1]["id"].startswith("toolu_")


def test_content_blocks(server):
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "2+2?"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "easy", "signature": ""},
                {"type": "text", "text": "Let me add."},
                {"type": "tool_use", "id": "t1", "name": "add", "input": {"n": 4}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "4"}], "is_error": True},
                {"type": "text", "text": "and?"},
            ],
        },
    ]
    message(server.say("ok"), messages=messages)
    expected = '<user>2+2?</s><assistant>Let me add.[add:{"n": 4}]</s><tool>Error: 4(t1)</s><user>and?</s>'
    assert server.llm.seen[-1][0].startswith(expected)
    message(server, messages=[*HELLO, {"role": "assistant", "content": "It is"}])
    assert server.llm.seen[-1][0].endswith("<assistant>It is")


def test_thinking_is_a_matter_of_the_template(server):
    for kind, shown in (("enabled", True), ("disabled", False)):
        answer = message(server.say("<think>hm</think>Hi."), thinking={"type": kind})
        assert any(block["type"] == "thinking" for block in answer["content"]) is shown


def test_count_tokens(server):
    body = {"model": "scripted", "messages": HELLO, "tools": MESSAGE_TOOLS, "system": "x"}
    counted = server.post("/v1/messages/count_tokens", body).json()
    used = message(server.say("a"), system="x")["usage"]
    assert counted == {"input_tokens": used["input_tokens"] + used["cache_read_input_tokens"]}


@pytest.mark.parametrize(
    "body, status, kind",
    [
        ({"messages": []}, 400, "invalid_request_error"),
        ({"max_tokens": None}, 400, "invalid_request_error"),
        ({"model": "nobody"}, 404, "not_found_error"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, 400, "invalid_request_error"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, 400, "invalid_request_error"),
        ({"tools": None, "tool_choice": {"type": "any"}}, 400, "invalid_request_error"),
        ({"tool_choice": {"type": "tool", "name": "nobody"}}, 400, "invalid_request_error"),
        ({"temperature": 1.5}, 400, "invalid_request_error"),
        ({"mcp_servers": [{}]}, 400, "invalid_request_error"),
        ({"max_tokens": 1 << 30}, 400, "invalid_request_error"),
    ],
)
def test_errors_have_anthropics_shape(server, body, status, kind):
    request = {"model": "scripted", "max_tokens": 10, "messages": HELLO, "tools": MESSAGE_TOOLS, **body}
    response = server.post("/v1/messages", request)
    told = response.json()
    assert response.status_code == status and told["type"] == "error" and told["error"]["type"] == kind
    assert told["error"]["message"] and told["request_id"]


def refused_message(server, **body):
    response = server.post("/v1/messages", {"messages": HELLO, "max_tokens": 10, **body})
    told = response.json()
    assert set(told) == {"type", "error", "request_id"} and told["type"] == "error"
    return response.status_code, told["error"]["type"], told["error"]["message"]


def test_what_is_wrong_is_told_in_anthropics_words(server):
    wrong = "invalid_request_error"
    told = server.post("/v1/messages", {"messages": HELLO}).json()["error"]
    assert told == {"type": wrong, "message": "max_tokens: Field required"}
    assert refused_message(server, temperature=1.5)[2] == "temperature: Input should be less than or equal to 1"
    several = refused_message(server, temperature=1.5, max_tokens=0)[2]
    assert "max_tokens: Input should be greater" in several and "; temperature: Input" in several and "body" not in several
    assert refused_message(server, model="nobody")[:2] == (404, "not_found_error")


def test_too_much_is_told_in_the_words_that_clients_look_for(server):
    server.llm.prompts.max_model_len = 100
    assert refused_message(server, max_tokens=90)[::2] == (
        400, "input length and `max_tokens` exceed context limit: 23 + 90 > 100, decrease one of them",
    )  # fmt: skip
    long = [{"role": "user", "content": "x" * 200}]
    message = refused_message(server, messages=long)[2]
    assert message.startswith("prompt is too long: ") and message.endswith(" tokens > 100 maximum")


@pytest.mark.parametrize(
    ("option", "value"), [("defer_loading", True), ("allowed_callers", ["code_execution"]), ("input_examples", [{"a": 1}])]
)
def test_options_of_tools_that_cannot_be_had(server, option, value):
    tool = {"name": "f", "input_schema": {"type": "object"}}
    assert refused_message(server, tools=[{**tool, option: value}])[2].startswith(f"tools[0].{option} cannot be used: ")
    harmless = {"defer_loading": False, "allowed_callers": ["direct"], "input_examples": [], "strict": False}
    hints = {"cache_control": {"type": "ephemeral"}, "eager_input_streaming": True}
    assert message(server.say("Hi."), tools=[{**tool, **harmless, **hints}])["content"][0]["text"] == "Hi."


def test_thinking_that_is_not_shown(server):
    for kind in ("adaptive", "enabled"):
        answer = message(server.say("<think>hm</think>Hi."), thinking={"type": kind, "display": "omitted"})
        assert [block["type"] for block in answer["content"]] == ["text"]
