"""Speculation through a server: the same answers, told in metrics and events, also when its engine dies in the middle."""

import contextlib
import json
import os
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from server_process import body, serving, wait_for

from serving import Running, events_of
from tiny_model import make_model
from twin_model import make_twin

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
def servers(tmp_path_factory):
    """Without and with."""
    directory = make_model(tmp_path_factory.mktemp("speculating"), max_position_embeddings=1024)
    with drafting(directory, None) as plain, drafting(directory, SPECULATION) as speculating:
        yield plain, speculating


@contextlib.contextmanager
def drafting(model, asked):
    """It is closed whatever happens, and waited for only if all went well."""
    running = Running(model, max_num_batched_tokens=256, speculative_config=asked)
    try:
        yield running
        running.wait_idle()
    finally:
        running.close()


@pytest.fixture
def http(servers):
    return servers[0].http


@pytest.fixture
def speculating(servers):
    return servers[1]


def answer(http, asked):
    response = http.post("/v1/chat/completions", json={"messages": HELLO, **asked})
    assert response.status_code == 200, response.text
    return response.json()


def choices(told):
    """Without the names that calls are given; logprobs to three digits."""
    for choice in told["choices"]:
        for call in choice["message"].get("tool_calls") or ():
            del call["id"]
    return json.loads(json.dumps(told["choices"]), parse_float=lambda text: round(float(text), 3))


def test_answers_are_the_same(http, speculating):
    for asked in BODIES:
        assert choices(answer(speculating.http, asked)) == choices(answer(http, asked))
    asked = {"messages": HELLO, **BODIES[2], "stream": True}
    told = events_of(speculating.http.post("/v1/chat/completions", json=asked).text)[:-1]
    streamed = "".join(choice["delta"].get("content") or "" for event in told for choice in event["choices"])
    assert streamed == answer(http, BODIES[2])["choices"][0]["message"]["content"]


def test_what_a_request_forbids_is_an_error_of_its_own(http, speculating):
    """A word that must come and must not: with and without drafts, the second time as the first."""
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    asked = {"messages": HELLO, "seed": 1, "max_tokens": 40, "response_format": schema, "bad_words": ["a"]}
    told = [one.post("/v1/chat/completions", json=asked) for one in (http, speculating.http, speculating.http)]
    assert {response.status_code for response in told} == {400} and len({response.text for response in told}) == 1
    assert "no token is allowed" in told[0].json()["error"]["message"]


def test_a_head_drafts(http, servers, tmp_path):
    """One that was taught nothing."""
    weights = torch.Generator().manual_seed(1)
    tensors = {f"{i}.0.linear.weight": torch.randn(32, 32, generator=weights) for i in range(2)}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "medusa", "medusa_num_heads": 2, "hidden_size": 32}))
    with drafting(servers[0].llm.config.args.model, {"model": str(tmp_path), "adaptive": False}) as running:
        for asked in BODIES[1:]:
            assert choices(answer(running.http, asked)) == choices(answer(http, asked))
        assert running.llm.stats.drafts.tokens > 20


def test_a_model_drafts(http, servers):
    """The model itself."""
    model = servers[0].llm.config.args.model
    with drafting(model, {"model": model, "num_speculative_tokens": 3, "adaptive": False}) as running:
        for asked in (BODIES[0], *BODIES[3:5]):
            assert choices(answer(running.http, asked)) == choices(answer(http, asked))
        assert running.llm.stats.drafts.accepted > 0


def test_a_model_with_another_vocabulary_drafts(http, servers, tmp_path):
    model = Path(servers[0].llm.config.args.model)
    with drafting(model, {"model": str(make_twin(tmp_path / "twin", model)), "adaptive": False}) as running:
        for asked in BODIES:
            assert choices(answer(running.http, asked)) == choices(answer(http, asked))
        assert running.llm.stats.drafts.tokens > 20


def test_it_is_told_with_the_answer(speculating):
    before = speculating.llm.stats.drafts
    asked = {"json": {"messages": HELLO, **BODIES[0]}, "headers": {"x-request-metrics": "1"}}
    told = speculating.http.post("/v1/chat/completions", **asked).json()
    after, counted = speculating.llm.stats.drafts, told["metrics"]["speculative_decoding"]
    assert told["usage"]["completion_tokens"] == 40
    assert counted["num_spec_steps"] == after.rows - before.rows > 0
    assert counted["num_draft_tokens"] == after.tokens - before.tokens
    assert counted["num_accepted_draft_tokens"] == after.accepted - before.accepted
    assert counted["mean_acceptance_length"] > 1 and 0 < counted["draft_acceptance_rate"] <= 1


def test_it_is_told_in_metrics_and_the_log(serve_model):
    """By `quire serve` as it is called, with the executor that needs no model."""
    flags = ("--speculative-config.method", "synthetic", "--speculative-config.adaptive", "false", "--spec-tokens", "3")
    rates = ("--speculative-config.synthetic_acceptance_rates", "[1.0]")
    with serving(serve_model, *flags, *rates, QUIRE_LOG_STATS_INTERVAL="0.2") as server, server.client() as http:
        first, second = (http.post("/v1/completions", json=body(40, False)).json() for _ in range(2))
        assert first["choices"][0]["token_ids"] == second["choices"][0]["token_ids"]
        lines = [line for line in http.get("/metrics").text.splitlines() if line.startswith("quire:spec_decode_")]
        values = {line.partition("{")[0][18:]: float(line.rpartition(" ")[2]) for line in lines if "per_pos" not in line}
        placed = [float(line.rpartition(" ")[2]) for line in lines if "per_pos" in line]
        assert values["num_accepted_tokens_total"] == sum(placed) >= 28
        assert values["num_draft_tokens_total"] >= values["num_accepted_tokens_total"] >= 2 * values["num_drafts_total"]
        assert len(placed) == 3
        assert "speculation: method synthetic, at most 3 draft tokens per request, always" in server.log()
        wait_for(lambda: "SpecDecoding metrics: Mean acceptance length: " in server.log())


def test_a_killed_engine_changes_nothing(http, speculating):
    asked = {"temperature": 0.8, "seed": 8, "max_tokens": 150, "ignore_eos": True}
    whole = answer(http, asked)["choices"][0]["message"]["content"]
    text, killed = "", False
    with speculating.http.stream(
        "POST", "/v1/chat/completions", json={"messages": HELLO, **asked, "stream": True}, timeout=120
    ) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    text += choice["delta"].get("content") or ""
                if len(text) > 20 and not killed:
                    killed = True
                    os.kill(speculating.llm.engine_pid, signal.SIGKILL)
    assert killed and text == whole
