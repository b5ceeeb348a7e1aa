"""Reasoning with a real engine, whose model is tiny and random: a budget ends it, and grammars begin behind it."""

import json

import jsonschema
import pytest
import torch
from scripted import byte_tokenizer

from quire.config.server_args import ServerArgs
from quire.serve.app import build_app
from quire.types.errors import ConfigError
from serving import Running, events_of

SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}, "ok": {"type": "boolean"}},
    "required": ["n", "ok"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": SCHEMA}}]
ASK = {"messages": [{"role": "user", "content": "hi"}], "temperature": 1, "seed": 5, "max_tokens": 120}


@pytest.fixture(scope="module")
def thinker(tmp_path_factory):
    from transformers import LlamaConfig, LlamaForCausalLM

    directory = tmp_path_factory.mktemp("thinking")
    tokenizer = byte_tokenizer(directory)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, bos_token_id=256, eos_token_id=257, initializer_range=0.3,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(directory)
    running = Running(directory)
    yield running
    running.wait_idle()
    running.close()


@pytest.fixture(scope="module")
def http(thinker):
    with thinker.serve(ServerArgs(tool_call_parser="hermes", reasoning_parser="qwen3")) as client:
        yield client


def ask(http, **body):
    response = http.post("/v1/chat/completions", json={**ASK, **body})
    assert response.status_code == 200, response.text
    return response.json()


def test_a_budget_ends_the_reasoning(http):
    [end] = http.post("/tokenize", json={"prompt": "</think>", "add_special_tokens": False}).json()["tokens"]
    never = {"ignore_eos": True, "logit_bias": {str(end): -100}}
    free = ask(http, chat_template_kwargs={"think": "<think>"}, **never)
    assert free["choices"][0]["message"]["content"] is None, "this model does not stop thinking by itself"
    body = {"thinking_token_budget": 9, "return_token_ids": True, "return_prompt_text": True, **never}
    cut = ask(http, **body)
    assert cut["prompt_text"].endswith("<think>\n")
    assert cut["usage"]["completion_tokens_details"]["reasoning_tokens"] <= 9 and cut["choices"][0]["message"]["content"]
    assert cut["choices"][0]["token_ids"].index(end) == 9
    assert ask(http, **body)["choices"][0]["message"] == cut["choices"][0]["message"]
    events = events_of(http.post("/v1/chat/completions", json={**ASK, **body, "stream": True}).text)[:-1]
    said = {"content": "", "reasoning": ""}
    for event in events:
        for key in said:
            said[key] += event["choices"][0]["delta"].get(key) or ""
    assert said == {key: cut["choices"][0]["message"][key] for key in said}


@pytest.mark.parametrize("seed", range(3))
def test_a_tool_is_called_after_the_reasoning(http, seed):
    for choice in ("required", {"type": "function", "function": {"name": "add"}}):
        body = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False, "thinking_token_budget": 6, "seed": seed}
        message = ask(http, **body, max_tokens=200)["choices"][0]["message"]
        assert message["content"] is None and message["reasoning"]
        [call] = message["tool_calls"]
        jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMA)


def test_a_format_holds_after_the_reasoning(http):
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
    message = ask(http, response_format=form, thinking_token_budget=4)["choices"][0]["message"]
    jsonschema.validate(json.loads(message["content"]), SCHEMA)
    assert message["reasoning"]
    off = ask(http, response_format=form, chat_template_kwargs={"think": "<think></think>"})["choices"][0]["message"]
    jsonschema.validate(json.loads(off["content"]), SCHEMA)
    assert off["reasoning"] is None


def test_the_server_chooses_the_text_that_ends_the_reasoning(thinker):
    """reasoning_config: also where the model ended its reasoning before, nothing is forced."""
    config = {"reasoning_start_str": "Let me see. <think>", "reasoning_end_str": " Enough.</think>"}
    with thinker.serve(ServerArgs(reasoning_parser="qwen3", reasoning_config=config)) as http:
        [end] = http.post("/tokenize", json={"prompt": "</think>", "add_special_tokens": False}).json()["tokens"]
        body = {"thinking_token_budget": 9, "return_prompt_text": True, "ignore_eos": True, "max_tokens": 40}
        answer = ask(http, **body, logit_bias={str(end): -100})
        assert answer["prompt_text"].endswith("Let me see. <think>")
        assert answer["choices"][0]["message"]["reasoning"].endswith(" Enough.")
        early = ask(http, **body, logit_bias={str(end): 100})["choices"][0]["message"]
        assert "Enough" not in (early["reasoning"] or "") + early["content"]


@pytest.mark.parametrize(
    "settings",
    [
        {"reasoning_config": {"reasoning_end_str": "stop"}, "reasoning_parser": "qwen3"},
        {"reasoning_config": {"reasoning_start_str": "go"}, "reasoning_parser": "qwen3"},
        {"reasoning_config": {"reasoning_end_str": "</think>"}},
        {"reasoning_config": {"end": "</think>"}, "reasoning_parser": "qwen3"},
    ],
)
def test_a_reasoning_config_that_cannot_work_is_refused(thinker, settings):
    with pytest.raises(ConfigError, match="reasoning_config"):
        build_app(thinker.llm, ServerArgs(**settings))
