"""Every field of every protocol: it changes what is asked of the engine or what is answered, or is a hint, or is refused."""

import json
import re

import pytest
from fields_page import all_names, handling
from pydantic import ValidationError
from scripted import Scripted, byte_tokenizer

from quire.serve import field_table
from quire.serve.field_table import GENERATING, HINTS, MAX_NAMES, PATHS, UnknownFields
from quire.serve.protocol import (
    ChatRequest,
    CompletionRequest,
    CountTokensRequest,
    DetokenizeRequest,
    MessagesRequest,
    ResponsesRequest,
    TokenizeChatRequest,
    TokenizeTextRequest,
)
from serving import error_of

HELLO = [{"role": "user", "content": "hello"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"], "additionalProperties": False}
FUNCTION = {"name": "f", "parameters": SCHEMA}
TOOLS = {
    ChatRequest: [{"type": "function", "function": FUNCTION}],
    TokenizeChatRequest: [{"type": "function", "function": FUNCTION}],
    ResponsesRequest: [{"type": "function", **FUNCTION}],
    MessagesRequest: [{"name": "f", "input_schema": SCHEMA}],
    CountTokensRequest: [{"name": "f", "input_schema": SCHEMA}],
}
CALL = '{"name": "f", "parameters": {"a": "b"}}'
BASES = {
    CompletionRequest: {"prompt": "hello", "max_tokens": 40},
    ChatRequest: {"messages": HELLO},
    ResponsesRequest: {"input": "hello"},
    MessagesRequest: {"messages": HELLO, "max_tokens": 400},
    CountTokensRequest: {"messages": HELLO},
    TokenizeTextRequest: {"prompt": "hello"},
    TokenizeChatRequest: {"messages": HELLO},
    DetokenizeRequest: {"tokens": [1, 256]},
}
# a value that matters
SAMPLES = {
    "frequency_penalty": 0.5, "presence_penalty": 0.5, "repetition_penalty": 1.5, "logit_bias": {"5": 1.0}, "seed": 7,
    "top_k": 5, "min_p": 0.1, "stop_token_ids": [5], "include_stop_str_in_output": True, "ignore_eos": True, "min_tokens": 2,
    "skip_special_tokens": False, "spaces_between_special_tokens": False, "allowed_token_ids": [1, 2], "bad_words": ["x"],
    "repetition_detection": {"max_pattern_size": 2, "min_count": 3}, "structured_outputs": {"choice": ["a"]},
    "truncate_prompt_tokens": 2, "truncation_side": "right", "priority": 3, "cache_salt": "s", "stream_interval": 3, "n": 2,
    "stop": ["x"], "stream": True, "stream_options": {"include_usage": True}, "temperature": 0.5, "top_p": 0.5,
    "use_beam_search": True, "length_penalty": 2.0, "prompt_logprobs": 1, "logprob_token_ids": [1], "request_id": "chosen",
    "return_token_ids": True, "logprobs": True, "top_logprobs": 2, "max_tokens": 5, "max_completion_tokens": 5,
    "max_output_tokens": 5, "echo": True, "documents": [{"text": "d"}], "return_prompt_text": True, "tool_choice": "required",
    "parallel_tool_calls": False, "reasoning_effort": "low", "thinking_token_budget": 5, "include_reasoning": False,
    "add_generation_prompt": False, "continue_final_message": True, "add_special_tokens": True, "chat_template": "{{ 1 }}",
    "chat_template_kwargs": {"think": "<think>"}, "response_format": {"type": "json_object"}, "model": "nobody",
    "messages": [{"role": "user", "content": "bye"}], "prompt": "bye", "input": "bye", "instructions": "Be kind.",
    "previous_response_id": "resp_0", "store": False, "background": True, "metadata": {"a": "b"}, "truncation": "auto",
    "reasoning": {"effort": "low"}, "text": {"format": {"type": "json_object"}}, "system": "Be kind.", "thinking": {
    "type": "disabled"}, "output_config": {"effort": "low"}, "output_format": {"type": "json_schema", "schema": SCHEMA},
    "stop_sequences": ["x"], "return_token_strs": True, "tokens": [3], "include": ["reasoning.encrypted_content"],
    "service_tier": "auto", **dict.fromkeys(("user", "safety_identifier", "prompt_cache_key", "session_id"), "x"),
    "prompt_cache_retention": "24h", "tools": [{"type": "function", "function": FUNCTION}],
}  # fmt: skip
OWN_SAMPLES = {
    (CompletionRequest, "logprobs"): 2,
    (CompletionRequest, "add_special_tokens"): False,
    (TokenizeTextRequest, "add_special_tokens"): False,
    (DetokenizeRequest, "skip_special_tokens"): True,
    (ResponsesRequest, "include"): ["message.output_text.logprobs"],
    (ResponsesRequest, "stream_options"): {"include_obfuscation": False},
    (MessagesRequest, "tool_choice"): {"type": "any"},
    (CountTokensRequest, "tool_choice"): {"type": "none"},
    **{(model, "tools"): tools for model, tools in TOOLS.items()},
}
# what must be there besides for the field to matter
ANSWERED = [*HELLO, {"role": "assistant", "content": "yo"}]
CONTEXTS = {
    "truncation_side": {"truncate_prompt_tokens": 2},
    "stream_options": {"stream": True},
    "top_logprobs": {"logprobs": True},
    "logprob_token_ids": {"logprobs": True},
    "echo": {"messages": ANSWERED, "add_generation_prompt": False},
    "continue_final_message": {"messages": ANSWERED, "add_generation_prompt": False},
    "tool_choice": {"tools": ...},
    "parallel_tool_calls": {"tools": ..., "tool_choice": "required"},
}
OWN_CONTEXTS = {
    (CompletionRequest, "echo"): {},
    (ResponsesRequest, "top_logprobs"): {},
    (CompletionRequest, "logprob_token_ids"): {"logprobs": 1},
}
# the tests of these need a real model, or more than one request
ELSEWHERE = {"return_tokens_as_token_ids"}
NOT_HERE = {
    (CountTokensRequest, "tool_choice"), (CountTokensRequest, "output_format"),  # as much is counted
    (TokenizeTextRequest, "messages"),  # it decides which of the two it is
}  # fmt: skip
HIDDEN = {"id", "created", "created_at", "completed_at", "item_id", "call_id", "first_id", "last_id"}


class Watched(Scripted):
    """Everything that the engine and the tokenizer are asked for is noted."""

    def __init__(self, tokenizer, **settings):
        super().__init__(tokenizer, **settings)
        self.llm.config.policy = "priority"
        self.asked = []
        for place, name in ((self.llm, "generate"), (self.llm.offload, "render"), (self.llm.offload, "encode")):
            setattr(place, name, self._watch(name, getattr(place, name)))
        self.llm.decode = self._decode

    async def _decode(self, ids, skip_special_tokens=True):
        return self.llm.tokenizer.decode(ids, skip_special_tokens)

    def _watch(self, name, work):
        def watched(*args, **options):
            told = [arg for i, arg in enumerate(args) if name != "generate" or i != 2]  # its third is the request's id
            self.asked.append((name, repr(told), repr(sorted(options.items(), key=lambda item: item[0]))))
            return work(*args, **options)

        return watched

    def outcome(self, path, body):
        self.asked.clear()
        self.say(CALL if body.get("tool_choice") else "<think>hm</think>Hi there, x.")
        response = self.post(path.partition(" ")[0], body)
        return response.status_code, list(self.asked), _shown(response.text)


def _shown(text):
    """Without what is new every time."""
    lines = text.split("\n")
    return [_without(json.loads(line.removeprefix("data: "))) if line.startswith(("{", "data: {")) else line for line in lines]


def _without(value):
    if isinstance(value, dict):
        return {key: _without(item) for key, item in value.items() if key not in HIDDEN or "chosen" in str(item)}
    return [_without(item) for item in value] if isinstance(value, list) else value


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    tokenizer = byte_tokenizer(tmp_path_factory.mktemp("bytes"))
    return Watched(
        tokenizer, enable_auto_tool_choice=True, tool_call_parser="hermes", reasoning_parser="qwen3",
        trust_request_chat_template=True,
    )  # fmt: skip


def request_of(model, name):
    """The request without the field, and a value for it."""
    context = OWN_CONTEXTS.get((model, name), CONTEXTS.get(name, {}))
    body = {**BASES[model], **{key: TOOLS.get(model) if value is ... else value for key, value in context.items()}}
    if model is MessagesRequest and "tool_choice" in body:
        body["tool_choice"] = {"type": "any"}
    return body, OWN_SAMPLES.get((model, name), SAMPLES.get(name, {"some": "thing"}))


@pytest.mark.parametrize("model", PATHS, ids=PATHS.values())
def test_no_field_is_ignored(server, model):
    wrong = []
    for name in all_names():
        how = handling(model, name)
        body, value = request_of(model, name)
        if not how or name in ELSEWHERE or (model, name) in NOT_HERE:
            continue
        if how != "works":
            body = BASES[model]
        before, after = server.outcome(PATHS[model], body), server.outcome(PATHS[model], {**body, name: value})
        named = after[0] == 400 and f'"{name}"' in json.dumps(after[2]) + f'"{name}"' * (name in json.dumps(after[2]))
        fine = {
            "works": before[0] == 200 and after != before,
            "hint": after == before and after[0] == 200,
            "refused": named and server.outcome(PATHS[model], {**body, name: None}) == server.outcome(PATHS[model], body),
        }[how]
        if not fine:
            wrong.append((name, how, before, after))
    assert not wrong, "\n".join(f"{name} should be: {how}\n  {before}\n  {after}" for name, how, before, after in wrong)


# vLLM's documented fields
BOTH = """model frequency_penalty logit_bias logprobs max_tokens n presence_penalty seed stop stream stream_options temperature
top_p user use_beam_search top_k min_p repetition_penalty length_penalty stop_token_ids include_stop_str_in_output ignore_eos
min_tokens skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens truncation_side prompt_logprobs
logprob_token_ids allowed_token_ids bad_words thinking_token_budget repetition_detection echo add_special_tokens
response_format structured_outputs priority request_id session_id cache_salt return_tokens_as_token_ids return_token_ids
routed_experts_prompt_start kv_transfer_params ec_transfer_params vllm_xargs stream_interval"""
DOCUMENTED = {
    CompletionRequest: BOTH + " prompt prompt_embeds suffix",
    ChatRequest: BOTH + """ messages top_logprobs max_completion_tokens tools tool_choice reasoning_effort parallel_tool_calls
        add_generation_prompt continue_final_message documents chat_template chat_template_kwargs media_io_kwargs
        mm_processor_kwargs include_reasoning return_prompt_text return_token_offsets return_assistant_tokens_mask""",
    ResponsesRequest: """background include input instructions max_output_tokens max_tool_calls metadata model logit_bias
        parallel_tool_calls previous_response_id prompt reasoning service_tier store stream temperature text tool_choice tools
        top_logprobs top_p top_k truncation user skip_special_tokens include_stop_str_in_output prompt_cache_key request_id
        media_io_kwargs mm_processor_kwargs priority cache_salt enable_response_messages previous_input_messages
        structured_outputs repetition_penalty seed stop ignore_eos vllm_xargs presence_penalty frequency_penalty chat_template
        chat_template_kwargs kv_transfer_params""",
    # Anthropic's
    MessagesRequest: """model messages max_tokens cache_control container context_management inference_geo mcp_servers metadata
        output_config output_format service_tier speed stop_sequences stream system temperature thinking tool_choice tools top_k
        top_p chat_template_kwargs cache_salt priority kv_transfer_params""",
    CountTokensRequest: "model messages system thinking tool_choice tools output_config mcp_servers context_management",
    TokenizeTextRequest: "model prompt add_special_tokens return_token_strs",
    TokenizeChatRequest: """model messages add_generation_prompt return_token_strs continue_final_message add_special_tokens
        chat_template chat_template_kwargs mm_processor_kwargs media_io_kwargs tools""",
    DetokenizeRequest: "model tokens",
}  # fmt: skip


@pytest.mark.parametrize("model", DOCUMENTED, ids=PATHS.get)
def test_the_table_has_all_documented_fields(model):
    assert [name for name in DOCUMENTED[model].split() if not handling(model, name)] == []


@pytest.mark.parametrize("model", PATHS, ids=PATHS.values())
def test_fields_that_nobody_knows_are_ignored_as_in_vllm(server, model):
    body = BASES[model]
    assert server.outcome(PATHS[model], {**body, "no_such_field": {"a": 1}}) == server.outcome(PATHS[model], body)


def test_fields_that_nobody_knows_are_named_once_in_the_log(caplog):
    fields, body = UnknownFields(), CompletionRequest(prompt="a")
    for _ in range(2):
        fields.log(body, ["max_tokns", "line\nend", "x" * 10_000])
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(said) == 3 and "'max_tokns'" in said[0] and "did its client mean 'max_tokens'?" in said[0]
    assert "'line\\nend'" in said[1] and "\n" not in said[1] and len(said[2]) < 200
    fields.log(body, [f"field_{i}_of_many" for i in range(200)])
    assert len(caplog.records) == MAX_NAMES + 1, "and one that says so"


def test_a_misspelt_field_reaches_the_log(server, caplog):
    server.outcome(PATHS[CompletionRequest], {**BASES[CompletionRequest], "temprature": 0})
    assert "'temprature', which is unknown and ignored; did its client mean 'temperature'?" in caplog.text


def test_what_responses_left_out_once(server):
    """They arrive at the engine."""
    asked = {"structured_outputs": {"choice": ["a"]}, "logit_bias": {"5": 1}, "min_tokens": 2, "bad_words": ["b"]}
    assert server.post("/v1/responses", {"input": "hi", **asked}).status_code == 200
    params = server.llm.seen[-1][1]
    assert (params.structured_outputs.choice, params.logit_bias, params.min_tokens) == (["a"], {5: 1.0}, 2)
    error = error_of(server.post("/v1/responses", {"input": "hi", "response_format": {"type": "json_object"}}))
    assert error["param"] == "response_format" and "text.format" in error["message"]
    assert server.post("/v1/responses", {"input": "hi", "include": ["something.else"]}).status_code == 400


def test_hints_are_told_apart():
    assert not set(HINTS) & set(field_table.REFUSED)


@pytest.mark.parametrize("model", PATHS)
def test_true_is_no_number(model):
    shapes = {name: json.dumps(shape) for name, shape in model.model_json_schema()["properties"].items()}
    numbers = [name for name, shape in shapes.items() if re.search('"(integer|number)"', shape) and '"boolean"' not in shape]
    for name in numbers:
        for value in (True, [True], [[True]], {"1": True}):
            with pytest.raises(ValidationError) as refused:
                model.model_validate({name: value})
            assert any(error["loc"][0] == name for error in refused.value.errors()), (name, value)
    assert model not in GENERATING or {"seed", "max_tokens", "max_output_tokens"} & set(numbers)
