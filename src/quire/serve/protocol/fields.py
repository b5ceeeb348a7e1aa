"""Fields that several requests share: vLLM's names, types and defaults. Others are allowed (`serve/field_table.py`)."""

from typing import Annotated, Any, Literal, LiteralString

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, ValidatorFunctionWrapHandler, WrapValidator
from pydantic_core import PydanticCustomError

from quire.text.helper.wire import Ids

LARGEST_INT = 2**63 - 1


def _number(value: Any) -> Any:
    """To pydantic true is 1."""
    if isinstance(value, bool):
        raise PydanticCustomError("number_type", "Input should be a number, got a boolean")
    return value


def _known(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
    """Integers are taken as they are: a look at each of a million takes too long."""
    if type(value) is Ids or (type(value) is list and set(map(type, value)) == {int}):
        return value
    return handler(without_booleans(value))


def without_booleans(value: Any) -> Any:
    """The same for a list of token ids."""
    if type(value) is list and bool in set(map(type, value)):
        raise PydanticCustomError("number_type", "Input should be token ids, got a boolean among them")
    return value


Integer = Annotated[int, BeforeValidator(_number)]
Number = Annotated[float, BeforeValidator(_number)]


# A list with one bad item is refused with one error, however long it is.
TokenIds = Annotated[list[int], Field(fail_fast=True), WrapValidator(_known)]
Strings = Annotated[list[str], Field(fail_fast=True)]
Objects = Annotated[list[dict[str, Any]], Field(fail_fast=True)]
Int64 = Annotated[Integer, Field(ge=-(2**63), le=LARGEST_INT)]


def one_error(message: LiteralString) -> WrapValidator:
    """A union that fits nothing is one error in words, instead of one for each of its types."""

    def validate(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value)
        except ValidationError:
            raise PydanticCustomError("wrong_type", message) from None

    return WrapValidator(validate)


class RequestBody(BaseModel):
    model_config = ConfigDict(extra="allow")

    model: str | None = Field(None, description="a name this server answers to (see /v1/models); default: its model")


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="allow")

    include_usage: bool | None = Field(False, description="end the stream with a chunk that has usage and no choices")
    continuous_usage_stats: bool | None = Field(False, description="usage so far in every chunk")


class Repetition(BaseModel):
    model_config = ConfigDict(extra="forbid")

    max_pattern_size: Integer = Field(0, ge=0, le=2**31)
    min_pattern_size: Integer = Field(0, ge=0, le=2**31)
    min_count: Integer = Field(0, ge=0, le=2**31)


class TemplateFields(RequestBody):
    """How messages become a prompt."""

    add_generation_prompt: bool = Field(True, description="end the prompt with the start of the assistant's turn")
    continue_final_message: bool = Field(False, description="go on with the last message instead of starting a new one")
    add_special_tokens: bool = Field(False, description="special tokens besides those the chat template writes")
    chat_template: str | None = Field(None, description="a Jinja template; only where the server trusts requests with that")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="variables for the chat template")
    tools: Objects | None = Field(None, description="functions the model may call: name, description, parameters")


class SamplingFields(RequestBody):
    """vLLM's own: they mean the same in every protocol that generates."""

    frequency_penalty: Number | None = 0.0
    presence_penalty: Number | None = 0.0
    repetition_penalty: Number | None = None
    logit_bias: dict[str, Number] | None = None
    seed: Int64 | None = None
    top_k: Annotated[Integer, Field(ge=-LARGEST_INT, le=LARGEST_INT)] | None = None
    min_p: Number | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: Integer = 0
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    allowed_token_ids: TokenIds | None = None
    bad_words: Strings | None = None
    repetition_detection: Repetition | None = None
    structured_outputs: dict[str, Any] | None = Field(
        None, description="one of json, regex, choice, grammar, json_object, structural_tag"
    )
    truncate_prompt_tokens: Annotated[Integer, Field(ge=-1, le=LARGEST_INT)] | None = Field(
        None, description="keep this many prompt tokens; -1: as many as the model can take"
    )
    truncation_side: Literal["left", "right"] | None = Field(None, description="where tokens are cut off; default: left")
    priority: Int64 = Field(0, description="lower runs first; needs a server with scheduling_policy=priority")
    cache_salt: str | None = Field(None, min_length=1, description="cached prompts are shared only among equal salts")
    stream_interval: Annotated[Integer, Field(ge=1, le=2**31)] | None = Field(None, description="tokens per streamed chunk")


class GenerationFields(SamplingFields):
    """What /v1/completions and /v1/chat/completions have in common."""

    # OpenAI's
    n: Integer | None = 1
    stop: Annotated[str | Strings | None, one_error("should be a string or a list of strings")] = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    user: str | None = Field(None, description="has no effect, by definition of the API")

    # sampling
    use_beam_search: bool = False
    length_penalty: Number = 1.0
    prompt_logprobs: Integer | None = None
    logprob_token_ids: TokenIds | None = None

    # serving
    request_id: str | None = Field(None, min_length=1, description="part of the answer's id; X-Request-Id wins")
    session_id: str | None = Field(None, description="requests of a session go to the same engine; here there is one engine")
    return_tokens_as_token_ids: bool | None = Field(None, description="logprobs name tokens as token_id:N")
    return_token_ids: bool | None = Field(None, description="answers carry token ids besides text")

    # what the answer must look like
    response_format: dict[str, Any] | None = Field(None, description="type: text, json_object, json_schema or structural_tag")


def given(request: RequestBody, owner: type[RequestBody]) -> dict[str, Any]:
    """The request's own values of another model's fields."""
    return {name: getattr(request, name) for name in owner.model_fields if name in request.model_fields_set}
