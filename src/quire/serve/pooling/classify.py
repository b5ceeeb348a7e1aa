"""/classify: the class of a text, with the probabilities of all classes."""

from typing import Any

from fastapi import APIRouter, Request, Response

from quire.serve.body import JSONRoute
from quire.serve.errors import ErrorBody
from quire.serve.pooling.protocol import ClassificationList, ClassifyRequest
from quire.serve.pooling.work import collect, list_answer, make_job, model_pooling, read_inputs
from quire.serve.server import server_of
from quire.types.pooling import PoolingParams

router = APIRouter(route_class=JSONRoute, tags=["pooling"])


@router.post("/classify", responses={200: {"model": ClassificationList}, 400: {"model": ErrorBody}, 404: {"model": ErrorBody}})
async def classify(request: ClassifyRequest, raw: Request) -> Response:
    server = server_of(raw)
    model = await server.check(request)
    params = PoolingParams(task="classify", use_activation=request.use_activation)
    job = make_job(server, raw, request, "classify", model, await read_inputs(server, request), params)
    results = await collect(server, job)
    labels = model_pooling(server).labels

    def show(i: int) -> dict[str, Any]:
        probs = results[i].outputs.data.reshape(-1)
        label = labels[int(probs.argmax())] if labels else None
        return {"index": i, "label": label, "probs": probs.tolist(), "num_classes": len(probs)}

    return list_answer(server, job, results, show, len(results))
