"""Tools on a server without flags: the template says how calls are written, or the prompt asks for the generic way."""

import json

import pytest
from scripted import TEMPLATE, Scripted, byte_tokenizer

from parse_samples import FAMILIES, hermes, llama3_json
from serving import error_of, events_of

SCHEMA = {"type": "object", "properties": {"s": {"type": "string"}, "n": {"type": "integer"}}}
NAMES = ("get_weather", "add")
TOOLS = [{"type": "function", "function": {"name": n, "description": f"it is {n}", "parameters": SCHEMA}} for n in NAMES]
FLAT = [{"type": "function", "name": name, "parameters": SCHEMA} for name in NAMES]
OTHERS = [{"name": name, "description": f"it is {name}", "input_schema": SCHEMA} for name in NAMES]
HELLO = [{"role": "user", "content": "hi"}]

IGNORES = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
NO_SYSTEM = (
    "{% for m in messages %}{% if m.role not in ('user', 'assistant') %}{{ raise_exception('no role ' + m.role) }}{% endif %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
DEAF = IGNORES.replace("<{{ m.role }}>{{ m.content }}", "{% if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endif %}")
MARKS = {  # what templates of these families show
    "hermes": '<tool_call>{"name": ..., "arguments": ...}',
    "qwen3_coder": "<tool_call><function=x>",
    "gemma4": "<|tool_call>call:",
    "lfm2": "<|tool_call_start|>",
    "deepseek_v32": "<｜DSML｜function_calls>",
    "cohere_command3": "<|START_ACTION|>",
    "jamba": "<tool_calls>",
}


def server(path, template, **settings):
    return Scripted(byte_tokenizer(path, template), **settings)


def chat(served, **body):
    response = served.post("/v1/chat/completions", {"messages": HELLO, "tools": TOOLS, **body})
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


def streamed_calls(served, **body):
    """Names and arguments, the text, and how it ended."""
    response = served.post("/v1/chat/completions", {"messages": HELLO, "tools": TOOLS, "stream": True, **body})
    calls, text, finish = [], "", None
    for event in events_of(response.text)[:-1]:
        for choice in event["choices"]:
            text += choice["delta"].get("content") or ""
            finish = choice["finish_reason"] or finish
            for call in choice["delta"].get("tool_calls", []):
                if "id" in call:
                    calls.append([call["function"]["name"], ""])
                calls[call["index"]][1] += call["function"]["arguments"]
    return [(name, json.loads(arguments)) for name, arguments in calls], text, finish


def messages_stream(text):
    """The content blocks that a client puts together from the events, and why it stopped."""
    blocks, stop = [], None
    for line in text.splitlines():
        if not line.startswith("data: "):
            continue
        event = json.loads(line[6:])
        if event["type"] == "content_block_start":
            blocks.append([event["content_block"]["type"], event["content_block"].get("name"), ""])
        elif event["type"] == "content_block_delta":
            blocks[event["index"]][2] += event["delta"].get("text", "") + event["delta"].get("partial_json", "")
        elif event["type"] == "message_delta":
            stop = event["delta"]["stop_reason"]
    return blocks, stop


def calls_of(choice):
    told = choice["message"].get("tool_calls", [])
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in told]


@pytest.mark.parametrize("family", MARKS)
def test_the_template_chooses_and_all_protocols_speak(tmp_path, family):
    """No flags at all; one format after the other, on three protocols, streamed and not."""
    write = FAMILIES[family][2]
    served = server(tmp_path, TEMPLATE + "{% if false %}" + MARKS[family] + "{% endif %}")
    calls = [("get_weather", {"s": "Köln"}), ("add", {"n": 3})]
    served.say(write("", "Let me see.", calls))
    choice = chat(served)
    assert calls_of(choice) == calls and choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Let me see."
    assert streamed_calls(served) == (calls, "Let me see.", "tool_calls")

    body = {"input": "hi", "tools": FLAT}
    output = served.post("/v1/responses", body).json()["output"]
    assert [(i["name"], json.loads(i["arguments"])) for i in output if i["type"] == "function_call"] == calls
    *_, last = [
        json.loads(line[6:]) for line in served.post("/v1/responses", {**body, "stream": True}).text.splitlines()
        if line.startswith("data: {")
    ]  # fmt: skip
    told = [item for item in last["response"]["output"] if item["type"] == "function_call"]
    assert [(i["name"], json.loads(i["arguments"]), i["status"]) for i in told] == [(*call, "completed") for call in calls]

    body = {"messages": HELLO, "max_tokens": 500, "tools": OTHERS}
    answer = served.post("/v1/messages", body).json()
    assert [(b["name"], b["input"]) for b in answer["content"] if b["type"] == "tool_use"] == calls
    assert answer["stop_reason"] == "tool_use"
    blocks, stop = messages_stream(served.post("/v1/messages", {**body, "stream": True}).text)
    assert [(name, json.loads(text)) for kind, name, text in blocks if kind == "tool_use"] == calls and stop == "tool_use"
    counted = served.post("/v1/messages/count_tokens", {"messages": HELLO, "tools": OTHERS}).json()["input_tokens"]
    assert counted == answer["usage"]["input_tokens"] + answer["usage"]["cache_read_input_tokens"]


@pytest.mark.parametrize("template", [IGNORES, NO_SYSTEM, DEAF], ids=["system", "user", "deaf"])
def test_a_template_that_says_nothing_of_tools(tmp_path, template):
    served = server(tmp_path, template)
    calls = [("get_weather", {"s": "Köln"}), ("add", {"n": 3})]
    for script in (hermes(calls), "Sure. " + llama3_json(calls), "```json\n" + llama3_json(calls[:1]) + "\n```"):
        told = calls_of(chat(served.say(script)))
        assert told == calls[: len(told)] and told, script
    prompt = served.llm.seen[-1][0]
    for name in NAMES:
        assert f'"name": "{name}", "description": "it is {name}"' in prompt
    assert "<tool_call>" in prompt and prompt.index("<tool_call>") < prompt.index("hi<assistant>")
    assert calls_of(chat(served.say('Bob: {"name": "Bob", "parameters": {}}'))) == [], "only tools of the request"
    history = [
        *HELLO,
        {"role": "assistant", "content": "Hm.", "tool_calls": [
            {"id": str(i), "type": "function", "function": {"name": "add", "arguments": f'{{"n": {i}}}'}} for i in range(2)
        ]},
        {"role": "tool", "tool_call_id": "0", "content": "eins"},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "zwei"}]},
        {"role": "user", "content": "And?"},
    ]  # fmt: skip
    chat(served.say("ok"), messages=history)
    prompt = served.llm.seen[-1][0]
    assert 'Hm.\n<tool_call>\n{"name": "add", "arguments": {"n": 0}}\n</tool_call>\n<tool_call>' in prompt
    assert "eins\n</tool_response>\n\n<tool_response>\nzwei" in prompt and "And?<assistant>" in prompt
    chat(served, tool_choice="none")
    assert "<tool_call>" not in served.llm.seen[-1][0], "who must not call is not asked to"
    chat(served.say('{"n": 1}'), tool_choice={"type": "function", "function": {"name": "add"}})
    assert "it is add" in served.llm.seen[-1][0]


def test_tools_join_the_system_message(tmp_path):
    served = server(tmp_path, IGNORES)
    parts = [{"type": "text", "text": "Be kind."}]
    for content in ("Be kind.", parts):
        chat(served.say("ok"), messages=[{"role": "system", "content": content}, *HELLO])
        prompt = served.llm.seen[-1][0]
        assert prompt.startswith("<system>Be kind.") and prompt.count("<system>") == 1 and "it is add" in prompt
    without = served.post("/v1/messages/count_tokens", {"messages": HELLO}).json()["input_tokens"]
    counted = served.post("/v1/messages/count_tokens", {"messages": HELLO, "tools": OTHERS}).json()["input_tokens"]
    chat(served)
    assert counted == len(served.llm.tokenizer.encode(served.llm.seen[-1][0], False)) > without + 100


def test_a_parser_that_was_named_wins(tmp_path):
    """As on a vLLM command line: nothing is added to the prompt, and nothing else is parsed."""
    for flags in ({"tool_call_parser": "mistral"}, {"tool_call_parser": "mistral", "enable_auto_tool_choice": True}):
        served = server(tmp_path, IGNORES, **flags)
        assert calls_of(chat(served.say('[TOOL_CALLS]add[ARGS]{"n": 1}'))) == [("add", {"n": 1})]
        assert "it is add" not in served.llm.seen[-1][0]
        assert calls_of(chat(served.say(hermes([("add", {})])))) == []
    shown = server(tmp_path, TEMPLATE)
    assert calls_of(chat(shown.say(hermes([("add", {})])))) == [("add", {})]
    assert "<tools>get_weather,add</tools>" in shown.llm.seen[-1][0] and "it is add" not in shown.llm.seen[-1][0]


def test_a_template_is_not_run_to_see_what_it_reads(tmp_path):
    server(tmp_path, "{% for i in range(10 ** 9) %}{% for k in range(10 ** 9) %}{% endfor %}{% endfor %}")
    nested = server(tmp_path, "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}")
    assert nested.post("/v1/chat/completions", {"messages": HELLO, "tools": TOOLS}).status_code == 400


def test_a_forced_tool_beside_a_format(tmp_path):
    """The format is for text, and there is none."""
    served = server(tmp_path, TEMPLATE).say('[{"name": "add", "parameters": {"n": 1}}]')
    form = {"type": "object", "properties": {"x": {"type": "integer"}}}
    choice = chat(
        served, tool_choice="required", response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": form}}
    )
    assert calls_of(choice) == [("add", {"n": 1})] and choice["finish_reason"] == "tool_calls"
    assert served.llm.seen[-1][1].structured_outputs.json["type"] == "array"
    text = {"format": {"type": "json_schema", "name": "a", "schema": form}}
    response = served.post("/v1/responses", {"input": "hi", "tools": FLAT, "tool_choice": "required", "text": text})
    assert response.status_code == 200 and response.json()["output"][0]["name"] == "add"
    assert response.json()["text"]["format"]["name"] == "a"
    named = {"type": "tool", "name": "add"}
    config = {"format": {"type": "json_schema", "schema": form}}
    body = {"messages": HELLO, "max_tokens": 50, "tools": OTHERS, "tool_choice": named, "output_config": config}
    answer = served.say('{"n": 1}').post("/v1/messages", body).json()
    assert answer["content"][0]["input"] == {"n": 1} and answer["stop_reason"] == "tool_use"


@pytest.mark.parametrize(
    "body, said",
    [
        ({"max_tokens": 0}, "max_tokens: "),
        ({"max_tokens": None}, "max_tokens: "),
        ({"tools": [{"name": "f", "input_schema": 3}]}, "tools[0].input_schema must"),
        ({"tools": [{}]}, "tools[0] needs a name"),
        ({"tools": OTHERS, "tool_choice": {"type": "required"}}, "tool_choice.type: Input should be 'auto', 'any', 'tool' or"),
        ({"tools": OTHERS, "tool_choice": {"type": "tool"}}, 'tool_choice of type "tool"'),
        ({"tools": OTHERS, "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice names 'g'"),
        ({"tool_choice": {"type": "any"}}, "tool_choice needs tools"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role: "),
        ({"output_config": {"effort": "huge"}}, "output_config.effort: "),
    ],
)
def test_messages_speaks_anthropics_words(tmp_path, body, said):
    served = server(tmp_path, TEMPLATE).say("hi")
    response = served.post("/v1/messages", {"messages": HELLO, "max_tokens": 9, **body})
    assert response.status_code == 400 and response.json()["error"]["type"] == "invalid_request_error"
    message = response.json()["error"]["message"]
    assert message.startswith(said), message
    for word in ("function", "parameters", "required", "body.", "max_completion_tokens", "validation error"):
        assert word not in message


def test_answers_without_calls_have_none(tmp_path):
    served = server(tmp_path, TEMPLATE).say("hi")
    for body in ({}, {"tools": None}, {"tool_choice": "none"}):
        assert "tool_calls" not in chat(served, **body)["message"]
        response = served.post("/v1/chat/completions", {"messages": HELLO, "tools": TOOLS, "stream": True, **body})
        assert "tool_calls" not in response.text
    refused = served.post("/v1/chat/completions", {"messages": HELLO, "tools": TOOLS, "tool_choice": "sometimes"})
    assert refused.status_code == 400 and '"auto"' in error_of(refused)["message"]
