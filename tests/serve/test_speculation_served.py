"""Speculation through a server: the same answers, told in metrics and events, also when its engine dies in the middle."""

import json
import os
import signal

import pytest

from serving import Running, events_of

SPECULATION = {
    "method": "ngram",
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 4,
    "num_speculative_tokens": 4,
    "adaptive": False,
}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": SCHEMA}}]
HELLO = [{"role": "user", "content": "the quick brown fox jumps over the quick brown fox jumps over the"}]
BODIES = [
    {"temperature": 0, "max_tokens": 40, "ignore_eos": True},
    {
        "temperature": 0.8,
        "seed": 3,
        "max_tokens": 30,
        "logprobs": True,
        "top_logprobs": 2,
        "min_p": 0.02,
        "logit_bias": {"9": 2},
    },
    {"temperature": 0, "max_tokens": 30, "stop": ["o"], "frequency_penalty": 0.3},
    {"temperature": 0.9, "seed": 4, "n": 2, "max_tokens": 20, "ignore_eos": True},
    {
        "temperature": 0,
        "max_tokens": 40,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
    },
    {"temperature": 0.8, "seed": 1, "max_tokens": 60, "tools": TOOLS, "tool_choice": "required"},
]


@pytest.fixture(scope="module")
def speculating(serve_model):
    running = Running(serve_model, speculative_config=SPECULATION)
    yield running
    running.wait_idle()
    running.close()


def answer(http, body, **more):
    response = http.post("/v1/chat/completions", json={"messages": HELLO, **body, **more})
    assert response.status_code == 200, response.text
    return response.json()


def choices(told):
    """Without ids that are made up for every answer."""
    return json.loads(json.dumps(told["choices"]).replace("chatcmpl-tool-", "")) if not any(
        choice["message"].get("tool_calls") for choice in told["choices"]
    ) else [[call["function"] for call in choice["message"]["tool_calls"]] for choice in told["choices"]]  # fmt: skip


def test_answers_are_the_same(http, speculating):
    for body in BODIES:
        assert choices(answer(speculating.http, body)) == choices(answer(http, body))
        streamed = "".join(
            choice["delta"].get("content") or ""
            for event in events_of(
                speculating.http.post("/v1/chat/completions", json={"messages": HELLO, **body, "n": 1, "stream": True}).text
            )[:-1]
            for choice in event["choices"]
        )
        if "tools" not in body:
            whole = answer(http, {**body, "n": 1})["choices"][0]["message"]["content"]
            assert streamed == whole


def metric(http, name):
    lines = [line for line in http.get("/metrics").text.splitlines() if line.startswith(f"quire:spec_decode_{name}_total{{")]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def test_it_is_told(speculating):
    http = speculating.http
    drafts, tokens, accepted = (metric(http, name) for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"))
    told = answer(http, BODIES[0])
    assert told["usage"]["completion_tokens"] == 40
    assert metric(http, "num_drafts") > drafts and metric(http, "num_draft_tokens") > tokens
    assert metric(http, "num_accepted_tokens_per_pos") == metric(http, "num_accepted_tokens") > accepted


def test_a_killed_engine_changes_nothing(http, speculating):
    body = {"temperature": 0.8, "seed": 8, "max_tokens": 150, "ignore_eos": True}
    whole = answer(http, body)["choices"][0]["message"]["content"]
    text, killed = "", False
    with speculating.http.stream(
        "POST", "/v1/chat/completions", json={"messages": HELLO, **body, "stream": True}, timeout=120
    ) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    text += choice["delta"].get("content") or ""
                if len(text) > 20 and not killed:
                    killed = True
                    os.kill(speculating.llm.engine_pid, signal.SIGKILL)
    assert killed and text == whole
