"""Tools that must be called, on the default model at temperature 1, by a real server process: arguments are always valid."""

import json
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import openai
import pytest
from server_process import serving

from patience import PATIENCE

pytestmark = pytest.mark.model

LOCAL = (
    "--distributed-executor-backend",
    "uni",
    "--device",
    "cpu",
    "--dtype",
    "float32",  # without kernels for packed weights, every step would dequantize them
    "--max-model-len",
    "2048",
    "--kv-cache-memory-bytes",
    "256m",
)
TOOLS = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 20},
            "unit": {"enum": ["celsius", "fahrenheit"]},
            "days": {"type": "integer", "minimum": 1, "maximum": 14},
        },
        "required": ["city", "unit"],
        "additionalProperties": False,
    },
    "send_mail": {
        "type": "object",
        "properties": {
            "to": {"type": "array", "items": {"$ref": "#/$defs/person"}, "minItems": 1, "maxItems": 2},
            "urgent": {"type": "boolean"},
        },
        "required": ["to", "urgent"],
        "additionalProperties": False,
        "$defs": {
            "person": {
                "type": "object",
                "properties": {"name": {"type": "string", "maxLength": 12}},
                "required": ["name"],
                "additionalProperties": False,
            }
        },
    },
}
CHAT_TOOLS = [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in TOOLS.items()]
ASK = [{"role": "user", "content": "Mail Ann the weather in Paris."}]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    flags = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--reasoning-parser", "qwen3")
    with serving(Path("smollm2"), *LOCAL, *flags) as server:
        yield server.url()


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=PATIENCE) as client:
        yield client


def check(calls: list[tuple[str, str]]) -> None:
    assert calls
    for name, arguments in calls:
        jsonschema.validate(json.loads(arguments), TOOLS[name])


@pytest.mark.parametrize("seed", range(2))
def test_required(client: openai.OpenAI, seed: int) -> None:
    asked = {
        "model": "tiny",
        "messages": ASK,
        "tools": CHAT_TOOLS,
        "temperature": 1,
        "seed": seed,
        "max_completion_tokens": 200,
    }
    answer = client.chat.completions.create(**asked, tool_choice="required", parallel_tool_calls=seed % 2 == 0, n=2)
    for choice in answer.choices:
        told = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or []]
        assert told and not choice.message.content
        # an answer cut off at its length ends with a call that is not complete
        check(
            told if choice.finish_reason == "tool_calls" else told[:-1] or [("get_weather", '{"city": "x", "unit": "celsius"}')]
        )
        assert seed % 2 == 0 or len(told) == 1


@pytest.mark.parametrize("name", TOOLS)
def test_named(client: openai.OpenAI, name: str) -> None:
    choice = {"type": "function", "function": {"name": name}}
    asked = {"model": "tiny", "messages": ASK, "tools": CHAT_TOOLS, "temperature": 1, "tool_choice": choice, "seed": 7}
    whole = client.chat.completions.create(**asked, max_completion_tokens=300).choices[0]
    [call] = whole.message.tool_calls or []
    assert whole.finish_reason == "stop" and call.function.name == name
    check([(name, call.function.arguments)])
    streamed = ""
    for chunk in client.chat.completions.create(**asked, max_completion_tokens=300, stream=True):
        for delta in chunk.choices[0].delta.tool_calls or []:
            streamed += delta.function.arguments or ""
    assert streamed == call.function.arguments


def test_a_model_that_calls_by_itself(client: openai.OpenAI) -> None:
    """The grammar writes what a larger model would: reasoning, text and a call in its own format."""
    call = r'\{"name": "get_weather", "arguments": \{"city": "[a-z]{1,9}"\}\}'
    pattern = rf"<think>[a-z ]{{1,12}}</think>I will look\.<tool_call>{call}</tool_call>"
    asked = {"model": "tiny", "messages": ASK, "tools": CHAT_TOOLS, "temperature": 1, "seed": 3, "max_completion_tokens": 200}
    extra = {"structured_outputs": {"regex": pattern}}
    whole = client.chat.completions.create(**asked, extra_body=extra).choices[0]
    assert whole.message.content == "I will look." and whole.finish_reason == "tool_calls"
    with client.chat.completions.stream(**asked, extra_body=extra) as stream:
        final = stream.get_final_completion().choices[0]
    [call], [same] = whole.message.tool_calls or [], final.message.tool_calls or []
    assert json.loads(call.function.arguments) == json.loads(same.function.arguments) and final.finish_reason == "tool_calls"


def test_responses_and_messages(client: openai.OpenAI, url: str) -> None:
    import anthropic  # here, because that takes seconds, and every process of a parallel run reads this file

    tools = [{"type": "function", "name": name, "parameters": schema, "strict": True} for name, schema in TOOLS.items()]
    with client.responses.stream(
        model="tiny", input="Mail Ann.", tools=tools, tool_choice="required", parallel_tool_calls=False, max_output_tokens=300
    ) as stream:
        final = stream.get_final_response()
    check([(item.name, item.arguments) for item in final.output if item.type == "function_call"])
    form = {"type": "json_schema", "name": "mail", "schema": TOOLS["send_mail"], "strict": True}
    answer = client.responses.create(model="tiny", input="Mail Ann.", text={"format": form}, max_output_tokens=300)
    jsonschema.validate(json.loads(answer.output_text), TOOLS["send_mail"])
    with anthropic.Anthropic(base_url=url, api_key="unused", max_retries=0, timeout=PATIENCE) as other:
        asked = {"model": "tiny", "max_tokens": 300, "messages": ASK}
        asked["tools"] = [{"name": name, "input_schema": schema} for name, schema in TOOLS.items()]
        choice = {"type": "any", "disable_parallel_tool_use": True}
        with other.messages.stream(**asked, tool_choice=choice) as messages:
            message = messages.get_final_message()
        assert message.stop_reason == "tool_use"
        check([(block.name, json.dumps(block.input)) for block in message.content])
        read = message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)
        assert other.messages.count_tokens(model="tiny", messages=ASK).input_tokens == read
