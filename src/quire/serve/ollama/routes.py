"""Which endpoints of Ollama's API a model answers. Those of other models and those that manage files refuse, with a remedy."""

from collections.abc import Sequence
from typing import NoReturn

from fastapi import APIRouter, Request

from quire.features.pooling.host import supported_tasks
from quire.serve.errors import HttpError
from quire.serve.ollama import embed, generation, models
from quire.serve.pooling.routes import answered, purpose
from quire.serve.server import server_of

_GENERATING, _EMBEDDING = ("/api/chat", "/api/generate"), ("/api/embed", "/api/embeddings")
_SERVES = "this server serves the model that it was started with"
_BLOBS = "files are not uploaded over HTTP. Start `quire serve` with their path"
_MANAGING = (
    ("POST", "/api/pull", f"{_SERVES}. Fetch others with `quire pull MODEL`, and start `quire serve MODEL`"),
    ("POST", "/api/create", f"{_SERVES}. Start `quire serve` with a path, or `--lora-modules NAME=PATH` for adapters"),
    ("POST", "/api/copy", f"{_SERVES}. Give it other names with --served-model-name"),
    ("POST", "/api/push", f"{_SERVES}, and uploads none. Upload it with the tools of the hub"),
    ("DELETE", "/api/delete", f"{_SERVES}. Remove a model's files with `quire rm NAME`"),
    ("POST", "/api/blobs/{digest}", _BLOBS),
    ("HEAD", "/api/blobs/{digest}", _BLOBS),
)


def ollama_routers(tasks: Sequence[str]) -> list[APIRouter]:
    """Return the routers of a model with these tasks."""
    return [
        models.router,
        models.show_router,
        generation.router if "generate" in tasks else _other_model(_GENERATING),
        embed.router if "embed" in tasks else _other_model(_EMBEDDING),
        _management(),
    ]


def _other_model(paths: Sequence[str]) -> APIRouter:
    """Return a router that refuses the endpoints of models of another kind."""
    router = APIRouter(include_in_schema=False)

    async def refuse(request: Request) -> NoReturn:
        server, path = server_of(request), request.scope["route"].path
        tasks = supported_tasks(server.llm.config)
        does = f"{path} is not available: the model `{server.names[0]}` {purpose(tasks)}"
        if path in _EMBEDDING:
            remedy = "To change that, start the server with --runner pooling --convert embed, or serve an embedding model"
        else:
            remedy = "To generate text, serve a generative model, with --runner generate if it can do both"
        here = _GENERATING if "generate" in tasks else _EMBEDDING if "embed" in tasks else ()
        raise HttpError(400, f"{does}. It answers {', '.join([*here, answered(tasks)])}. {remedy}", own=(path, path))

    for path in paths:
        router.add_api_route(path, refuse, methods=["POST"], response_model=None)
    return router


def _management() -> APIRouter:
    router = APIRouter(include_in_schema=False)

    def add(method: str, path: str, why: str) -> None:
        async def refuse() -> NoReturn:
            raise HttpError(400, f"{path} is not available: {why}", own=(path, path))

        router.add_api_route(path, refuse, methods=[method], response_model=None)

    for method, path, why in _MANAGING:
        add(method, path, why)
    return router
