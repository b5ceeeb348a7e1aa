"""Answers that models write almost right, through a served request: streamed and whole, valid arguments and no marks."""

import json

import pytest
from scripted import Scripted, byte_tokenizer

from quire.text.tokenizer_files import read_tokenizer
from serving import events_of

SCHEMA = {
    "type": "object",
    "properties": {"s": {"type": "string"}, "n": {"type": "integer"}, "l": {"type": "array"}},
}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]
HELLO = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return byte_tokenizer(tmp_path_factory.mktemp("bytes"))


def ask(server, stream, **fields):
    """Text, reasoning, calls and the finish reason."""
    response = server.post("/v1/chat/completions", {"messages": HELLO, "tools": TOOLS, "stream": stream, **fields})
    assert response.status_code == 200, response.text
    text, reasoning, calls, finish = "", "", [], None
    for event in events_of(response.text)[:-1] if stream else [response.json()]:
        for choice in event["choices"]:
            said = choice["delta" if stream else "message"]
            text += said.get("content") or ""
            reasoning += said.get("reasoning") or ""
            for call in said.get("tool_calls") or []:
                if "id" in call:
                    calls.append("")
                calls[-1] += call["function"]["arguments"]
            finish = choice["finish_reason"] or finish
    return text, reasoning, [json.loads(call) for call in calls], finish


DSML = '<｜DSML｜WRAPPER><｜DSML｜invoke name="f"><｜DSML｜parameter name="n" string="true">07</｜DSML｜parameter>\n'
STEP3 = '<｜tool_call_begin｜><steptml:invoke name="f"><steptml:parameter name="s">5</steptml:parameter></steptml:invoke>'
KIMI = '<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"s": 5}<|tool_call_end|>'


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "parser, script, text, call",
    [
        ("deepseek_v32", DSML.replace("WRAPPER", "function_calls") + "</｜DSML｜function_calls>", "", {"n": 7}),
        ("deepseek_v4", DSML.replace("WRAPPER", "tool_calls") + "</｜DSML｜tool_calls>", "", {"n": 7}),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"s": 5, "n": 1}}</tool_call>', "", {"s": "5", "n": 1}),
        ("pythonic", "[f(s=5, n=07)]", "", {"s": "5", "n": 7}),
        ("gemma4", "<|tool_call>call:f{s:5,n:07}<tool_call|>", "", {"s": "5", "n": 7}),
        ("functiongemma", "<start_function_call>call:f{s:5}<end_function_call>", "", {"s": "5"}),
        ("step3", f"Look.<｜tool_calls_begin｜>{STEP3}<｜tool_call_end｜><｜tool_calls_end｜>", "Look.", {"s": "5"}),
        ("kimi_k2", f"<|tool_calls_section_begin|>So. {KIMI}<|tool_calls_section_end|>", "", {"s": "5"}),
        ("lfm2", "<|tool_call_start|>[f(l={'a'}, s='sed '1,2p' x')]<|tool_call_end|>", "", {"l": ["a"], "s": "sed '1,2p' x"}),
    ],
)  # fmt: skip
def test_calls_that_are_almost_right(tokenizer, parser, script, text, call, stream):
    server = Scripted(tokenizer, tool_call_parser=parser).say(script)
    assert ask(server, stream) == (text, "", [call], "tool_calls")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "parser, script, text, reasoning",
    [
        ("qwen3", "<think>a</think>b</think>c", "b\nc", "a"),
        ("qwen3", "</think>Hello", "Hello", ""),
        ("gemma4", "<|channel>thought\na<channel|>b<channel|>", "b", "a"),
        ("gemma4", "<channel|>b", "b", ""),
        ("cohere_command3", "<|START_RESPONSE|>foo <co>bar</co: 0:[1]>.<|END_RESPONSE|>", "foo bar.", ""),
        ("minimax_m2_append_think", "a</think>b", "<think>a</think>b", ""),
        ("minimax_m3", "<mm:think>a</mm:think>b", "b", "a"),
        ("inkling", "<|content_thinking|>a<|end_message|><|message_model|><|content_text|>b<|end_message|>", "b", "a"),
        ("muse_glimmer", " to=self<|message|>a<|eom|><|start|>assistant to=user<|message|>b<|eot|>", "b", "a"),
        ("kimi_k3", "<|open|>think<|sep|>a<|close|>think<|sep|><|open|>response<|sep|>b<|close|>response<|sep|>", "b", "a"),
    ],
)
def test_marks_do_not_reach_the_text(tokenizer, parser, script, text, reasoning, stream):
    server = Scripted(tokenizer, reasoning_parser=parser).say(script)
    assert ask(server, stream, tools=None) == (text, reasoning, [], "stop")


def test_reasoning_in_the_text_beside_a_tool_that_must_be_called(tokenizer):
    server = Scripted(tokenizer, reasoning_parser="minimax_m2_append_think").say(
        'a</think>[{"name": "f", "parameters": {"n": 1}}]'
    )
    assert ask(server, False, tool_choice="required") == ("", "a", [{"n": 1}], "tool_calls")


def test_a_model_whose_marks_have_a_suffix(tmp_path):
    byte_tokenizer(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"token_suffix": ":x"}))
    server = Scripted(read_tokenizer(tmp_path), tool_call_parser="hy_v3", reasoning_parser="hy_v3")
    pair = "<arg_key:x>n</arg_key:x><arg_value:x>1</arg_value:x>"
    call = f"<tool_calls:x><tool_call:x>f<tool_sep:x>{pair}</tool_call:x></tool_calls:x>"
    assert ask(server.say(f"<think:x>a</think:x>b{call}"), False) == ("b", "a", [{"n": 1}], "tool_calls")


def test_other_protocols_have_the_same_values(tokenizer):
    server = Scripted(tokenizer, tool_call_parser="hermes").say('<tool_call>{"name": "f", "arguments": {"s": 07}}</tool_call>')
    flat = [{"type": "function", "name": "f", "parameters": SCHEMA}]
    [item] = server.post("/v1/responses", {"input": "hi", "tools": flat}).json()["output"]
    assert json.loads(item["arguments"]) == {"s": "07"}
    own = [{"name": "f", "input_schema": SCHEMA}]
    [block] = server.post("/v1/messages", {"messages": HELLO, "max_tokens": 99, "tools": own}).json()["content"]
    assert block["input"] == {"s": "07"}
