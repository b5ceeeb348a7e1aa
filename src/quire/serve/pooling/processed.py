"""/pooling with `data`: an IO processor makes the prompts and the answer (`features/pooling/io_processor.py`)."""

import asyncio
import dataclasses
from collections.abc import Mapping
from typing import Any, cast

import msgspec
import numpy as np
from fastapi import Request
from pydantic import BaseModel

from quire.serve.limits import refuse_more
from quire.serve.pooling.protocol import InputFields, PoolingRequest, ProcessedData
from quire.serve.pooling.work import MAX_INPUTS, collect, make_job, model_pooling
from quire.serve.server import Server
from quire.types.errors import EngineError, InvalidParameter
from quire.types.pooling import IO_PROCESSOR_TASK, PoolingParams, PoolingTask

# fields that say how `input` and `messages` become prompts, or values JSON: the IO processor does both
_OTHERS = frozenset(InputFields.model_fields) | {
    "truncate_prompt_tokens", "truncation_side", "cache_salt", "encoding_format", "embed_dtype", "endianness", "prompt_name",
}  # fmt: skip


async def process_data(server: Server, raw: Request, request: PoolingRequest, model: str) -> ProcessedData:
    processor = server.io_processor
    if processor is None:
        raise InvalidParameter("data requires a server with an IO processor (--io-processor-plugin). Send input", "data")
    if "data" not in request.model_fields_set:
        raise InvalidParameter("task=plugin requires data, which the IO processor reads. Send data", "data")
    if others := sorted(_OTHERS & request.model_fields_set - {"model"}):
        raise InvalidParameter(f"{others[0]} is not supported with data. Remove it", others[0])
    parsed, params = await asyncio.to_thread(processor.begin, request.data, _params(request))
    model_pooling(server).request(params)
    reader, extras = await server.prompts(request.model)
    job = make_job(server, raw, request, "pool", model, [], params, "data")
    prompts = await processor.pre_process_async(parsed, reader, extras, job.id)
    refuse_more("data", len(prompts), MAX_INPUTS, "prompts")
    names = [f"data (prompt {i})" for i in range(len(prompts))]
    results = await collect(server, dataclasses.replace(job, prompts=prompts, names=names))
    answer = await processor.post_process_async(results, parsed, job.id)
    try:
        encoded = await asyncio.to_thread(msgspec.json.encode, answer, enc_hook=_plain)
    except (TypeError, ValueError, RecursionError) as error:
        raise EngineError(f"the IO processor {processor.name!r} returned what is no JSON: {error}") from error
    data: Any = msgspec.Raw(encoded)
    return {"request_id": job.id, "created_at": job.created, "data": data}


def _params(request: PoolingRequest) -> PoolingParams | None:
    """Return the parameters that the request has; None: it has none."""
    task = cast(PoolingTask | None, None if request.task == IO_PROCESSOR_TASK else request.task)
    if all(value is None for value in (task, request.dimensions, request.normalize, request.use_activation)):
        return None
    return PoolingParams(
        task=task, dimensions=request.dimensions, normalize=request.normalize, use_activation=request.use_activation
    )


def _plain(value: Any) -> Any:
    """Return what msgspec encodes for a value of another library."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is no JSON")
