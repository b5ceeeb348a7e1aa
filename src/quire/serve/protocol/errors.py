"""The error every endpoint answers with."""

from typing_extensions import TypedDict


class ErrorInfo(TypedDict):
    message: str
    type: str
    param: str | None
    code: int


class ErrorBody(TypedDict):
    error: ErrorInfo
