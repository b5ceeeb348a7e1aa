"""Which endpoints a model answers: its tasks decide. The others refuse with what the model can do and how to change it."""

from collections.abc import Callable, Sequence
from typing import NoReturn

from fastapi import APIRouter, Request

from quire.features.pooling.host import supported_tasks
from quire.serve.errors import HttpError
from quire.serve.pooling import classify, embed, score
from quire.serve.server import server_of

GENERATING = (
    "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens", "/invocations",
)  # fmt: skip
# router, its paths, the tasks of which it takes one, and what the server must be started with to have them
_ROUTERS: tuple[tuple[APIRouter, tuple[str, ...], tuple[str, ...], str], ...] = (
    (embed.embeddings_router, ("/v1/embeddings",), ("embed",), "embed"),
    (embed.cohere_router, ("/v2/embed", "/v1/embed"), ("embed",), "embed"),
    (score.score_router, score.SCORE_PATHS, ("score",), "embed"),
    (score.rerank_router, score.RERANK_PATHS, ("score",), "embed"),
    (classify.router, ("/classify",), ("classify",), "classify"),
    (embed.pooling_router, ("/pooling",), ("embed", "classify", "token_embed", "token_classify"), "embed"),
)
_PURPOSES = {"embed": "makes embeddings", "score": "scores pairs of texts", "classify": "classifies texts"}


def pooling_routers(tasks: Sequence[str]) -> list[APIRouter]:
    """Return the routers of a model with these tasks: endpoints that it answers, and refusals for the others."""
    routers = []
    for router, paths, wanted, convert in _ROUTERS:
        answers = any(task in tasks for task in wanted)
        routers.append(router if answers else _refusals(paths, _refuse_pooling(convert)))
    return routers


def generation_refusals() -> APIRouter:
    """Return a router for the endpoints that generate text, of a model that does not."""
    return _refusals(GENERATING, _refuse_generation)


def _refusals(paths: Sequence[str], why: Callable[[str, Sequence[str]], str]) -> APIRouter:
    router = APIRouter(include_in_schema=False)

    async def refuse(request: Request) -> NoReturn:
        server = server_of(request)
        path = request.scope["route"].path
        does = f"{path} is not available: the model `{server.names[0]}` {purpose(supported_tasks(server.llm.config))}"
        raise HttpError(400, f"{does}. {why(path, supported_tasks(server.llm.config))}", "model", own=(path, path))

    for path in paths:
        router.add_api_route(path, refuse, methods=["POST"], response_model=None)
    return router


def purpose(tasks: Sequence[str]) -> str:
    if "generate" in tasks:
        return "generates text"
    return next((words for task, words in _PURPOSES.items() if task in tasks), "returns a vector for each token")


def answered(tasks: Sequence[str]) -> str:
    """Return the paths that a model with these tasks answers."""
    paths = [paths[0] for _, paths, wanted, _ in _ROUTERS if any(task in tasks for task in wanted)]
    if "generate" in tasks:
        paths = ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", *paths]
    return ", ".join(paths)


def example_of(tasks: Sequence[str]) -> tuple[str, str]:
    """Return the path and the body of a request that a pooling model with these tasks answers."""
    if "embed" in tasks:
        return "/v1/embeddings", '{"input": "The capital of France is Paris."}'
    if "score" in tasks:
        return "/rerank", '{"query": "capital of France", "documents": ["Paris is a capital.", "Bread is baked."]}'
    if "classify" in tasks:
        return "/classify", '{"input": "The capital of France is Paris."}'
    return "/pooling", '{"input": "The capital of France is Paris."}'


def _refuse_pooling(convert: str) -> Callable[[str, Sequence[str]], str]:
    def why(path: str, tasks: Sequence[str]) -> str:  # noqa: ARG001
        remedy = f"To change that, start the server with --runner pooling --convert {convert}, or serve a model made for it"
        return f"It answers {answered(tasks)}. {remedy}"

    return why


def _refuse_generation(path: str, tasks: Sequence[str]) -> str:  # noqa: ARG001
    return f"It answers {answered(tasks)}. To generate text, serve a generative model, with --runner generate if it can do both"
