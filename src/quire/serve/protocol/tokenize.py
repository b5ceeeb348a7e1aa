"""/tokenize and /detokenize."""

from typing import Annotated, Any

from pydantic import Field, WrapValidator
from typing_extensions import TypedDict

from quire.serve.protocol.fields import Objects, RequestBody, TemplateFields, without_booleans
from quire.text.helper.wire import Ids


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
