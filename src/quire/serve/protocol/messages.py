"""/v1/messages: Anthropic's. What the fields mean is Anthropic's too."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from quire.serve.protocol.fields import Integer, Number, Objects, RequestBody, SamplingFields, Strings, one_error

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
