"""/api/embed and the older /api/embeddings."""

import time
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request, Response

from quire.serve.errors import json_response
from quire.serve.limits import refuse_more
from quire.serve.ollama.generation import ERRORS
from quire.serve.ollama.protocol import OllamaEmbeddingsRequest, OllamaEmbedRequest
from quire.serve.ollama.requests import OllamaRoute, check_request, find_model
from quire.serve.pooling.embed import encode
from quire.serve.pooling.protocol import EncodingFields, PoolingFields
from quire.serve.pooling.work import MAX_INPUTS, InputReader, Result, collect, make_job, many, model_pooling, usage_of
from quire.serve.server import Server, server_of
from quire.text.workers.wire import Cut
from quire.types.pooling import PoolingParams

router = APIRouter(route_class=OllamaRoute, tags=["Ollama"])
_FIELDS = PoolingFields.model_validate({})  # Ollama has none of them
_FLOATS = EncodingFields.model_validate({})
_TEXTS = {"images": "vectors are of texts only"}
_OF_EMBED = {"input": "it belongs to /api/embed", "dimensions": "it belongs to /api/embed", **_TEXTS}


@router.post("/api/embed", responses=ERRORS)
async def ollama_embed(request: OllamaEmbedRequest, raw: Request) -> Response:
    server, started = server_of(raw), time.monotonic_ns()
    model = await find_model(server, request)
    check_request(server, request, {"prompt": "its name here is input", **_TEXTS})
    texts = [request.input] if isinstance(request.input, str) and request.input else list(request.input or ())
    params = PoolingParams(task="embed", dimensions=request.dimensions or None, use_activation=True)
    model_pooling(server).request(params)
    results = await _pool(server, raw, model, texts, params, "input", request.truncate is not False)

    def show(i: int) -> Any:
        return encode(results[i].outputs.data, _FLOATS)

    return json_response(
        {
            "model": request.model or model,
            "embeddings": many(show, results, len(results)),
            "total_duration": time.monotonic_ns() - started,
            "load_duration": 0,
            "prompt_eval_count": usage_of(server, results)["prompt_tokens"],
        }
    )


@router.post("/api/embeddings", responses=ERRORS)
async def ollama_embeddings(request: OllamaEmbeddingsRequest, raw: Request) -> Response:
    """The older endpoint: one text, and a vector that is not normalized."""
    server = server_of(raw)
    model = await find_model(server, request)
    check_request(server, request, _OF_EMBED)
    params = PoolingParams(task="embed", use_activation=False)
    texts = [request.prompt] if request.prompt else []
    results = await _pool(server, raw, model, texts, params, "prompt", truncate=True)
    return json_response({"embedding": [value for result in results for value in result.outputs.data.tolist()]})


async def _pool(
    server: Server,
    raw: Request,
    model: str,
    texts: list[str],
    params: PoolingParams,
    parameter: str,
    truncate: bool,
) -> list[Result]:
    """Return the vectors of the texts; the end of a text that is too long is cut off, or it is an error."""
    if not texts:  # a request that only loads the model
        return []
    refuse_more(parameter, len(texts), MAX_INPUTS, "texts")
    reader = replace(await InputReader.of(server, model), shorten="send truncate=true")
    before = model_pooling(server).before(None)
    cut = Cut(reader.longest, reader.longest, True, *reader.special(True)) if truncate else Cut(reader.longest)
    prompts = await reader.texts(texts, cut, parameter, before=before)
    job = make_job(server, raw, _FIELDS, "embd", model, prompts, params, parameter)
    return await collect(server, job)
