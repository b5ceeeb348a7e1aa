"""/tokenize and /detokenize."""

from typing import Annotated, Any

from pydantic import Field
from typing_extensions import TypedDict

from quire.serve.protocol.fields import Body, Objects, TemplateFields


class TokenizeTextRequest(Body):
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool | None = False


class TokenizeChatRequest(TemplateFields):
    messages: Objects
    return_token_strs: bool | None = False

    # known, and refused when used
    media_io_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None


class TokenizeAnswer(TypedDict):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeRequest(Body):
    tokens: Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(fail_fast=True, description="token ids")]


class DetokenizeAnswer(TypedDict):
    prompt: str
