"""Details between the wire and the engine: defaults, headers, priorities, templates, tenants."""

import pytest
from starlette.requests import Request

from quire.config.server_args import ServerArgs
from quire.serve.generation import timing_of
from quire.serve.protocol import CompletionRequest
from quire.serve.server import priority_of
from quire.types.errors import InvalidParameter
from quire.types.outputs import RequestMetrics
from serving import Running, error_of


class Like:
    """An engine with some attributes of its own."""

    def __init__(self, llm, **own):
        self._llm = llm
        self.__dict__.update(own)

    def __getattr__(self, name):
        return getattr(self._llm, name)


def test_the_models_own_defaults(server: Running):
    """They fill what a request leaves open; its max_tokens is an upper bound."""
    llm = Like(server.llm, default_sampling={"temperature": 0.0, "max_tokens": 5})
    with server.serve(ServerArgs(), llm) as http:
        body = {"messages": [{"role": "user", "content": "a"}], "ignore_eos": True}
        texts = {http.post("/v1/chat/completions", json=body).text.split('"content":')[1][:40] for _ in range(3)}
        assert len(texts) == 1
        answer = http.post("/v1/chat/completions", json=body).json()
        assert answer["usage"]["completion_tokens"] == 5
        longer = http.post("/v1/chat/completions", json={**body, "max_tokens": 50}).json()
        assert longer["usage"]["completion_tokens"] == 5
        assert http.post("/v1/completions", json={"prompt": "a", "n": 2}).status_code == 400  # greedy by default here
        assert http.post("/v1/completions", json={"prompt": "a", "n": 2, "temperature": 1}).status_code == 200


def test_tiny_temperatures_are_raised(http):
    assert http.post("/v1/completions", json={"prompt": "a", "temperature": 0.001}).status_code == 200


def request_with(**headers: str) -> Request:
    return Request({"type": "http", "headers": [(name.encode(), value.encode()) for name, value in headers.items()]})


@pytest.mark.parametrize("header, body, expected", [("3", {}, 3), ("-2", {}, -2), ("3", {"priority": 1}, 1), (None, {}, 0)])
def test_priority(header, body, expected):
    raw = request_with() if header is None else request_with(**{"x-vllm-priority": header})
    assert priority_of(raw, CompletionRequest(prompt="a", **body), "priority") == expected


@pytest.mark.parametrize("header", ["high", "1.5", "9" * 30, ""])
def test_priorities_that_are_none(header):
    with pytest.raises(InvalidParameter, match="X-Vllm-Priority"):
        priority_of(request_with(**{"x-vllm-priority": header}), CompletionRequest(prompt="a"), "priority")


def test_priority_needs_the_policy(http):
    response = http.post("/v1/completions", json={"prompt": "a"}, headers={"X-Vllm-Priority": "3"})
    assert error_of(response)["param"] == "priority"
    assert http.post("/v1/completions", json={"prompt": "a"}, headers={"X-Vllm-Priority": "0"}).status_code == 200


def test_what_goes_along_with_a_prompt(server: Running):
    """The engine gets the tenant, the trace and the salt; equal ids do not meet there."""
    seen = []

    class Watched(Like):
        def generate(self, prompt, params, request_id, **options):
            seen.append((prompt, request_id, options))
            return self._llm.generate(prompt, params, request_id, **options)

    with server.serve(ServerArgs(), Watched(server.llm)) as http:
        headers = {"traceparent": "00-abc-def-01", "X-Request-Id": "same"}
        for _ in range(2):
            http.post("/v1/completions", json={"prompt": ["a", "b"], "cache_salt": "s", "max_tokens": 1}, headers=headers)
    assert all(
        prompt.cache_salt == "s" and options["trace_headers"] == {"traceparent": "00-abc-def-01"} for prompt, _, options in seen
    )
    assert all(options["cache_tenant"] is None and options["priority"] == 0 for _, _, options in seen)
    ids = [request_id for _, request_id, _ in seen]
    assert len(set(ids)) == 4 and all(request_id.startswith("cmpl-same-") for request_id in ids)


def test_templates_get_documents_tools_and_thoughts(server: Running):
    template = (
        "{{ documents[0].text }}|{{ tools[0].function.name }}|{{ messages[0].reasoning }}|{{ messages[0].reasoning_content }}"
    )
    body = {
        "messages": [{"role": "assistant", "content": "a", "reasoning_content": "hm"}],
        "documents": [{"text": "doc"}],
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "tool_choice": "none",
        "chat_template": template,
        "max_tokens": 1,
        "return_prompt_text": True,
    }
    with server.serve(ServerArgs(trust_request_chat_template=True)) as http:
        assert http.post("/v1/chat/completions", json=body).json()["prompt_text"] == "doc|f|hm|hm"
        broken = {**body, "chat_template": "{% for %}"}
        assert error_of(http.post("/v1/chat/completions", json=broken))["param"] == "chat_template"
        failing = {**body, "chat_template": "{{ messages[9].content.x }}"}
        assert http.post("/v1/chat/completions", json=failing).status_code == 400


def test_settings_of_the_server(server: Running):
    settings = ServerArgs(
        enable_force_include_usage=True,
        enable_per_request_metrics=True,
        enable_prompt_tokens_details=False,
        return_tokens_as_token_ids=True,
        response_role="bot",
    )
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "logprobs": True}
    with server.serve(settings) as http:
        answer = http.post("/v1/chat/completions", json=body).json()
        streamed = http.post("/v1/chat/completions", json={**body, "stream": True}).text
    assert answer["choices"][0]["message"]["role"] == "bot"
    assert answer["choices"][0]["logprobs"]["content"][0]["token"].startswith("token_id:")
    assert answer["metrics"]["time_to_first_token_ms"] > 0 and "prompt_tokens_details" not in answer["usage"]
    assert '"choices":[],"usage":{' in streamed and '"metrics":{' in streamed


def test_times():
    times = timing_of(
        RequestMetrics(0.0, queued_ts=1.0, scheduled_ts=1.5, first_token_ts=2.0, last_token_ts=3.0, num_generation_tokens=11)
    )
    assert times == {
        "time_to_first_token_ms": 1000, "generation_time_ms": 1000, "queue_time_ms": 500, "prefill_time_ms": 500,
        "mean_itl_ms": 100, "tokens_per_second": pytest.approx(11 / 1.5), "preemptions": 0,
    }  # fmt: skip
    nothing = timing_of(RequestMetrics(0.0, queued_ts=1.0))
    assert {name for name, value in nothing.items() if value is not None} == {"preemptions"}
    drafts = timing_of(RequestMetrics(0.0, queued_ts=1.0), speculates=True)["speculative_decoding"]
    assert len(drafts) == 5 and not any(drafts.values())


def test_tokens_read_from_the_cache_and_written_to_it_are_counted_apart(http):
    body = {"max_tokens": 2, "messages": [{"role": "user", "content": "a page is a page"}], "cache_salt": "counted apart"}
    first, second = (http.post("/v1/messages", json=body).json()["usage"] for _ in range(2))
    whole = http.post("/v1/messages/count_tokens", json={"messages": body["messages"]}).json()["input_tokens"]
    for usage in (first, second):
        parts = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
        assert sum(usage[part] for part in parts) == whole
    assert first["cache_read_input_tokens"] == 0 and first["cache_creation_input_tokens"] == whole // 4 * 4
    assert second["cache_read_input_tokens"] == (whole - 1) // 4 * 4
    assert second["cache_creation_input_tokens"] == whole // 4 * 4 - (whole - 1) // 4 * 4
    details = http.post("/v1/responses", json={"input": "a quire", "cache_salt": "x"}).json()["usage"]["input_tokens_details"]
    assert details["cached_tokens"] == 0 and details["cache_write_tokens"] > 0
