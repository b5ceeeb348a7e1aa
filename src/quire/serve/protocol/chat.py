"""/v1/chat/completions."""

from typing import Annotated, Any, Literal, NotRequired

from fastapi.exceptions import RequestValidationError
from pydantic import Field, ValidationError
from typing_extensions import TypedDict

from quire.serve.protocol.fields import GenerationFields, Integer, Objects, TemplateFields
from quire.serve.protocol.usage import Timing, Usage


class ChatRequest(TemplateFields, GenerationFields):
    messages: Objects = Field(description="the conversation: role and content, which is text or a list of text parts")
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
