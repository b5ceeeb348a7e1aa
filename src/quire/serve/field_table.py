"""The table of the fields of all requests: each works, is a hint that changes no answer, or is refused by name.

    works     a field of the protocol's model (serve/protocol.py), unless it is one of HINTS
    hint      in HINTS: accepted without effect
    refused   in REFUSED, or in the model of another protocol: an error, unless the value asks for nothing
    unknown   no protocol here has it: ignored, as in vLLM, with a warning in the log (serve/field_table.py)

`python scripts/fields_page.py` writes docs/fields.md.
"""

import difflib
import logging
from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel

from quire.serve.protocol import (
    ChatRequest,
    CompletionRequest,
    CountTokensRequest,
    DetokenizeRequest,
    MessagesRequest,
    RequestBody,
    ResponsesRequest,
    TokenizeChatRequest,
    TokenizeTextRequest,
)
from quire.types.errors import InvalidParameter, NotSupported

logger = logging.getLogger(__name__)

PATHS: dict[type[RequestBody], str] = {
    CompletionRequest: "/v1/completions",
    ChatRequest: "/v1/chat/completions",
    ResponsesRequest: "/v1/responses",
    MessagesRequest: "/v1/messages",
    CountTokensRequest: "/v1/messages/count_tokens",
    TokenizeTextRequest: "/tokenize (prompt)",
    TokenizeChatRequest: "/tokenize (messages)",
    DetokenizeRequest: "/detokenize",
}
GENERATING = (CompletionRequest, ChatRequest, ResponsesRequest, MessagesRequest)
# fields of those that generate which would change the answer of those that do not
_CUT = ("truncate_prompt_tokens", "truncation_side")
_MATTERS: dict[type[RequestBody], tuple[str, ...]] = {
    CountTokensRequest: (*_CUT, "reasoning_effort", "instructions", "mm_processor_kwargs", "media_io_kwargs"),
    TokenizeTextRequest: _CUT,
    TokenizeChatRequest: (*_CUT, "reasoning_effort", "echo", "system", "instructions"),
    DetokenizeRequest: (),
}

_ONE_ENGINE = "there is one engine"
_CALLER = "caller metadata; ignored"
_CACHED = "prompts are cached by their content, always"
# name -> why it has no effect, in any protocol (unless a model makes something of it: WORK_SOMEWHERE)
HINTS = {
    "user": _CALLER,
    "safety_identifier": _CALLER,
    "metadata": "nothing depends on it",
    "store": "only /v1/responses stores answers",
    "session_id": _ONE_ENGINE,
    "service_tier": "there is one tier",
    "speed": "there is one speed",
    "inference_geo": "there is one place",
    "prompt_cache_key": _CACHED,
    "prompt_cache_retention": _CACHED,
    "cache_control": _CACHED,
    "prediction": "it would only save time",
    "verbosity": "models here do not know it",
    "include": "it names parts of the items of /v1/responses",
}
_TEXT_ONLY = "answers are text"
_NO_TRANSFER = "this engine transfers no cache to others"
_NO_TOOLS = "the server calls no tools by itself"
_LOGPROBS = "logprobs are in /v1/chat/completions"
# name -> why it is not supported
REFUSED = {
    **{f"guided_{kind}": f'its name is now structured_outputs: {{"{kind}": ...}}' for kind in (
        "json", "regex", "choice", "grammar", "json_object", "whitespace_pattern")},
    "guided_decoding_backend": "grammars are followed by llguidance",
    "functions": "its name is now tools",
    "function_call": "its name is now tool_choice",
    "best_of": "all n choices are returned",
    "suffix": "the model cannot fill in the middle",
    "prompt_embeds": "prompts are text or token ids",
    "modalities": _TEXT_ONLY,
    "audio": _TEXT_ONLY,
    "web_search_options": _NO_TOOLS,
    "routed_experts_prompt_start": "routed experts are not returned",
    "return_token_offsets": "token offsets are not returned",
    "return_assistant_tokens_mask": "token masks are not returned",
    "kv_transfer_params": _NO_TRANSFER,
    "ec_transfer_params": _NO_TRANSFER,
    "conversation": "conversations are not stored: send previous_response_id, or the whole input",
    "max_tool_calls": _NO_TOOLS,
    "mcp_servers": _NO_TOOLS,
    "container": "the server runs no code",
    "context_management": "the conversation is used as it is sent",
    "enable_response_messages": "the input and output of a response are items",
    "previous_input_messages": "send them as input items",
}  # fmt: skip
# values without effect, besides None, the default where the field works, and false, 0 or empty values
NEUTRAL: dict[str, tuple[Any, ...]] = {"modalities": (["text"],), "best_of": (1,)}
# the name of another protocol's field in this one
INSTEAD: dict[type[RequestBody], dict[str, str]] = {
    CompletionRequest: {
        "messages": "they are for /v1/chat/completions",
        "thinking_token_budget": "a bare prompt has no reasoning: it is for /v1/chat/completions",
        "top_logprobs": "logprobs is the number of them here",
        "max_completion_tokens": "its name here is max_tokens",
        "max_output_tokens": "its name here is max_tokens",
        "stop_sequences": "its name here is stop",
    },
    ChatRequest: {
        "prompt": "a bare prompt is for /v1/completions",
        "input": "its name here is messages",
        "instructions": "here it is a message of role system",
        "system": "here it is a message of role system",
        "max_output_tokens": "its name here is max_completion_tokens",
        "stop_sequences": "its name here is stop",
        "text": "its name here is response_format",
        "reasoning": "its name here is reasoning_effort",
        "thinking": "its name here is thinking_token_budget",
        "output_config": "its names here are response_format and reasoning_effort",
    },
    ResponsesRequest: {
        "messages": "its name here is input",
        "prompt": "there are no stored prompts; text is input",
        "system": "its name here is instructions",
        "max_tokens": "its name here is max_output_tokens",
        "max_completion_tokens": "its name here is max_output_tokens",
        "stop_sequences": "its name here is stop",
        "response_format": "its name here is text.format",
        "reasoning_effort": "its name here is reasoning.effort",
        "thinking": "its names here are reasoning and thinking_token_budget",
        "output_config": "its names here are text.format and reasoning.effort",
        "n": "there is one answer",
        "request_id": "ids of responses are the server's own",
        "logprobs": 'it is include: ["message.output_text.logprobs"] and top_logprobs here',
        "prompt_logprobs": _LOGPROBS,
        "logprob_token_ids": _LOGPROBS,
    },
    MessagesRequest: {
        "prompt": "its name here is messages",
        "input": "its name here is messages",
        "instructions": "its name here is system",
        "max_completion_tokens": "its name here is max_tokens",
        "max_output_tokens": "its name here is max_tokens",
        "stop": "its name here is stop_sequences",
        "response_format": "its name here is output_config.format",
        "text": "its name here is output_config.format",
        "reasoning_effort": "its name here is output_config.effort",
        "reasoning": "its name here is thinking",
        "thinking_token_budget": "its name here is thinking.budget_tokens",
        "parallel_tool_calls": "its name here is tool_choice.disable_parallel_tool_use",
        "n": "there is one answer",
        "logprobs": _LOGPROBS,
        "top_logprobs": _LOGPROBS,
        "prompt_logprobs": _LOGPROBS,
        "logprob_token_ids": _LOGPROBS,
    },
    TokenizeChatRequest: {"prompt": "give a prompt or messages, not both"},
}


def check_fields(request: RequestBody) -> list[str]:
    """Raise an error for fields that are not supported; return the names of unknown fields."""
    if not request.model_extra:
        return []
    unknown = []
    for name, value in request.model_extra.items():
        reason = refusal(type(request), name)
        if reason is not None and not _asks_for_nothing(name, value):
            raise (NotSupported if name in REFUSED else InvalidParameter)(f"{name} cannot be used: {reason}", name)
        if reason is None and name not in HINTS and not is_known(name):
            unknown.append(name)
    return unknown


def refusal(model: type[RequestBody], name: str) -> str | None:
    """Return why the field is not supported in this protocol; None if it works, is a hint, or is unknown."""
    if name in model.model_fields or name in HINTS:
        return None
    if name in INSTEAD.get(model, {}):
        return INSTEAD[model][name]
    if name in REFUSED:
        return REFUSED[name]
    homes = [PATHS[other] for other in GENERATING if name in other.model_fields]
    if not homes or name not in _MATTERS.get(model, (name,)):
        return None
    return f"it belongs to {' and '.join(homes)}"


def is_known(name: str) -> bool:
    return any(name in model.model_fields for model in PATHS)


def _asks_for_nothing(name: str, value: Any) -> bool:
    if value is None or value in NEUTRAL.get(name, ()):
        return True
    if name.startswith("guided_"):  # an empty schema asks for JSON of any kind
        return value is False
    home = next((model for model in (ChatRequest, *GENERATING) if name in model.model_fields), None)
    default = None if home is None else home.model_fields[name].default
    return (value == default and type(value) is type(default)) or (not value and default is not True)


MAX_NAMES, LONGEST_NAME = 64, 64  # clients choose them


class UnknownFields:
    def __init__(self) -> None:
        self._logged: set[str] = set()

    def log(self, body: BaseModel, names: Iterable[str]) -> None:
        for name in names:
            name = name[:LONGEST_NAME]
            if name in self._logged or len(self._logged) == MAX_NAMES:
                continue
            self._logged.add(name)
            near = difflib.get_close_matches(name, type(body).model_fields, n=1)
            hint = f"; did its client mean {near[0]!r}?" if near else ""
            logger.warning("a request has the field %s, which is unknown and ignored%s (logged once)", ascii(name), hint)
            if len(self._logged) == MAX_NAMES:
                logger.warning("%d unknown fields have been named; further ones are ignored without a log line", MAX_NAMES)
