"""vLLM's routes for developers: those that are built, behind an environment variable, and the reason for each of the others."""

import os
from typing import Annotated, Any

from fastapi import APIRouter, Body, Request, Response

from quire.serve.errors import HttpError, json_response
from quire.serve.server import server_of

DEVELOPER_VARIABLES = ("QUIRE_SERVER_DEV_MODE", "VLLM_SERVER_DEV_MODE")
SWITCH = f"{DEVELOPER_VARIABLES[0]}=1 in its environment"
BUILT = ("/server_info", "/reset_prefix_cache", "/collective_rpc", "/get_world_size")  # the first is in `about`

_SLEEP = "weights and cache stay on the device while the server runs"
_PAUSE = "generation cannot be paused; end single requests by closing their connection"
_WEIGHTS = "weights are read at the start only; start a new server, or load a LoRA adapter"
_MEDIA = "only text is served, so there is no such cache"
_PROFILE = "there is no profiler; see docs/performance.md and --otlp-traces-endpoint"
_SCALE = "the number of engines is fixed at the start (--data-parallel-size)"
_TOKENS = "send token ids as the prompt of /v1/completions, and ask for return_token_ids"
_RENDER = "POST /tokenize renders and tokenizes messages"
NOT_BUILT = {
    **dict.fromkeys(("/sleep", "/wake_up", "/is_sleeping"), _SLEEP),
    **dict.fromkeys(("/pause", "/resume", "/is_paused", "/abort_requests"), _PAUSE),
    **dict.fromkeys(("/init_weight_transfer_engine", "/start_weight_update", "/start_draft_weight_update", "/update_weights",
                     "/finish_weight_update", "/update_weight_version", "/weight_info"), _WEIGHTS),
    **dict.fromkeys(("/reset_mm_cache", "/reset_encoder_cache"), _MEDIA),
    **dict.fromkeys(("/start_profile", "/stop_profile"), _PROFILE),
    **dict.fromkeys(("/scale_elastic_ep", "/is_scaling_elastic_ep"), _SCALE),
    **dict.fromkeys(("/fault_tolerance/apply", "/fault_tolerance/status"), "lost engines are restarted without being asked"),
    **dict.fromkeys(("/inference/v1/generate",), _TOKENS),
    **dict.fromkeys(("/v1/completions/render", "/v1/chat/completions/render"), _RENDER),
    **dict.fromkeys(("/v1/completions/derender", "/v1/chat/completions/derender"), "POST /detokenize returns text"),
    "/v1/chat/completions/batch": "send one request per conversation; the server batches them",
    "/generative_scoring": "ask /v1/completions for the logprobs of the labels",
    "/cohere/v2/chat": "use /v1/chat/completions",
    "/v1/realtime": "audio is not supported",
}  # fmt: skip

router = APIRouter(include_in_schema=False)


def developing() -> bool:
    return any(os.environ.get(name, "") not in ("", "0") for name in DEVELOPER_VARIABLES)


@router.post("/reset_prefix_cache")
async def reset_prefix_cache(raw: Request, reset_running_requests: bool = False, reset_external: bool = False) -> Response:
    done = await server_of(raw).llm.reset_prefix_cache(reset_running_requests, reset_external)
    return json_response({"success": done})


@router.post("/collective_rpc")
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


@router.get("/get_world_size")
async def get_world_size(raw: Request) -> Response:
    return json_response({"world_size": server_of(raw).llm.config.world})
