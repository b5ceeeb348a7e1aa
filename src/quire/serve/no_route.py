"""Answers for paths and methods that this server does not have, and for vLLM endpoints of other kinds of models."""

from collections.abc import Sequence
from typing import NoReturn

from fastapi import APIRouter, FastAPI, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match
from starlette.types import Scope

from quire.serve.developer import BUILT, NOT_BUILT, SWITCH
from quire.serve.errors import HttpError, error_response
from quire.serve.server import server_of

THERE = "/v1/chat/completions, /v1/completions, /v1/responses, /v1/messages and /tokenize"
# paths that a server has only with a flag
OFF = {
    "/load": "--enable-server-load-tracking",
    "/tokenizer_info": "--enable-tokenizer-info-endpoint",
    **dict.fromkeys(BUILT, SWITCH),
}
_UNTOLD = {"HEAD", "OPTIONS"}


def install_no_route_handlers(app: FastAPI, routes: Sequence[BaseRoute]) -> None:
    async def answer(request: Request, error: Exception) -> Response:
        if not isinstance(error, HttpError):  # the framework's own
            error = no_route(request.scope, routes)
        return error_response(error, request.scope)

    for status in (404, 405):
        app.add_exception_handler(status, answer)


def no_route(scope: Scope, routes: Sequence[BaseRoute]) -> HttpError:
    """Why none of these is for this request: another path, or another method."""
    near = [route for route in routes if route.matches(scope)[0] is Match.PARTIAL]
    methods = sorted({method for route in near for method in getattr(route, "methods", None) or ()} - _UNTOLD)
    path = scope["path"].removeprefix(scope.get("root_path", ""))
    if not methods and path in NOT_BUILT:
        return HttpError(404, f"{path} is not available here: {NOT_BUILT[path]}", own=(path, path))
    if not methods and path in OFF:
        return HttpError(404, f"{path} is switched off here: start the server with {OFF[path]}")
    if not methods:
        return HttpError(404, f"there is no such path here. There are {THERE}")
    error = HttpError(405, f"{scope['method']} is not a method of this path; there is {' and '.join(methods)}")
    error.headers = {"Allow": ", ".join(methods)}
    return error


# ---- endpoints of vLLM for models of another kind

absent_router = APIRouter(include_in_schema=False)

_EMBEDS = "does not make embeddings"
_SCORES = "does not score or classify texts"
_LISTENS = "does not take audio"
ABSENT = {
    "/v1/embeddings": _EMBEDS, "/v2/embed": _EMBEDS, "/pooling": _EMBEDS,
    "/score": _SCORES, "/v1/score": _SCORES, "/rerank": _SCORES, "/v1/rerank": _SCORES, "/v2/rerank": _SCORES,
    "/classify": _SCORES,
    "/v1/audio/transcriptions": _LISTENS, "/v1/audio/translations": _LISTENS, "/v1/audio/speech": "does not speak",
}  # fmt: skip


async def refuse(request: Request) -> NoReturn:
    path = request.scope["route"].path
    name = server_of(request).names[0]
    why = f"the model `{name}` generates text and {ABSENT[path]}"
    raise HttpError(404, f"there is no {path} here: {why}. There are {THERE}", own=(path, path))


for _path in ABSENT:
    absent_router.add_api_route(_path, refuse, methods=["POST"], response_model=None)
