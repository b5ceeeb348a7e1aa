"""/v1/responses: OpenAI's. Fields that ask for what is not built are refused by name (`serve/response_objects.py`)."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from quire.serve.protocol.fields import Body, Int64, Objects, Strings, one_error


class ReasoningConfig(BaseModel):
    model_config = ConfigDict(extra="allow")

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = Field(None, description="there are no summaries: all is told")


class TextConfig(BaseModel):
    model_config = ConfigDict(extra="allow")

    format: dict[str, Any] | None = None
    verbosity: Literal["low", "medium", "high"] | None = Field(None, description="a hint; models here do not know it")


class ResponsesRequest(Body):
    input: Annotated[str | Objects, one_error("should be a string or a list of items")]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = True
    background: bool | None = False
    stream: bool | None = False
    metadata: Annotated[dict[str, str] | None, one_error("should map strings to strings")] = None

    max_output_tokens: int | None = Field(None, ge=1)
    temperature: float | None = None
    top_p: float | None = None
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
    include: list[str] | None = None

    # vLLM's
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: Int64 | None = None
    stop: Annotated[str | Strings | None, one_error("should be a string or a list of strings")] = None
    ignore_eos: bool = False
    priority: Int64 = 0
    cache_salt: str | None = Field(None, min_length=1)
    chat_template_kwargs: dict[str, Any] | None = None

    # known, and refused when used
    conversation: Any = None
    prompt: Any = None
    max_tool_calls: int | None = None
    top_logprobs: int | None = None
