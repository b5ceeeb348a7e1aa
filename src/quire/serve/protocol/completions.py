"""/v1/completions."""

from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field, ValidatorFunctionWrapHandler, WrapValidator
from typing_extensions import TypedDict

from quire.serve.protocol.fields import GenerationFields, Integer, Strings, TokenIds, one_error
from quire.serve.protocol.usage import Timing, Usage
from quire.text.helper.wire import Ids


def _plain(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
    """What is plainly one kind of prompt or list is not tried as the others."""
    kinds = set(map(type, value)) if type(value) is list else {type(value)}
    if kinds in ({str}, {Ids}):
        return value
    return handler(value)


Prompts = Annotated[
    str | TokenIds | Strings | Annotated[list[TokenIds], Field(fail_fast=True)] | None,
    one_error("should be text, token ids, or a list of either"),
    WrapValidator(_plain),
]


class CompletionRequest(GenerationFields):
    prompt: Prompts = Field(None, description="text, token ids, or a list of either")
    echo: bool | None = Field(False, description="the answer begins with the prompt")
    logprobs: Integer | None = Field(None, description="this many of the most likely tokens at every position; -1: all")
    max_tokens: Integer | None = 16
    add_special_tokens: bool = True


class CompletionLogprobs(TypedDict):
    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(TypedDict):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    prompt_logprobs: NotRequired[list[dict[str, Any] | None] | None]
    prompt_token_ids: NotRequired[list[int] | None]
    token_ids: NotRequired[list[int] | None]


class Completion(TypedDict):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    system_fingerprint: NotRequired[str]
    usage: NotRequired[Usage]
    metrics: NotRequired[Timing]
