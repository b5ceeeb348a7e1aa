"""Calls that a grammar makes a model write: repetitions end the answer, and complete calls are always told as such."""

import json

import pytest
from scripted import Scripted, byte_tokenizer

from parse_samples import hermes, required
from quire.config.server_args import ServerArgs
from serving import events_of

PARAMETERS = {"type": "object", "properties": {"n": {"type": "integer"}}}
NAMES = ("get_weather", "get_time")
TOOLS = [{"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in NAMES]
FLAT = [{"type": "function", "name": name, "parameters": PARAMETERS} for name in NAMES]
OTHERS = [{"name": name, "input_schema": PARAMETERS} for name in NAMES]
HELLO = [{"role": "user", "content": "hi"}]
ONE = ("get_weather", {"n": 17})
FIVE_TIMES = required([ONE] * 5)[:-9]  # the length cuts the last one off


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return byte_tokenizer(tmp_path_factory.mktemp("bytes"))


@pytest.fixture
def served(tokenizer):
    return Scripted(tokenizer, tool_call_parser="hermes")


def chat(server, stream=False, **fields):
    """The calls of every choice and its finish reason."""
    response = server.post("/v1/chat/completions", {"messages": HELLO, "tools": TOOLS, "stream": stream, **fields})
    assert response.status_code == 200, response.text
    calls, finish = {}, {}
    for event in events_of(response.text)[:-1] if stream else [response.json()]:
        for choice in event["choices"]:
            told = calls.setdefault(choice["index"], [])
            for call in choice["delta" if stream else "message"].get("tool_calls") or []:
                if "id" in call:
                    told.append([call["function"]["name"], ""])
                told[-1][1] += call["function"]["arguments"]
            finish[choice["index"]] = choice["finish_reason"] or finish.get(choice["index"])
    found = [(told, finish[index]) for index, told in sorted(calls.items())]
    return found if "n" in fields else found[0]


def named_events(response):
    """The events of a stream whose events have names."""
    return [json.loads(line.removeprefix("data: ")) for line in response.text.splitlines() if line.startswith("data: ")]


def written(*calls):
    return [[name, json.dumps(arguments)] for name, arguments in calls]


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_repeats_the_one_before_ends_the_answer(served, stream):
    served.say(FIVE_TIMES, finish="length")
    assert chat(served, stream, tool_choice="required") == (written(ONE), "tool_calls")
    assert served.llm.steps < len(FIVE_TIMES) / 2, "the engine is not asked for more"
    other = ("get_weather", {"n": 18})
    served.say(required([ONE, other, other, ONE]), finish="length")
    assert chat(served, stream, tool_choice="required") == (written(ONE, other), "tool_calls")
    served.say(required([ONE, other, ONE, other]))
    assert chat(served, stream, tool_choice="required") == (written(ONE, other, ONE, other), "tool_calls")


@pytest.mark.parametrize("stream", [False, True])
def test_each_choice_ends_by_itself(served, stream):
    served.say(FIVE_TIMES, finish="length")
    assert chat(served, stream, tool_choice="required", n=3) == [(written(ONE), "tool_calls")] * 3
    assert served.llm.steps < len(FIVE_TIMES) / 2


def test_usage_and_logprobs_of_an_answer_that_was_read_as_it_came(served):
    served.llm.scored = True
    body = {"messages": HELLO, "tools": TOOLS, "tool_choice": "required", "return_token_ids": True, "logprobs": True}
    answer = served.say(required([ONE])).post("/v1/chat/completions", body).json()
    [choice] = answer["choices"]
    assert answer["usage"]["completion_tokens"] == len(choice["token_ids"]) == len(required([ONE])) + 1
    assert "".join(token["token"] for token in choice["logprobs"]["content"][:-1]) == required([ONE])


@pytest.mark.parametrize("stream", [False, True])
def test_the_other_protocols(served, stream):
    served.say(FIVE_TIMES, finish="length")
    body = {"messages": HELLO, "max_tokens": 500, "tools": OTHERS, "tool_choice": {"type": "any"}, "stream": stream}
    response = served.post("/v1/messages", body)
    if stream:
        events = named_events(response)
        assert sum(event["type"] == "content_block_start" for event in events) == 1
        assert next(e for e in events if e["type"] == "message_delta")["delta"]["stop_reason"] == "tool_use"
    else:
        assert response.json()["stop_reason"] == "tool_use"
        assert [block["input"] for block in response.json()["content"]] == [ONE[1]]
    response = served.post("/v1/responses", {"input": "hi", "tools": FLAT, "tool_choice": "required", "stream": stream})
    told = named_events(response)[-1]["response"] if stream else response.json()
    assert (told["status"], told["incomplete_details"]) == ("completed", None)
    assert [(item["arguments"], item["status"]) for item in told["output"]] == [('{"n": 17}', "completed")]


@pytest.mark.parametrize("stream", [False, True])
def test_one_call_where_no_more_are_allowed(served, stream):
    """Without a grammar nothing but the server keeps the model from a second call."""
    script = hermes([ONE, ("get_time", {}), ("get_time", {"n": 2})]) + "and on " * 50
    served.say(script, finish="length")
    assert chat(served, stream, parallel_tool_calls=False) == (written(ONE), "tool_calls")
    assert served.llm.steps < len(script) / 2
    assert chat(served, stream) == (written(ONE, ("get_time", {}), ("get_time", {"n": 2})), "tool_calls")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("rest", ["", ', {"name": "get_ti', ', {"name": "get_weather", "parameters": {"n": 1'])
def test_complete_calls_finish_as_calls_whatever_the_length_cuts_off(served, stream, rest):
    served.say(required([ONE])[:-1] + rest, finish="length")
    assert chat(served, stream, tool_choice="required") == (written(ONE), "tool_calls")


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_is_cut_off_is_not_complete(served, stream):
    served.say(required([ONE])[:-1] + ', {"name": "get_time", "parameters": {"n": 1', finish="length")
    assert chat(served, stream, tool_choice="required") == ([*written(ONE), ["get_time", '{"n": 1']], "length")
    served.say('{"n": 1', finish="length")
    named = {"type": "function", "function": {"name": "get_time"}}
    assert chat(served, stream, tool_choice=named) == ([["get_time", '{"n": 1']], "length")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "script, item",
    [
        ('[{"name": "get_w', {"type": "function_call", "name": "get_weather", "arguments": ""}),
        ('[{"name": "get_time", "para', {"type": "function_call", "name": "get_time", "arguments": ""}),
        ('[{"name": "get_', {"type": "message", "role": "assistant"}),
        ("[", {"type": "message", "role": "assistant"}),
        ('[{"name": "get_time", "parameters": {"n', {"type": "function_call", "name": "get_time", "arguments": '{"n'}),
    ],
)
def test_a_response_with_few_tokens_has_an_incomplete_item(served, stream, script, item):
    served.say(script, finish="length")
    response = served.post("/v1/responses", {"input": "hi", "tools": FLAT, "tool_choice": "required", "stream": stream})
    events = named_events(response) if stream else []
    told = events[-1]["response"] if stream else response.json()
    assert (told["status"], told["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    [output] = told["output"]
    assert output["status"] == "incomplete" and {key: output[key] for key in item} == item
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert not stream or done == [output]
    if item["type"] == "function_call":
        assert chat(served, stream, tool_choice="required") == ([[item["name"], item["arguments"]]], "length")


def test_text_that_the_length_cuts_off_is_an_incomplete_item(served):
    answer = served.say("Well, I", finish="length").post("/v1/responses", {"input": "hi"}).json()
    assert answer["output"][0]["status"] == answer["status"] == "incomplete"


def test_a_model_that_never_ends_its_list_of_calls(server):
    """A real engine: the tokens that could end the list are forbidden, so every call is followed by another."""
    tokenizer = server.llm.get_tokenizer()
    ends = [token for token in range(len(tokenizer)) if "]" in tokenizer.decode([token])]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
    body = {
        "model": "tiny", "messages": HELLO, "tools": tools, "tool_choice": "required", "max_tokens": 150, "n": 2, "seed": 1,
        "logit_bias": {str(token): -100 for token in ends},
    }  # fmt: skip
    with server.serve(ServerArgs(tool_call_parser="hermes")) as http:
        answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    for choice in answer.json()["choices"]:
        assert [call["function"] for call in choice["message"]["tool_calls"]] == [{"name": "f", "arguments": "{}"}]
        assert choice["finish_reason"] == "tool_calls"
    assert answer.json()["usage"]["completion_tokens"] < 2 * 150
