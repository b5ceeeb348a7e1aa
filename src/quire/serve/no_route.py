"""Paths and methods that are not there, in the words of all other errors."""

from collections.abc import Sequence

from fastapi import FastAPI, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match
from starlette.types import Scope

from quire.serve.developer import BUILT, NOT_BUILT, SWITCH
from quire.serve.errors import HttpError, error_response

THERE = "/v1/chat/completions, /v1/completions, /v1/responses, /v1/messages and /tokenize"
# paths that a server has only if it was told so
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
