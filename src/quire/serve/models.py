"""/v1/models: the model names that this server serves."""

from typing import Literal

from fastapi import APIRouter, Request, Response
from typing_extensions import TypedDict

from quire.features.lora.names import NamedAdapter
from quire.serve.errors import ErrorBody, json_response
from quire.serve.server import Server, server_of


class Permission(TypedDict):
    id: str
    object: Literal["model_permission"]
    created: int
    allow_create_engine: bool
    allow_sampling: bool
    allow_logprobs: bool
    allow_search_indices: bool
    allow_view: bool
    allow_fine_tuning: bool
    organization: str
    group: str | None
    is_blocking: bool


class ModelCard(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int
    permission: list[Permission]


class ModelList(TypedDict):
    object: Literal["list"]
    data: list[ModelCard]


router = APIRouter(tags=["OpenAI"])


@router.get("/v1/models", responses={200: {"model": ModelList}})
async def list_models(raw: Request) -> Response:
    server = server_of(raw)
    cards = [_card(server, name) for name in server.names]
    cards += [_adapter_card(server, adapter) for adapter in server.adapters.all]
    models: ModelList = {"object": "list", "data": cards}
    return json_response(models)


@router.get("/v1/models/{model:path}", responses={200: {"model": ModelCard}, 404: {"model": ErrorBody}})
async def show_model(model: str, raw: Request) -> Response:
    server = server_of(raw)
    adapter = None if model in server.names else server.adapters.get(model)
    if adapter is not None:
        return json_response(_adapter_card(server, adapter))
    if model not in server.names:
        raise server.no_such_model(model)
    return json_response(_card(server, model))


def _adapter_card(server: Server, adapter: NamedAdapter) -> ModelCard:
    """As vLLM's: the root is where the adapter is, the parent the model that it adds to."""
    card = _card(server, adapter.name)
    parent = adapter.base_model_name or server.names[0]
    return {**card, "created": adapter.created, "root": adapter.ref.path, "parent": parent}


def _card(server: Server, name: str) -> ModelCard:
    return {
        "id": name,
        "object": "model",
        "created": server.started,
        "owned_by": "quire",
        "root": server.llm.config.args.model,
        "parent": None,
        "max_model_len": server.llm.max_model_len,
        "permission": [
            {
                "id": f"modelperm-{name}",
                "object": "model_permission",
                "created": server.started,
                "allow_create_engine": False,
                "allow_sampling": True,
                "allow_logprobs": True,
                "allow_search_indices": False,
                "allow_view": True,
                "allow_fine_tuning": False,
                "organization": "*",
                "group": None,
                "is_blocking": False,
            }
        ],
    }
