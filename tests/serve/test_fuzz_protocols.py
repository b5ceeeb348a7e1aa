"""Bodies of valid, nearly valid and absurd values for tools, /v1/responses and /v1/messages: no answer is a 500.

QUIRE_FUZZ=5000 sends that many bodies instead of a few.
"""

import asyncio
import os

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scripted import Scripted, byte_tokenizer
from test_fuzz import CHATS, FLAGS, INTEGERS, JUNK, REALS, TEXTS, body_of, mostly
from test_protocols import named_events

from parse_samples import hermes
from patience import PATIENCE
from serving import error_of, events_of

BODIES = int(os.environ.get("QUIRE_FUZZ", "300"))
AT_ONCE = 8

NAMES = st.sampled_from(["f", "g", "", "no such", "é"])
SCHEMAS = st.sampled_from([None, {}, {"type": "object", "properties": {"a": {"type": "integer"}}}, {"type": "string"}, 5, []])
FUNCTIONS = st.fixed_dictionaries({"name": mostly(NAMES)}, optional={"parameters": SCHEMAS, "description": TEXTS})
KINDS = mostly(st.sampled_from(["function", "function", "function", "web_search"]))
CHAT_TOOLS = st.lists(st.fixed_dictionaries({"type": KINDS, "function": mostly(FUNCTIONS)}), max_size=2)
CHOICES = st.sampled_from(
    ["none", "auto", "required", {"type": "function", "function": {"name": "f"}}, {"type": "function", "name": "f"}, {}, "x"]
)
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
TURNS = st.lists(
    st.one_of(
        st.fixed_dictionaries({"role": st.just("user"), "content": TEXTS}),
        st.fixed_dictionaries(
            {"role": st.just("assistant"), "content": mostly(st.none()), "tool_calls": mostly(st.just([CALL]))}
        ),
        st.fixed_dictionaries({"role": st.just("tool"), "tool_call_id": mostly(st.just("c")), "content": TEXTS}),
        st.fixed_dictionaries({"role": st.just("assistant"), "content": TEXTS, "reasoning_content": mostly(TEXTS)}),
    ),
    min_size=1,
    max_size=4,
)
FORMATS = st.sampled_from(
    [None, {"type": "text"}, {"type": "json_object"}, {"type": "json_schema", "name": "n", "schema": {}}, {}]
)
EFFORT = st.sampled_from(["none", "low", "max", "huge", None])
TOOL_CHATS = body_of(
    {"messages": TURNS, "stream": FLAGS, "tools": CHAT_TOOLS},
    {
        "tool_choice": CHOICES,
        "parallel_tool_calls": FLAGS,
        "include_reasoning": FLAGS,
        "reasoning_effort": EFFORT,
        "thinking_token_budget": INTEGERS,
        "n": st.integers(1, 3),
        "response_format": FORMATS,
    },
)

ITEMS = st.lists(
    st.one_of(
        st.fixed_dictionaries({"role": mostly(st.sampled_from(["user", "assistant", "developer"])), "content": mostly(TEXTS)}),
        st.fixed_dictionaries(
            {"type": st.just("function_call"), "call_id": TEXTS, "name": TEXTS, "arguments": mostly(st.just("{}"))}
        ),
        st.fixed_dictionaries({"type": st.just("function_call_output"), "call_id": TEXTS, "output": mostly(TEXTS)}),
        st.fixed_dictionaries({"type": st.just("reasoning")}, optional={"summary": JUNK, "content": JUNK}),
        st.fixed_dictionaries({"type": TEXTS}),
    ),
    max_size=4,
)
RESPONSES = body_of(
    {"input": st.one_of(TEXTS, ITEMS), "stream": FLAGS},
    {
        "instructions": TEXTS,
        "previous_response_id": TEXTS,
        "store": FLAGS,
        "metadata": st.dictionaries(TEXTS, TEXTS, max_size=2),
        "max_output_tokens": INTEGERS,
        "temperature": REALS,
        "truncation": st.sampled_from(["auto", "disabled", "x"]),
        "reasoning": st.fixed_dictionaries({}, optional={"effort": EFFORT}),
        "tool_choice": CHOICES,
        "text": st.fixed_dictionaries({}, optional={"format": FORMATS}),
        "top_k": INTEGERS,
        "seed": INTEGERS,
        "stop": JUNK,
        "tools": st.lists(st.fixed_dictionaries({"type": KINDS, "name": NAMES, "parameters": SCHEMAS}), max_size=2),
        "priority": INTEGERS,
        "cache_salt": TEXTS,
        "chat_template_kwargs": st.dictionaries(TEXTS, JUNK, max_size=2),
    },
)

BLOCKS = st.lists(
    st.one_of(
        st.fixed_dictionaries({"type": st.just("text"), "text": mostly(TEXTS)}),
        st.fixed_dictionaries({"type": st.just("thinking"), "thinking": mostly(TEXTS)}),
        st.fixed_dictionaries({"type": st.just("tool_use"), "id": TEXTS, "name": mostly(TEXTS), "input": mostly(st.just({}))}),
        st.fixed_dictionaries({"type": st.just("tool_result"), "tool_use_id": mostly(TEXTS), "content": mostly(TEXTS)}),
        st.fixed_dictionaries({"type": TEXTS}),
    ),
    max_size=3,
)
MESSAGES = body_of(
    {
        "messages": st.lists(
            st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": st.one_of(TEXTS, BLOCKS)}),
            max_size=3,
        ),
        "max_tokens": st.integers(1, 50),
        "stream": FLAGS,
    },
    {
        "system": st.one_of(TEXTS, BLOCKS),
        "stop_sequences": st.lists(TEXTS, max_size=5),
        "temperature": REALS,
        "top_k": INTEGERS,
        "thinking": st.sampled_from([{"type": "enabled", "budget_tokens": 5}, {"type": "disabled"}, {"type": "adaptive"}, {}]),
        "tools": st.lists(st.fixed_dictionaries({"name": mostly(NAMES), "input_schema": SCHEMAS}), max_size=2),
        "tool_choice": st.sampled_from(
            [{"type": "auto"}, {"type": "any"}, {"type": "tool", "name": "f"}, {"type": "tool"}, {}]
        ),
        "output_config": st.sampled_from(
            [{"effort": "low"}, {"format": {}}, {"format": {"type": "json_schema", "schema": {}}}]
        ),
        "priority": INTEGERS,
        "metadata": JUNK,
        "stop": JUNK,
        "bad_words": JUNK,
        "suffix": JUNK,
    },
)
PATHS = ["/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"]
REQUESTS = st.one_of(
    st.tuples(st.just(PATHS[0]), st.one_of(TOOL_CHATS, CHATS)),
    st.tuples(st.just(PATHS[1]), RESPONSES),
    st.tuples(st.sampled_from(PATHS[2:]), MESSAGES),
    st.tuples(st.sampled_from(PATHS), JUNK),
)
SCRIPT = "<think>hm</think>Hi." + hermes([("f", {"a": 1})])


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    tokenizer = byte_tokenizer(tmp_path_factory.mktemp("bytes"))
    server = Scripted(tokenizer, enable_auto_tool_choice=True, tool_call_parser="hermes", reasoning_parser="qwen3")
    server.llm.prompts.max_model_len = 100_000
    return server.say(SCRIPT, cuts=range(0, 100, 7))


def check(path: str, response: httpx.Response) -> None:
    assert response.status_code in (200, 400, 404), response.text
    told = response.text
    if response.status_code != 200:
        error = response.json()["error"] if "messages" in path else error_of(response)
        assert error["message"] and "Traceback" not in error["message"]
    elif response.headers["content-type"].startswith("text/event-stream"):
        events = events_of(told)[:-1] if "chat" in path else named_events(told)
        assert all("error" not in event and event.get("type") != "error" for event in events)


async def send(app, requests):
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://scripted", timeout=PATIENCE) as client:
        return await asyncio.gather(*[client.post(path, json=body) for path, body in requests])


def test_no_body_is_the_servers_fault(server):
    seen: dict[tuple[str, int], int] = {}

    @settings(
        max_examples=-(-BODIES // AT_ONCE),
        deadline=None,
        database=None,
        derandomize="QUIRE_FUZZ" not in os.environ,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(REQUESTS, min_size=AT_ONCE, max_size=AT_ONCE))
    def fuzz(requests):
        for (path, _), response in zip(requests, asyncio.run(send(server.app, requests)), strict=True):
            check(path, response)
            seen[path, response.status_code] = seen.get((path, response.status_code), 0) + 1

    fuzz()
    print(seen)
    assert all(seen.get((path, 200)) and seen.get((path, 400)) for path in PATHS), seen
