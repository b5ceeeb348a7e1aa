"""Mangled tool calls through the front door: three protocols, streamed and not, tell the same, and never more than is true."""

import json

import pytest
from scripted import Scripted, byte_tokenizer

from parse_mangled import answers
from parse_samples import FAMILIES
from serving import events_of

SCHEMA = {
    "type": "object",
    "properties": {"s": {"type": "string"}, "n": {"type": "integer"}, "o": {"type": "object"}, "l": {"type": "array"}},
}
NAMES = ["f", "get_weather"]
TOOLS = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in NAMES]
FLAT = [{"type": "function", "name": name, "parameters": SCHEMA} for name in NAMES]
OTHERS = [{"name": name, "input_schema": SCHEMA} for name in NAMES]
HELLO = [{"role": "user", "content": "hi"}]
ROUNDS = 2


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return byte_tokenizer(tmp_path_factory.mktemp("bytes"))


def is_object(arguments):
    try:
        return isinstance(json.loads(arguments), dict)
    except ValueError:
        return False


def chat(server, **body):
    response = server.post("/v1/chat/completions", {"messages": HELLO, "tools": TOOLS, **body})
    assert response.status_code == 200, response.text
    return response


def streamed(text):
    told, calls, finish = {"content": "", "reasoning": ""}, [], None
    for event in events_of(text)[:-1]:
        for choice in event["choices"]:
            for key in told:
                told[key] += choice["delta"].get(key) or ""
            for call in choice["delta"].get("tool_calls", []):
                if "id" in call:
                    calls.append([call["function"]["name"], ""])
                calls[call["index"]][1] += call["function"]["arguments"]
            finish = choice["finish_reason"] or finish
    return told["content"], told["reasoning"], calls, finish


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_mangled_calls(tokenizer, family):
    tool, thinking, *_ = FAMILIES[family]
    server = Scripted(tokenizer, tool_call_parser=tool, reasoning_parser=thinking)
    for script, _ in answers(family, NAMES, ROUNDS, seed=7):
        server.say(script.encode("utf-8", "replace").decode())
        choice = chat(server).json()["choices"][0]
        message = choice["message"]
        calls = [[call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls", [])]
        whole = bool(calls) and all(is_object(arguments) for _, arguments in calls)
        assert choice["finish_reason"] == ("tool_calls" if whole else "stop"), script
        told = (message["content"] or "", message["reasoning"] or "", calls, choice["finish_reason"])
        assert streamed(chat(server, stream=True).text) == told

        body = {"messages": HELLO, "max_tokens": 5000, "tools": OTHERS}
        response = server.post("/v1/messages", body)
        assert response.status_code == 200, response.text
        blocks = [block for block in response.json()["content"] if block["type"] == "tool_use"]
        assert [block["name"] for block in blocks] == [name for name, _ in calls]
        assert response.json()["stop_reason"] == ("tool_use" if whole else "end_turn")
        assert f'"{response.json()["stop_reason"]}"' in server.post("/v1/messages", {**body, "stream": True}).text

        output = server.post("/v1/responses", {"input": "hi", "tools": FLAT}).json()["output"]
        items = [item for item in output if item["type"] == "function_call"]
        assert [[item["name"], item["arguments"]] for item in items] == calls
        assert all(is_object(item["arguments"]) for item in items if item["status"] == "completed")
