"""Endpoints of vLLM for models of another kind: asked for one, the server says what its model does instead."""

from typing import NoReturn

from fastapi import APIRouter, Request

from quire.serve.errors import HttpError
from quire.serve.no_route import THERE
from quire.serve.server import server_of

router = APIRouter(include_in_schema=False)

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
    router.add_api_route(_path, refuse, methods=["POST"], response_model=None)
