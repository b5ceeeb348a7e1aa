"""Tool calls and reasoning in /v1/chat/completions: streamed deltas together are the answer that is not streamed."""

import json

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import Scripted, byte_tokenizer

from parse_samples import FAMILIES, hermes
from serving import error_of, events_of

PARAMETERS = {
    "type": "object",
    "properties": {"s": {"type": "string"}, "n": {"type": "integer"}, "o": {"type": "object"}, "l": {"type": "array"}},
}
NAMES = ("get_weather", "add")
TOOLS = [{"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in NAMES]
HELLO = [{"role": "user", "content": "hi"}]
TEXT = st.sampled_from(["", "Hi.", "Grüße, 漢字 🙂!", "a\nb", "1 < 2 & {x}"])
ARGUMENTS = st.sampled_from([{}, {"s": "Köln 🌧"}, {"n": -3, "l": [1, "漢", {"k": None}]}, {"o": {"ü": {"q": ["\\", '"']}}}])
CALLS = st.lists(st.tuples(st.sampled_from(NAMES), ARGUMENTS), max_size=3)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return byte_tokenizer(tmp_path_factory.mktemp("bytes"))


@pytest.fixture
def hermes_server(tokenizer):
    return Scripted(tokenizer, enable_auto_tool_choice=True, tool_call_parser="hermes", reasoning_parser="qwen3")


def ask(server, **body):
    response = server.post("/v1/chat/completions", {"messages": HELLO, "tools": TOOLS, **body})
    assert response.status_code == 200, response.text
    return response.json()


def deltas(server, **body):
    response = server.post("/v1/chat/completions", {"messages": HELLO, "tools": TOOLS, "stream": True, **body})
    assert response.status_code == 200, response.text
    *events, done = events_of(response.text)
    assert done == "[DONE]"
    return events


def fold(events):
    """What a client makes of the chunks."""
    message, finish = {"content": "", "reasoning": "", "tool_calls": []}, None
    for event in events:
        for choice in event["choices"]:
            delta = choice["delta"]
            message["content"] += delta.get("content") or ""
            message["reasoning"] += delta.get("reasoning") or ""
            for call in delta.get("tool_calls", []):
                if "id" in call:
                    assert call["index"] == len(message["tool_calls"]) and call["function"]["arguments"] == ""
                    message["tool_calls"].append([call["function"]["name"], ""])
                else:
                    message["tool_calls"][call["index"]][1] += call["function"]["arguments"]
            finish = choice["finish_reason"] or finish
    return message, finish


def plain(message):
    return {
        "content": message["content"] or "",
        "reasoning": message["reasoning"] or "",
        "tool_calls": [[call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls", [])],
    }


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def family_server(request, tokenizer):
    tool, thinking, write, together = FAMILIES[request.param]
    server = Scripted(tokenizer, enable_auto_tool_choice=True, tool_call_parser=tool, reasoning_parser=thinking)
    return server, write, together


@settings(max_examples=4, deadline=None)
@given(reasoning=TEXT, text=TEXT, calls=CALLS, data=st.data())
def test_streamed_and_whole_answers_are_the_same(family_server, reasoning, text, calls, data):
    server, write, together = family_server
    if calls and not together:
        text = ""
    script = write(reasoning, text, calls)
    cuts = data.draw(st.none() | st.sets(st.integers(0, 200), max_size=10))
    whole = ask(server.say(script, cuts))["choices"][0]
    assert plain(whole["message"])["content"] == text and plain(whole["message"])["reasoning"] == reasoning
    assert [(name, json.loads(arguments)) for name, arguments in plain(whole["message"])["tool_calls"]] == calls
    assert whole["finish_reason"] == ("tool_calls" if calls else "stop")
    assert fold(deltas(server)) == (plain(whole["message"]), whole["finish_reason"])


def test_the_order_of_the_chunks(hermes_server):
    script = "<think>hm</think>Let me see." + hermes([("get_weather", {"s": "Paris"})])
    events = deltas(hermes_server.say(script), stream_options={"include_usage": True})
    kinds = []
    for event in events:
        for choice in event["choices"]:
            kinds += [key for key in choice["delta"] if not kinds or kinds[-1] != key]
    assert kinds == ["role", "content", "reasoning", "content", "tool_calls"]
    first = next(e["choices"][0]["delta"]["tool_calls"][0] for e in events if "tool_calls" in e["choices"][0]["delta"])
    assert first["index"] == 0 and first["type"] == "function" and first["id"].startswith("chatcmpl-tool-")
    assert first["function"] == {"name": "get_weather", "arguments": ""}
    assert events[-2]["choices"][0]["finish_reason"] == "tool_calls" and events[-2]["choices"][0]["delta"] == {}
    assert events[-1]["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2}


def test_usage_and_reasoning_that_is_not_wanted(hermes_server):
    hermes_server.say("<think>hm</think>Yes.")
    answer = ask(hermes_server)
    assert answer["choices"][0]["message"]["reasoning"] == "hm"
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2}
    hidden = ask(hermes_server, include_reasoning=False)
    assert hidden["choices"][0]["message"]["reasoning"] is None and hidden["choices"][0]["message"]["content"] == "Yes."
    assert hidden["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2}
    silent = ask(hermes_server.say("No </think> here."))
    assert silent["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


def test_a_call_cut_off_by_the_length(hermes_server):
    hermes_server.say('<tool_call>{"name": "add", "arguments": {"n": 1', finish="length")
    choice = ask(hermes_server)["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"n": 1'}
    assert fold(deltas(hermes_server)) == (plain(choice["message"]), "length")


TWICE = '<tool_call>{"name": "add", "arguments": {"n": 1}, "arguments": {"n": 2}}</tool_call>'
WRONG = '<tool_call>{"name": "add", "arguments": {"n": 1, oops}}</tool_call>'


def test_arguments_that_are_there_twice(hermes_server):
    choice = ask(hermes_server.say(TWICE))["choices"][0]
    assert plain(choice["message"])["tool_calls"] == [["add", '{"n": 1}']] and choice["finish_reason"] == "tool_calls"
    assert fold(deltas(hermes_server)) == (plain(choice["message"]), "tool_calls")
    messages = {"messages": HELLO, "max_tokens": 99, "tools": [{"name": "add", "input_schema": PARAMETERS}]}
    answer = hermes_server.post("/v1/messages", messages)
    assert answer.status_code == 200 and answer.json()["content"][0]["input"] == {"n": 1}


@pytest.mark.parametrize("script", [WRONG, hermes([("add", {})]) + WRONG, WRONG + hermes([("add", {})])])
def test_arguments_that_do_not_parse_never_finish_as_calls(hermes_server, script):
    choice = ask(hermes_server.say(script))["choices"][0]
    assert choice["finish_reason"] == "stop" and "oops" in choice["message"]["content"]
    assert fold(deltas(hermes_server)) == (plain(choice["message"]), "stop")
    messages = {"messages": HELLO, "max_tokens": 99, "tools": [{"name": "add", "input_schema": PARAMETERS}]}
    answer = hermes_server.post("/v1/messages", messages).json()
    assert answer["stop_reason"] == "end_turn" and {"n": 1} in [block.get("input") for block in answer["content"]]
    streamed = hermes_server.post("/v1/messages", {**messages, "stream": True}).text
    assert '"end_turn"' in streamed and '"tool_use","stop' not in streamed.replace(" ", "")
    tools = [{"type": "function", "name": "add", "parameters": PARAMETERS}]
    response = hermes_server.post("/v1/responses", {"input": "hi", "tools": tools}).json()
    statuses = [item["status"] for item in response["output"] if item["type"] == "function_call"]
    assert "incomplete" in statuses and len(statuses) == script.count("<tool_call>")


def test_n_choices_have_readers_of_their_own(hermes_server):
    hermes_server.say("<think>a</think>b" + hermes([("add", {})]))
    choices = ask(hermes_server, n=3)["choices"]
    assert [c["message"]["content"] for c in choices] == ["b"] * 3
    assert len({c["message"]["tool_calls"][0]["id"] for c in choices}) == 3
    told = ["", "", ""]
    for event in deltas(hermes_server, n=3):
        for choice in event["choices"]:
            told[choice["index"]] += choice["delta"].get("content") or ""
    assert told == ["b"] * 3


def test_one_call_at_most(hermes_server):
    hermes_server.say(hermes([("add", {"n": 1}), ("add", {"n": 2})]))
    assert len(ask(hermes_server)["choices"][0]["message"]["tool_calls"]) == 2
    assert len(ask(hermes_server, parallel_tool_calls=False)["choices"][0]["message"]["tool_calls"]) == 1
    assert len(fold(deltas(hermes_server, parallel_tool_calls=False))[0]["tool_calls"]) == 1


def test_calls_and_results_in_the_history(hermes_server):
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"n": 1}'}}
    history = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
        {"role": "assistant", "tool_calls": [call]},
    ]
    ask(hermes_server.say("ok"), messages=history)
    prompt, _ = hermes_server.llm.seen[-1]
    assert prompt.count('<assistant>[add:{"n": 1}]') == 2, "who calls tools need not say anything"
    assert '[add:{"n": 1}]' in prompt and "<tool>2(c1)" in prompt and "<tools>get_weather,add</tools>" in prompt


def test_required_and_named(hermes_server):
    script = '[{"name": "add", "parameters": {"n": 1}}, {"name": "get_weather", "parameters": {}}]'
    thought = "hm</think>"
    choice = ask(hermes_server.say(thought + script), tool_choice="required")["choices"][0]
    assert [c["function"] for c in choice["message"]["tool_calls"]] == [
        {"name": "add", "arguments": '{"n": 1}'},
        {"name": "get_weather", "arguments": "{}"},
    ]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["reasoning"] == "hm"
    prompt, params = hermes_server.llm.seen[-1]
    assert prompt.endswith("<assistant><think>\n")  # a grammar waits for the end of the thinking, so there is some
    think_end = hermes_server.llm.tokenizer.convert_tokens_to_ids("</think>")
    assert params.structured_outputs.starts_after == [think_end]
    assert params.structured_outputs.json["minItems"] == 1 and "maxItems" not in params.structured_outputs.json

    named = {"type": "function", "function": {"name": "add"}}
    choice = ask(hermes_server.say(thought + '{"n": 2}'), tool_choice=named)["choices"][0]
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"n": 2}'}
    assert choice["finish_reason"] == "stop" and choice["message"]["content"] is None
    assert hermes_server.llm.seen[-1][1].structured_outputs.json == PARAMETERS
    assert fold(deltas(hermes_server, tool_choice=named)) == (plain(choice["message"]), "stop")
    ask(hermes_server.say(thought + script), tool_choice="required", parallel_tool_calls=False)
    assert hermes_server.llm.seen[-1][1].structured_outputs.json["maxItems"] == 1


def test_a_list_of_calls_cut_off_by_the_length(hermes_server):
    hermes_server.say('</think>[{"name": "add", "parameters": {"n": 1}}, {"name": "get_w', finish="length")
    choice = ask(hermes_server, tool_choice="required")["choices"][0]
    assert choice["message"]["content"] is None and len(choice["message"]["tool_calls"]) == 1
    assert choice["finish_reason"] == "tool_calls", "the call that came is complete"
    assert fold(deltas(hermes_server, tool_choice="required")) == (plain(choice["message"]), "tool_calls")


def test_thinking_off(tokenizer):
    server = Scripted(tokenizer, tool_call_parser="hermes", reasoning_parser="qwen3").say('{"n": 1}')
    off = {
        "chat_template_kwargs": {"think": "<think></think>"},
        "tool_choice": {"type": "function", "function": {"name": "add"}},
    }
    choice = ask(server, **off)["choices"][0]
    assert choice["message"]["tool_calls"] and choice["message"]["reasoning"] is None
    assert server.llm.seen[-1][1].structured_outputs.starts_after is None
    opened = ask(server.say("so</think>x"), tool_choice="none", chat_template_kwargs={"think": "<think>\n"})["choices"][0]
    assert (opened["message"]["reasoning"], opened["message"]["content"]) == ("so", "x")
    default = Scripted(tokenizer, reasoning_parser="qwen3", default_chat_template_kwargs={"think": "<think>"})
    assert ask(default.say("a</think>b"), tool_choice="none")["choices"][0]["message"]["reasoning"] == "a"


def test_a_budget_for_the_reasoning(tokenizer):
    server = Scripted(tokenizer, reasoning_parser="qwen3").say("hm</think>x")
    body = {"thinking_token_budget": 7, "tools": None}
    assert ask(server, **body)["choices"][0]["message"]["reasoning"] == "hm"
    prompt, params = server.llm.seen[-1]
    think_end = tokenizer.convert_tokens_to_ids("</think>")
    assert prompt.endswith("<think>\n")  # what has a budget must begin
    assert (params.thinking_token_budget, params.thinking_end_ids) == (7, [think_end])
    ask(server.say("x"), **body, chat_template_kwargs={"think": "<think></think>"})
    assert server.llm.seen[-1][1].thinking_token_budget is None  # it was turned off
    ask(server.say("x"), thinking_token_budget=-1, tools=None)
    assert server.llm.seen[-1][1].thinking_token_budget is None
    for other in (Scripted(tokenizer), Scripted(tokenizer, reasoning_parser="granite")):
        response = other.post("/v1/chat/completions", {"messages": HELLO, "thinking_token_budget": 7})
        assert response.status_code == 400 and error_of(response)["param"] == "thinking_token_budget"


def test_tools_can_be_kept_from_the_template(tokenizer):
    for excluded in (True, False):
        server = Scripted(tokenizer, exclude_tools_when_tool_choice_none=excluded).say("x")
        ask(server, tool_choice="none")
        assert ("<tools>" in server.llm.seen[-1][0]) is not excluded


def test_special_tokens_are_not_shown(tokenizer):
    server = Scripted(tokenizer, enable_auto_tool_choice=True, tool_call_parser="mistral").say("a<|end|>b<bos>")
    assert ask(server)["choices"][0]["message"]["content"] == "ab"
    assert server.llm.seen[-1][1].skip_special_tokens is False
    assert ask(server, skip_special_tokens=False)["choices"][0]["message"]["content"] == "a<|end|>b<bos>"
    assert ask(server, tool_choice="none")["choices"][0]["message"]["content"] == "ab"


def test_auto_is_told_in_the_log(tmp_path, caplog):
    template = "{{ messages[0].content }}{% if false %}[TOOL_CALLS][THINK][/THINK]{% endif %}"
    with caplog.at_level("INFO", "quire.serve.tools"):
        server = Scripted(
            byte_tokenizer(tmp_path, template), enable_auto_tool_choice=True, tool_call_parser="auto", reasoning_parser="auto"
        )
    assert "tool calls: parsed as mistral (by the chat template)" in caplog.text and "reasoning: parsed as" in caplog.text
    choice = ask(server.say("[THINK]hm[/THINK]a[TOOL_CALLS]add[ARGS]{}"))["choices"][0]
    assert choice["message"]["reasoning"] == "hm" and choice["message"]["tool_calls"][0]["function"]["name"] == "add"
    budget = ask(server.say("hm[/THINK]a"), thinking_token_budget=5, tools=None)["choices"][0]["message"]
    assert budget["reasoning"] == "hm" and server.llm.seen[-1][0].endswith("[THINK]\n")
    with caplog.at_level("INFO", "quire.serve.tools"):
        Scripted(byte_tokenizer(tmp_path, "{{ messages }}"), reasoning_parser="auto")
    assert "no known way to write reasoning" in caplog.text
    assert "tool calls: parsed as generic (the chat template shows no other); tools are described" in caplog.text


def test_a_prompt_that_was_cut_still_shows_its_end(tokenizer):
    server = Scripted(tokenizer, reasoning_parser="qwen3").say("so</think>x")
    body = {"tools": None, "chat_template_kwargs": {"think": "<think>\n"}, "truncate_prompt_tokens": 5}
    assert ask(server, **body)["choices"][0]["message"]["reasoning"] == "so"


def test_ids_that_the_family_wants(tokenizer):
    server = Scripted(tokenizer, enable_auto_tool_choice=True, tool_call_parser="mistral").say("[TOOL_CALLS]add[ARGS]{}")
    call_id = ask(server)["choices"][0]["message"]["tool_calls"][0]["id"]
    assert len(call_id) == 9 and call_id.isalnum()
    server = Scripted(tokenizer, enable_auto_tool_choice=True, tool_call_parser="kimi_k2")
    server.say("<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{}<|tool_call_end|>")
    assert ask(server)["choices"][0]["message"]["tool_calls"][0]["id"] == "functions.add:0"


@pytest.mark.parametrize(
    "body, param",
    [
        ({"tools": []}, "tools"),
        ({"tools": None, "tool_choice": "auto"}, "tool_choice"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools"),
        ({"tools": TOOLS + TOOLS}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}]}, "tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "nobody"}}}, "tool_choice"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": "required", "structured_outputs": {"choice": ["a"]}}, "structured_outputs"),
        ({"tool_choice": "required", "response_format": {"type": "nonsense"}}, "response_format"),
        ({"tool_choice": "required", "use_beam_search": True}, "tool_choice"),
        ({"reasoning_effort": "huge"}, "body.reasoning_effort"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"function_call": "auto"}, "function_call"),
    ],
)
def test_what_is_refused(hermes_server, body, param):
    response = hermes_server.post("/v1/chat/completions", {"messages": HELLO, "tools": TOOLS, **body})
    assert response.status_code == 400 and error_of(response)["param"] in (param, *body)


@pytest.mark.parametrize("depth", [100_000, 5000])
def test_arguments_in_the_history_that_nobody_can_read(hermes_server, depth):
    for arguments in ("[" * depth, "[" * depth + "]" * depth, "1" * depth, "{"):
        call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": arguments}}
        body = {"messages": [*HELLO, {"role": "assistant", "tool_calls": [call]}], "tools": TOOLS}
        response = hermes_server.post("/v1/chat/completions", body)
        assert response.status_code == 400 and "arguments" in error_of(response)["message"]


def required_schema(*parameters):
    from quire.serve.tools import read_tool_use

    tools = [{"type": "function", "function": {"name": f"f{i}", "parameters": one}} for i, one in enumerate(parameters)]
    return read_tool_use(tools, "required", None).answer_schema()


def test_references_keep_their_meaning():
    """In the schema for calls of any tool, `#` is another document's root, and tools may use the same names."""
    one = {"properties": {"a": {"$ref": "#/definitions/A"}}, "required": ["a"], "definitions": {"A": {"type": "integer"}}}
    other = {"properties": {"a": {"$ref": "#/$defs/A"}}, "required": ["a"], "$defs": {"A": {"type": "string"}}}
    tree = {
        "properties": {"child": {"$ref": "#"}, "n": {"type": "integer"}, "m": {"$ref": "#/properties/n"}},
        "required": ["n"],
    }
    tree |= {"additionalProperties": False}
    schema = required_schema(one, other, tree)

    def fits(name, **parameters):
        call = {"name": name, "parameters": parameters}
        return jsonschema.Draft202012Validator(schema).is_valid([call])

    assert fits("f0", a=1) and not fits("f0", a="x")
    assert fits("f1", a="x") and not fits("f1", a=1)
    assert fits("f2", n=1, child={"n": 2, "child": {"n": 3, "m": 4}})
    assert not fits("f2", n=1, child={}) and not fits("f2", n=1, m="x") and not fits("f2", n=1, child=[])
    assert "$defs" not in required_schema(PARAMETERS, PARAMETERS)


def test_a_tool_may_have_any_name(hermes_server):
    tools = [{"type": "function", "function": {"name": "look it up!", "parameters": PARAMETERS}}]
    script = '[{"name": "look it up!", "parameters": {"n": 1}}]'
    choice = ask(hermes_server.say("</think>" + script), tools=tools, tool_choice="required")["choices"][0]
    assert [c["function"]["name"] for c in choice["message"]["tool_calls"]] == ["look it up!"]


def test_calls_are_counted(hermes_server):
    metrics = hermes_server.app.state.server.metrics
    assert metrics is None, "a server without metrics counts nothing"
    ask(hermes_server.say(hermes([("add", {"n": 1})])))
    counted = Scripted(hermes_server.llm.tokenizer, metrics=True, enable_auto_tool_choice=True, tool_call_parser="hermes")
    calls = hermes([("add", {"n": 1}), ("add", {"n": 2})])
    scripts = [
        (calls, "stop"),
        (calls[: calls.index("2")], "length"),
        ('<tool_call>{"name": "add", "arguments": {"n": }}</tool_call>', "stop"),
        ("<tool_call>hello</tool_call>", "stop"),
        ("nothing of the kind", "stop"),
    ]
    for script, finish in scripts:
        ask(counted.say(script, finish=finish))
        deltas(counted.say(script, finish=finish))
    outcomes = {labels[0]: value for labels, value in counted.app.state.server.metrics.tool_calls.values.items()}
    assert outcomes == {"complete": 6, "cut": 2, "broken": 2, "text": 2}


def strict_tools(*flags: bool | None) -> list[dict]:
    schema = {"type": "object", "properties": {"l": {"type": "array", "uniqueItems": True}}}
    return [
        {"name": f"f{i}", "parameters": schema} | ({} if strict is None else {"strict": strict})
        for i, strict in enumerate(flags)
    ]


@pytest.mark.parametrize("stream", [False, True])
def test_what_the_schema_of_a_tool_says_in_vain_is_told(hermes_server, stream):
    server = hermes_server.say('{"l": []}')
    functions = [{"type": "function", "function": tool} for tool in strict_tools(None, False)]
    own = [{"name": tool["name"], "input_schema": tool["parameters"]} for tool in strict_tools(None)]
    for path, fields in (
        ("/v1/chat/completions", {"tools": functions, "tool_choice": {"type": "function", "function": {"name": "f1"}}}),
        ("/v1/messages", {"model": "scripted", "max_tokens": 30, "tools": own, "tool_choice": {"type": "tool", "name": "f0"}}),
    ):
        response = server.post(path, {"messages": HELLO, "stream": stream, **fields})
        assert (response.status_code, response.headers.get("X-Quire-Schema-Unenforced")) == (200, "uniqueItems"), response.text
    free = server.say("Hi").post("/v1/chat/completions", {"messages": HELLO, "tools": functions, "stream": stream})
    assert "X-Quire-Schema-Unenforced" not in free.headers, "nothing is asked of the answer"


def test_the_schema_of_a_strict_tool_is_refused_if_it_says_something_in_vain(hermes_server):
    server = hermes_server.say('{"l": []}')
    tools = [{"type": "function", "function": tool} for tool in strict_tools(False, True)]
    for choice, status in (("required", 400), ("f0", 200), ("f1", 400)):
        named = choice if choice == "required" else {"type": "function", "function": {"name": choice}}
        server.say('[{"name": "f0", "parameters": {"l": []}}]' if choice == "required" else '{"l": []}')
        response = server.post("/v1/chat/completions", {"messages": HELLO, "tools": tools, "tool_choice": named})
        assert response.status_code == status, response.text
        if status == 400:
            error = response.json()["error"]
            assert error["message"].startswith(
                "tools[1].function.parameters: $.properties.l: uniqueItems is more than a grammar"
            )
            assert error["param"] == "tools[1].function.parameters"
    own = [{"name": "f", "input_schema": strict_tools(None)[0]["parameters"], "strict": True}]
    asked = {"model": "scripted", "max_tokens": 30, "messages": HELLO, "tools": own, "tool_choice": {"type": "any"}}
    message = server.post("/v1/messages", asked).json()["error"]["message"]
    assert message.startswith("tools[0].input_schema: $.properties.l: uniqueItems")
