"""Request and response bodies of all protocols: vLLM's names, types and defaults. Unknown fields: `serve/field_table.py`."""

from typing import Annotated, Any, Literal, LiteralString, NotRequired

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, ValidatorFunctionWrapHandler, WrapValidator
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from quire.text.workers.wire import Ids

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
    mm_processor_kwargs: dict[str, Any] | None = Field(
        None, description="options of the model's image processor, such as max_pixels; over those of the server"
    )
    media_io_kwargs: dict[str, dict[str, Any]] | None = Field(
        None, description='how media are read, by kind: {"video": {"num_frames": 16, "fps": 1}}; over those of the server'
    )


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
    vllm_xargs: dict[str, Any] | None = Field(None, description="arguments for logits processors (SamplingParams.extra_args)")
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


class PromptTokens(TypedDict):
    cached_tokens: int
    multimodal_tokens: NotRequired[dict[str, int]]  # by kind: image, video


class CompletionTokens(TypedDict):
    reasoning_tokens: int


class Usage(TypedDict):
    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: NotRequired[PromptTokens]
    completion_tokens_details: NotRequired[CompletionTokens]


class Drafts(TypedDict):
    """Of a request to a server that drafts; zeros if it had none."""

    num_spec_steps: int  # steps in which it had some
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    mean_acceptance_length: float  # tokens that such a step brought
    draft_acceptance_rate: float


class Timing(TypedDict):
    """Milliseconds; None where there is nothing to measure. queue + prefill = time to the first token."""

    time_to_first_token_ms: float | None
    generation_time_ms: float | None  # first token to last
    queue_time_ms: float | None
    prefill_time_ms: float | None  # first time in a batch to first token
    mean_itl_ms: float | None
    tokens_per_second: float | None  # from the first time in a batch
    preemptions: int
    speculative_decoding: NotRequired[Drafts]


# ---- /v1/chat/completions


class ChatRequest(TemplateFields, GenerationFields):
    messages: Objects = Field(
        description="the conversation: role and content, which is text or a list of parts: text, images, videos"
    )
    logprobs: bool | None = False
    top_logprobs: Integer | None = Field(0, description="this many of the most likely tokens at every position; -1: all")
    max_tokens: Integer | None = Field(None, description="deprecated by OpenAI in favour of max_completion_tokens")
    max_completion_tokens: Integer | None = None
    echo: bool = Field(False, description="the answer begins with the last message, if it has the same role")
    documents: Objects | None = Field(None, description="documents for the chat template")
    return_prompt_text: bool | None = Field(None, description="the answer carries the prompt as the template wrote it")

    tool_choice: Any = Field(
        None, description="none, auto, required, or the tool to be called; default: auto if there are tools"
    )
    parallel_tool_calls: bool | None = Field(True, description="false: at most one call")
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="given to the chat template; none turns the reasoning off where the template can"
    )
    thinking_token_budget: Annotated[Integer, Field(ge=-1, le=2**31)] | None = Field(
        None, description="tokens of reasoning after which its end is forced; -1: as many as it takes"
    )
    include_reasoning: bool = Field(True, description="false: the answer leaves the reasoning out")


def chat_request(body: dict[str, Any]) -> ChatRequest:
    """A request that another protocol's was translated to."""
    try:
        return ChatRequest.model_validate(body)
    except ValidationError as error:
        raise RequestValidationError(error.errors()) from None


class TokenChance(TypedDict):
    token: str
    logprob: float
    bytes: list[int] | None


class ChatToken(TokenChance):
    top_logprobs: list[TokenChance]


class ChatLogprobs(TypedDict):
    content: list[ChatToken]


class CalledFunction(TypedDict):
    name: str
    arguments: str  # JSON


class ToolCall(TypedDict):
    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(TypedDict):
    role: str
    content: str | None
    refusal: None
    annotations: None
    audio: None
    function_call: None
    tool_calls: NotRequired[list[ToolCall]]  # only where there are some
    reasoning: str | None


class ChatChoice(TypedDict):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: NotRequired[list[int]]


class ChatCompletion(TypedDict):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str
    prompt_logprobs: NotRequired[list[dict[str, Any] | None]]
    prompt_token_ids: NotRequired[list[int]]
    prompt_text: NotRequired[str]
    metrics: NotRequired[Timing]


class FunctionDelta(TypedDict):
    name: NotRequired[str]
    arguments: str


class ToolCallDelta(TypedDict):
    index: int
    id: NotRequired[str | None]
    type: NotRequired[Literal["function"]]
    function: FunctionDelta


class Delta(TypedDict):
    role: NotRequired[str]
    content: NotRequired[str]
    reasoning: NotRequired[str]
    tool_calls: NotRequired[list[ToolCallDelta]]


class ChatChunkChoice(TypedDict):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: NotRequired[int | str | None]
    token_ids: NotRequired[list[int]]


# ---- /v1/completions


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


# ---- /v1/messages

Content = Annotated[str | Objects, one_error("should be a string or a list of content blocks")]


class InputMessage(BaseModel):
    model_config = ConfigDict(extra="allow")

    role: Literal["user", "assistant", "system"]
    content: Content


class ToolChoice(BaseModel):
    model_config = ConfigDict(extra="allow")

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(BaseModel):
    model_config = ConfigDict(extra="allow")

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[Integer, Field(ge=1)] | None = None
    display: Literal["summarized", "omitted"] | None = Field(None, description="omitted: thinking is not shown")


class OutputConfig(BaseModel):
    model_config = ConfigDict(extra="allow")

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    format: dict[str, Any] | None = Field(None, description='{"type": "json_schema", "schema": {...}}')


class CountTokensRequest(RequestBody):
    messages: Annotated[list[InputMessage], Field(fail_fast=True)]
    system: Content | None = None
    tools: Objects | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    output_format: dict[str, Any] | None = Field(None, description="the older name of output_config.format")
    chat_template_kwargs: dict[str, Any] | None = None  # vLLM's, as are the fields of SamplingFields


class MessagesRequest(CountTokensRequest, SamplingFields):
    max_tokens: Integer = Field(ge=1)
    stop_sequences: Strings | None = None
    stream: bool | None = False
    temperature: Annotated[Number, Field(ge=0.0, le=1.0)] | None = None
    top_p: Number | None = None
    metadata: dict[str, Any] | None = Field(None, description="has no effect")
    service_tier: Literal["auto", "standard_only"] | None = Field(None, description="there is one tier")


# ---- /v1/responses


class ReasoningConfig(BaseModel):
    model_config = ConfigDict(extra="allow")

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = Field(
        None, description="there are no summaries: the reasoning is returned whole"
    )


class TextConfig(BaseModel):
    model_config = ConfigDict(extra="allow")

    format: dict[str, Any] | None = None
    verbosity: Literal["low", "medium", "high"] | None = Field(None, description="a hint; models here do not know it")


Include = Literal[
    "message.output_text.logprobs", "reasoning.encrypted_content", "file_search_call.results", "web_search_call.results",
    "web_search_call.action.sources", "message.input_image.image_url", "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]  # fmt: skip


class ResponseStreamOptions(BaseModel):
    model_config = ConfigDict(extra="allow")

    include_obfuscation: bool | None = Field(None, description="events are never padded")


class ResponsesRequest(SamplingFields):
    input: Annotated[str | Objects, one_error("should be a string or a list of items")]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = True
    background: bool | None = False
    stream: bool | None = False
    metadata: Annotated[dict[str, str] | None, one_error("should map strings to strings")] = None

    max_output_tokens: Annotated[Integer, Field(ge=1)] | None = None
    top_logprobs: Annotated[Integer, Field(ge=0)] | None = Field(
        None, description="logprobs of the output text, with this many of the most likely tokens at every position"
    )
    temperature: Number | None = None
    top_p: Number | None = None
    truncation: Literal["auto", "disabled"] | None = "disabled"
    reasoning: ReasoningConfig | None = None
    text: TextConfig | None = None
    tools: Objects | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = True

    # hints, by definition of the API
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    service_tier: str | None = None
    include: list[Include] | None = Field(
        None,
        description="message.output_text.logprobs: logprobs of the output text; nothing else is included",
    )
    stream_options: ResponseStreamOptions | None = None

    # vLLM's, besides those of SamplingFields
    stop: Annotated[str | Strings | None, one_error("should be a string or a list of strings")] = None
    thinking_token_budget: Annotated[Integer, Field(ge=-1, le=2**31)] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


# ---- /tokenize and /detokenize


class TokenizeTextRequest(RequestBody):
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool | None = False


class TokenizeChatRequest(TemplateFields):
    messages: Objects
    documents: Objects | None = None
    return_token_strs: bool | None = False


class TokenizeAnswer(TypedDict):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


def _are_ids(value: Any) -> bool:
    return type(value) is Ids and value.least >= 0 and value.greatest < 2**31


class DetokenizeRequest(RequestBody):
    tokens: Annotated[
        list[Annotated[int, Field(ge=0, lt=2**31)]],
        Field(fail_fast=True, description="token ids"),
        WrapValidator(lambda value, handler: value if _are_ids(value) else handler(without_booleans(value))),
    ]
    skip_special_tokens: bool = False


class DetokenizeAnswer(TypedDict):
    prompt: str


# ---- /v1/load_lora_adapter and /v1/unload_lora_adapter


class LoadAdapterRequest(BaseModel):
    model_config = ConfigDict(extra="allow")

    lora_name: str = Field(min_length=1, max_length=255, description="what requests call it, as their model")
    lora_path: str = Field(min_length=1, max_length=4096, description="its directory, on the server")
    load_inplace: bool = Field(False, description="replace the one of that name; requests that have begun keep the old one")


class UnloadAdapterRequest(BaseModel):
    model_config = ConfigDict(extra="allow")

    lora_name: str = Field(min_length=1, max_length=255)
    lora_int_id: int | None = Field(None, description="not needed: the name says which")
