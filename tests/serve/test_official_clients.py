"""The official openai and anthropic clients, their tool and streaming helpers, over a real socket; the model is scripted."""

import contextlib
import json
import socket
import threading
import time

import openai
import pydantic
import pytest
import uvicorn
import uvloop
from scripted import Scripted, byte_tokenizer

from parse_samples import hermes
from patience import PATIENCE

SCRIPT = "<think>rain?</think>Let me look." + hermes(
    [("get_weather", {"city": "Köln", "days": 2}), ("get_weather", {"city": "漢"})]
)
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city"]}
ASK = [{"role": "user", "content": "Weather?"}]
MODEL = "scripted"


@contextlib.contextmanager
def listening(app):
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off", access_log=False))
    thread = threading.Thread(target=lambda: uvloop.run(server.serve([listener])), daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(PATIENCE)
        listener.close()


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    tokenizer = byte_tokenizer(tmp_path_factory.mktemp("bytes"))
    server = Scripted(tokenizer, enable_auto_tool_choice=True, tool_call_parser="hermes", reasoning_parser="qwen3")
    with listening(server.app) as url:
        yield server, url


@pytest.fixture
def openai_client(served):
    served[0].say(SCRIPT)
    with openai.OpenAI(base_url=f"{served[1]}/v1", api_key="unused", max_retries=0) as client:
        yield client


@pytest.fixture
def anthropic_client(served):
    import anthropic  # here, because that takes seconds, and every process of a parallel run reads this file

    served[0].say(SCRIPT)
    with anthropic.Anthropic(base_url=served[1], api_key="unused", max_retries=0) as client:
        yield client


def calls_of(message):
    return [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls]


CALLS = [("get_weather", {"city": "Köln", "days": 2}), ("get_weather", {"city": "漢"})]


def test_chat_tools(openai_client):
    tools = [{"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}]
    whole = openai_client.chat.completions.create(model=MODEL, messages=ASK, tools=tools)
    assert calls_of(whole.choices[0].message) == CALLS and whole.choices[0].finish_reason == "tool_calls"
    assert whole.choices[0].message.reasoning == "rain?"
    kinds = set()
    with openai_client.chat.completions.stream(model=MODEL, messages=ASK, tools=tools) as stream:
        for event in stream:
            kinds.add(event.type)
        final = stream.get_final_completion()
    assert calls_of(final.choices[0].message) == CALLS and final.choices[0].message.content == "Let me look."
    assert {"content.delta", "tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds
    history = [*ASK, final.choices[0].message, {"role": "tool", "tool_call_id": "x", "content": "wet"}]
    assert openai_client.chat.completions.create(model=MODEL, messages=history, tools=tools).choices


class Forecast(pydantic.BaseModel):
    city: str
    days: int = 1


def test_chat_parse_helper(openai_client, served):
    tools = [openai.pydantic_function_tool(Forecast, name="get_weather")]
    served[0].say(hermes([("get_weather", {"city": "Köln", "days": 2})]))
    parsed = openai_client.chat.completions.parse(model=MODEL, messages=ASK, tools=tools).choices[0].message
    assert parsed.tool_calls[0].function.parsed_arguments == Forecast(city="Köln", days=2)


def test_responses(openai_client):
    tools = [{"type": "function", "name": "get_weather", "parameters": PARAMETERS, "strict": False}]
    whole = openai_client.responses.create(model=MODEL, input="Weather?", tools=tools)
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call", "function_call"]
    assert whole.output_text == "Let me look."
    kinds = []
    with openai_client.responses.stream(model=MODEL, input="Weather?", tools=tools) as stream:
        for event in stream:
            kinds.append(event.type)
        final = stream.get_final_response()
    assert kinds[:3] == ["response.created", "response.in_progress", "response.output_item.added"]
    assert kinds[-1] == "response.completed" and final.output_text == whole.output_text
    calls = [(item.name, json.loads(item.arguments)) for item in final.output if item.type == "function_call"]
    assert calls == CALLS
    assert openai_client.responses.retrieve(final.id).output_text == final.output_text
    followed = openai_client.responses.create(model=MODEL, input="And?", previous_response_id=final.id)
    assert followed.previous_response_id == final.id
    openai_client.responses.delete(final.id)
    with pytest.raises(openai.NotFoundError):
        openai_client.responses.retrieve(final.id)


def test_responses_in_the_background(openai_client):
    begun = openai_client.responses.create(model=MODEL, input="Weather?", background=True)
    assert begun.status == "queued"
    deadline = time.monotonic() + PATIENCE
    while openai_client.responses.retrieve(begun.id).status != "completed":
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert openai_client.responses.cancel(begun.id).status == "completed"


def test_messages(anthropic_client):
    asked = {
        "model": MODEL,
        "max_tokens": 1000,
        "messages": ASK,
        "tools": [{"name": "get_weather", "input_schema": PARAMETERS}],
        "thinking": {"type": "enabled", "budget_tokens": 1024},
    }
    whole = anthropic_client.messages.create(**asked)
    assert [block.type for block in whole.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert whole.stop_reason == "tool_use" and [(block.name, block.input) for block in whole.content[2:]] == CALLS
    kinds, text = [], ""
    with anthropic_client.messages.stream(**asked) as stream:
        for event in stream:
            kinds.append(event.type)
        final = stream.get_final_message()
    assert [(block.type, getattr(block, "input", None)) for block in final.content] == [
        (block.type, getattr(block, "input", None)) for block in whole.content
    ]
    assert final.content[0].thinking == "rain?" and final.usage.output_tokens == whole.usage.output_tokens
    assert {"thinking", "text", "input_json", "message_start", "message_stop", "content_block_stop"} <= set(kinds)
    with anthropic_client.messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
    assert text == "Let me look."
    history = [*ASK, {"role": "assistant", "content": final.content}]
    history.append({"role": "user", "content": [{"type": "tool_result", "tool_use_id": final.content[2].id, "content": "wet"}]})
    assert anthropic_client.messages.create(**{**asked, "messages": history}).content


def test_messages_count_and_errors(anthropic_client):
    import anthropic

    counted = anthropic_client.messages.count_tokens(model=MODEL, messages=ASK)
    assert counted.input_tokens > 0
    with pytest.raises(anthropic.NotFoundError, match="nobody"):
        anthropic_client.messages.create(model="nobody", max_tokens=10, messages=ASK)
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        anthropic_client.messages.create(model=MODEL, max_tokens=10, messages=ASK, extra_body={"temperature": 7})
