"""/v1/responses: OpenAI's. Fields that ask for what is not built are refused by name (`serve/field_table.py`)."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from quire.serve.protocol.fields import Integer, Number, Objects, SamplingFields, Strings, one_error


class ReasoningConfig(BaseModel):
    model_config = ConfigDict(extra="allow")

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = Field(None, description="there are no summaries: all is told")


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
