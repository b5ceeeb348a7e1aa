"""The error every endpoint answers with, and Anthropic's form of it."""

from typing import Literal

from typing_extensions import TypedDict


class ErrorInfo(TypedDict):
    message: str
    type: str
    param: str | None
    code: int


class ErrorBody(TypedDict):
    error: ErrorInfo


class AnthropicErrorInfo(TypedDict):
    type: str
    message: str


class AnthropicErrorBody(TypedDict):
    type: Literal["error"]
    error: AnthropicErrorInfo
    request_id: str
