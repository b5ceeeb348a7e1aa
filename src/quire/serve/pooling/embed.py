"""/v1/embeddings (OpenAI), /v1/embed and /v2/embed (Cohere) and /pooling: vectors of texts."""

import base64
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from fastapi import APIRouter, Request, Response

from quire.features.pooling.host import ModelPooling, Role
from quire.serve.body import JSONRoute
from quire.serve.errors import ErrorBody, json_response
from quire.serve.limits import refuse_more
from quire.serve.pooling.processed import process_data
from quire.serve.pooling.protocol import (
    CohereEmbedRequest,
    EmbeddingList,
    EmbeddingRequest,
    EncodingFields,
    PooledList,
    PoolingRequest,
    ProcessedData,
)
from quire.serve.pooling.work import (
    FEW_VALUES,
    MAX_INPUTS,
    InputReader,
    collect,
    entry,
    list_answer,
    make_job,
    model_pooling,
    read_inputs,
    usage_of,
)
from quire.serve.server import server_of
from quire.text.pacing import LazyList
from quire.text.workers.wire import Cut
from quire.types.errors import InvalidParameter, NotSupported
from quire.types.plan import Floats
from quire.types.pooling import IO_PROCESSOR_TASK, PoolingParams

embeddings_router = APIRouter(route_class=JSONRoute, tags=["OpenAI"])
pooling_router = APIRouter(route_class=JSONRoute, tags=["pooling"])
cohere_router = APIRouter(route_class=JSONRoute, tags=["Cohere"])
_ERRORS: dict[int | str, dict[str, Any]] = {400: {"model": ErrorBody}, 404: {"model": ErrorBody}}


# ---- vectors in JSON

_TYPES = {"float32": "f4", "float16": "f2"}
_ORDERS = {"native": "<" if sys.byteorder == "little" else ">", "little": "<", "big": ">"}


def encode(values: Floats, form: EncodingFields) -> Any:
    """Return a vector, or several, as the request wants them: lists of numbers, or base64."""
    if form.encoding_format == "float":  # written here: to weigh each value of a list costs more than to encode it
        return msgspec.Raw(msgspec.json.encode(values.tolist())) if values.size <= FEW_VALUES else values.tolist()
    order = _ORDERS[form.endianness]
    if form.embed_dtype == "bfloat16":
        return _base64(_bfloat16(values).astype(f"{order}u2"))
    with np.errstate(over="ignore"):
        stored = values.astype(order + _TYPES[form.embed_dtype])
    if not np.isfinite(stored).all():
        raise InvalidParameter(
            "embed_dtype=float16 cannot hold values above 65,504, which this vector has. Send float32", "embed_dtype"
        )
    return _base64(stored)


def _bfloat16(values: Floats) -> npt.NDArray[np.uint16]:
    """The upper halves of float32, rounded to the nearest, to the even one of two."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _base64(values: npt.NDArray[Any]) -> str:
    return base64.b64encode(values.tobytes()).decode("ascii")


# ---- /v1/embeddings, /pooling


@embeddings_router.post("/v1/embeddings", responses={200: {"model": EmbeddingList}, **_ERRORS})
async def create_embeddings(request: EmbeddingRequest, raw: Request) -> Response:
    model = await server_of(raw).check(request)
    return await _pool(request, raw, model, "embed", "embd", "embedding", "embedding")


@pooling_router.post("/pooling", responses={200: {"model": PooledList | ProcessedData}, **_ERRORS})
async def pool(request: PoolingRequest, raw: Request) -> Response:
    server = server_of(raw)
    model = await server.check(request)
    if "data" in request.model_fields_set or request.task == IO_PROCESSOR_TASK:
        return json_response(await process_data(server, raw, request, model))
    return await _pool(request, raw, model, request.task, "pool", "pooling", "data")


async def _pool(
    request: EmbeddingRequest | PoolingRequest, raw: Request, model: str, task: Any, prefix: str, kind: str, field: str
) -> Response:
    """prefix: of the answer's id. kind: `object` of each entry. field: of an entry, with its values."""
    server = server_of(raw)
    params = PoolingParams(
        task=task, dimensions=request.dimensions, normalize=request.normalize, use_activation=request.use_activation
    )
    model_pooling(server).request(params)
    job = make_job(server, raw, request, prefix, model, await read_inputs(server, request), params)
    results = await collect(server, job)

    def show(i: int) -> dict[str, Any]:
        return {"index": i, "object": kind, field: encode(results[i].outputs.data, request)}

    return list_answer(server, job, results, show, len(results))


# ---- /v1/embed, /v2/embed

INPUT_TYPES = ("search_document", "search_query", "classification", "clustering", "image")
_ROLES: dict[str, Role] = {"search_query": "query", "search_document": "document"}


@cohere_router.post("/v1/embed", responses=_ERRORS)
@cohere_router.post("/v2/embed", responses=_ERRORS)
async def embed_for_cohere(request: CohereEmbedRequest, raw: Request) -> Response:
    server = server_of(raw)
    model = await server.check(request)
    texts, parameter = _texts_of(request)
    params = PoolingParams(task="embed", dimensions=request.output_dimension)
    try:
        model_pooling(server).request(params)
    except InvalidParameter as error:
        raise InvalidParameter(str(error).replace("dimensions", "output_dimension", 1), "output_dimension") from None
    before = _prompt_of(model_pooling(server), request.input_type)
    reader = replace(await InputReader.of(server, request.model), shorten="send truncate=END")
    special = reader.special(True)
    keep = reader.longest
    if request.max_tokens is not None:
        keep = reader.kept(request.max_tokens, "max_tokens", sum(special))
    cut = (
        Cut(reader.longest) if request.truncate == "NONE" else Cut(reader.longest, keep, request.truncate != "START", *special)
    )
    prompts = await reader.texts(texts, cut, parameter, before=before)
    if request.truncate == "NONE" and any(len(one.ids) > keep for one in prompts):
        i = next(i for i, one in enumerate(prompts) if len(one.ids) > keep)
        name = entry(parameter, i, len(prompts))
        raise InvalidParameter(f"{name} has more than max_tokens={keep} tokens. Shorten it, or {reader.shorten}", parameter)
    job = make_job(server, raw, request, "embd", model, prompts, params, parameter)
    results = await collect(server, job)
    vectors = [result.outputs.data for result in results]
    tokens = usage_of(server, results)["prompt_tokens"]
    version = raw.scope["route"].path.split("/")[1].removeprefix("v")
    by_type = request.embedding_types is not None or version == "2"
    found = {kind: _as_type(kind, vectors) for kind in dict.fromkeys(request.embedding_types or ["float"])}
    return json_response(
        {
            "id": job.id,
            "response_type": "embeddings_by_type" if by_type else "embeddings_floats",
            "embeddings": found if by_type else found["float"],
            "texts": texts,
            "meta": {
                "api_version": {"version": version},
                "billed_units": {"input_tokens": tokens},
                "tokens": {"input_tokens": tokens},
            },
        }
    )


def _texts_of(request: CohereEmbedRequest) -> tuple[list[str], str]:
    """Return the texts, and the field that they came in."""
    if request.images:
        raise NotSupported("images cannot be used: this model takes text only. Send texts", "images")
    if request.texts is not None and request.inputs is not None:
        raise InvalidParameter("texts and inputs were both sent: leave one out", "inputs")
    if request.inputs is not None:
        refuse_more("inputs", len(request.inputs), MAX_INPUTS, "inputs")
        parts = [part for one in request.inputs for part in one.content]
        other = next((part.type for part in parts if part.type != "text"), None)
        if other is not None:
            raise NotSupported(f"inputs: this model takes text only, not a part of type {other!r:.80}", "inputs")
        texts, parameter = [" ".join(part.text or "" for part in one.content) for one in request.inputs], "inputs"
    else:
        texts, parameter = request.texts or [], "texts"
        refuse_more("texts", len(texts), MAX_INPUTS, "texts")
    if not texts:
        raise InvalidParameter(f"{parameter} is empty: send at least one text", parameter)
    return texts, parameter


def _prompt_of(pooling: ModelPooling, input_type: str | None) -> str:
    """Return what the model's files put before texts of this type. Models without prompts embed all types alike."""
    prompts = {} if pooling.files is None else pooling.files.prompts
    if input_type is None or input_type in prompts:
        return pooling.before(input_type)
    if input_type in _ROLES:
        return pooling.before_role(_ROLES[input_type])
    if input_type not in INPUT_TYPES:
        known = ", ".join(dict.fromkeys((*INPUT_TYPES[:-1], *prompts)))
        raise InvalidParameter(f"input_type must be one of {known}; got {input_type!r:.80}", "input_type")
    if input_type == "image":
        raise NotSupported("input_type=image cannot be used: this model takes text only", "input_type")
    return ""


def _as_type(kind: str, vectors: Sequence[Floats]) -> Any:
    if kind == "float":
        return LazyList(vector.tolist() for vector in vectors)
    if kind == "base64":
        return [_base64(vector.astype("<f4")) for vector in vectors]
    bits = [np.packbits(vector >= 0) for vector in vectors]  # the first value is the highest bit
    if kind == "binary":  # signed: offset by 128
        return [(one.astype(np.int16) - 128).tolist() for one in bits]
    return [one.tolist() for one in bits]
