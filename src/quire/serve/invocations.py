"""SageMaker's /invocations: one path for every kind of request, told apart by what the body has."""

from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import Discriminator, Tag

from quire.serve.body import JSONRoute
from quire.serve.chat import create_chat_completion
from quire.serve.completions import create_completion
from quire.serve.errors import HttpError
from quire.serve.protocol.chat import ChatRequest
from quire.serve.protocol.completions import CompletionRequest
from quire.serve.protocol.errors import ErrorBody

router = APIRouter(route_class=JSONRoute, tags=["SageMaker"])


def _kind(body: Any) -> str:
    for field in ("messages", "prompt"):
        if isinstance(body, dict) and field in body:
            return field
    raise HttpError(400, "the body must have messages, for a chat completion, or a prompt, for a completion", "body")


Invocation = Annotated[
    Annotated[ChatRequest, Tag("messages")] | Annotated[CompletionRequest, Tag("prompt")], Discriminator(_kind)
]


@router.post("/invocations", responses={400: {"model": ErrorBody}, 404: {"model": ErrorBody}})
async def invoke(request: Invocation, raw: Request) -> Response:
    if isinstance(request, ChatRequest):
        return await create_chat_completion(request, raw)
    return await create_completion(request, raw)
