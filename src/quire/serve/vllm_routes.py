"""vLLM's routes outside of the protocols: those for developers, and the errors for those that this server does not have."""

import os
from collections.abc import Sequence
from typing import Annotated, Any, NoReturn

from fastapi import APIRouter, Body, FastAPI, Request, Response
from starlette.routing import BaseRoute, Match
from starlette.types import Scope

from quire.features.pooling.host import supported_tasks
from quire.features.profiling.host import REMEDY
from quire.serve.errors import HttpError, error_response, json_response
from quire.serve.pooling.routes import answered, purpose
from quire.serve.server import server_of

DEVELOPER_VARIABLES = ("QUIRE_SERVER_DEV_MODE", "VLLM_SERVER_DEV_MODE")
SWITCH = f"{DEVELOPER_VARIABLES[0]}=1 in its environment"
BUILT = (
    "/server_info",
    "/reset_prefix_cache",
    "/reset_mm_cache",
    "/collective_rpc",
    "/get_world_size",
    "/inference/v1/generate",
    "/abort_requests",
)  # the first is in `about`

_SLEEP = "weights and cache stay on the device while the server runs"
_PAUSE = "generation cannot be paused; end single requests by closing their connection"
_WEIGHTS = "weights are read at the start only; start a new server, or load a LoRA adapter"
_ENCODER = "it is addressed by the content of images and videos, and weights do not change while the server runs"
_SCALE = "the number of engines is fixed at the start (--data-parallel-size)"
_RENDER = "POST /tokenize renders and tokenizes messages"
NOT_BUILT = {
    **dict.fromkeys(("/sleep", "/wake_up", "/is_sleeping"), _SLEEP),
    **dict.fromkeys(("/pause", "/resume", "/is_paused"), _PAUSE),
    **dict.fromkeys(("/init_weight_transfer_engine", "/start_weight_update", "/start_draft_weight_update", "/update_weights",
                     "/finish_weight_update", "/update_weight_version", "/weight_info"), _WEIGHTS),
    "/reset_encoder_cache": _ENCODER,
    **dict.fromkeys(("/scale_elastic_ep", "/is_scaling_elastic_ep"), _SCALE),
    **dict.fromkeys(("/fault_tolerance/apply", "/fault_tolerance/status"), "lost engines are restarted automatically"),
    **dict.fromkeys(("/v1/completions/render", "/v1/chat/completions/render"), _RENDER),
    **dict.fromkeys(("/v1/completions/derender", "/v1/chat/completions/derender"), "POST /detokenize returns text"),
    "/v1/chat/completions/batch": "send one request per conversation; the server batches them",
    "/generative_scoring": "ask /v1/completions for the logprobs of the labels",
    "/cohere/v2/chat": "use /v1/chat/completions",
    "/v1/realtime": "audio is not supported",
}  # fmt: skip

# paths that a server has only with a flag
OFF = {
    "/load": "--enable-server-load-tracking",
    "/tokenizer_info": "--enable-tokenizer-info-endpoint",
    **dict.fromkeys(("/start_profile", "/stop_profile"), REMEDY),
    **dict.fromkeys(BUILT, SWITCH),
}
_UNLISTED_METHODS = {"HEAD", "OPTIONS"}


def install_no_route_handlers(app: FastAPI, routes: Sequence[BaseRoute], answered: str) -> None:
    """`answered`: the paths that errors suggest."""

    async def answer(request: Request, error: Exception) -> Response:
        answered_404 = "endpoint" in request.scope and getattr(error, "status_code", 0) == 404  # by a plug-in's endpoint
        if not isinstance(error, HttpError) and not answered_404:  # the framework's own
            error = no_route(request.scope, routes, answered)
        return error_response(error, request.scope)

    for status in (404, 405):
        app.add_exception_handler(status, answer)


def no_route(scope: Scope, routes: Sequence[BaseRoute], answered: str = "") -> HttpError:
    """Why none of these is for this request: another path, or another method."""
    near = [route for route in routes if route.matches(scope)[0] is Match.PARTIAL]
    methods = sorted({method for route in near for method in getattr(route, "methods", None) or ()} - _UNLISTED_METHODS)
    path = scope["path"].removeprefix(scope.get("root_path", ""))
    if not methods and path in NOT_BUILT:
        return HttpError(404, f"{path} is not available here: {NOT_BUILT[path]}", own=(path, path))
    if not methods and path in OFF:
        return HttpError(404, f"{path} is switched off here: start the server with {OFF[path]}", own=(path, path))
    if not methods:
        return HttpError(404, f"there is no such path here. There are {answered} and /tokenize")
    error = HttpError(405, f"{scope['method']} is not a method of this path; there is {' and '.join(methods)}")
    error.headers = {"Allow": ", ".join(methods)}
    return error


# ---- endpoints of vLLM for models of another kind

absent_router = APIRouter(include_in_schema=False)

_LISTENS = "does not take audio"
ABSENT = {
    "/v1/audio/transcriptions": _LISTENS, "/v1/audio/translations": _LISTENS, "/v1/audio/speech": "does not make speech",
}  # fmt: skip


async def refuse(request: Request) -> NoReturn:
    path = request.scope["route"].path
    server = server_of(request)
    tasks = supported_tasks(server.llm.config)
    why = f"the model `{server.names[0]}` {purpose(tasks)} and {ABSENT[path]}"
    raise HttpError(404, f"there is no {path} here: {why}. There are {answered(tasks)} and /tokenize", own=(path, path))


for _path in ABSENT:
    absent_router.add_api_route(_path, refuse, methods=["POST"], response_model=None)


# ---- routes for developers

developer_router = APIRouter(include_in_schema=False)


def developing() -> bool:
    return any(os.environ.get(name, "") not in ("", "0") for name in DEVELOPER_VARIABLES)


@developer_router.post("/reset_prefix_cache")
async def reset_prefix_cache(raw: Request, reset_running_requests: bool = False, reset_external: bool = False) -> Response:
    done = await server_of(raw).llm.reset_prefix_cache(reset_running_requests, reset_external)
    return json_response({"success": done})


@developer_router.post("/reset_mm_cache")
async def reset_mm_cache(raw: Request) -> Response:
    """Forget the images and videos that this API process has processed."""
    await server_of(raw).llm.reset_mm_cache()
    return json_response({"success": True})


@developer_router.post("/collective_rpc")
async def collective_rpc(
    raw: Request,
    method: Annotated[str, Body()],
    args: Annotated[list[Any] | None, Body()] = None,
    kwargs: Annotated[dict[str, Any] | None, Body()] = None,
    timeout: Annotated[float | None, Body(gt=0)] = None,
) -> Response:
    try:
        results = await server_of(raw).llm.collective_rpc(method, timeout, args or (), kwargs)
    except TimeoutError:
        raise HttpError(408, f"the ranks did not answer within {timeout} s; raise timeout", "timeout") from None
    return json_response({"results": results})


@developer_router.get("/get_world_size")
async def get_world_size(raw: Request, include_dp: bool = True) -> Response:
    """Return the number of ranks of all engines, or of one."""
    config = server_of(raw).llm.config
    return json_response({"world_size": config.world * (config.args.data_parallel_size if include_dp else 1)})


# ---- profiles, with --profiler-config

profile_router = APIRouter(include_in_schema=False)


@profile_router.post("/start_profile")
async def start_profile(raw: Request) -> Response:
    await server_of(raw).llm.start_profile()
    return json_response({"success": True})


@profile_router.post("/stop_profile")
async def stop_profile(raw: Request) -> Response:
    """Answer with the traces of all ranks, which are files on the machines of the engines."""
    return json_response({"success": True, "files": await server_of(raw).llm.stop_profile()})
