"""The served model and its tokenizer: /v1/models, /tokenize, /detokenize and /tokenizer_info."""

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import Discriminator, Tag
from typing_extensions import TypedDict

from quire.features.lora.client import NamedAdapter
from quire.features.media.host import modalities_of
from quire.features.pooling.host import supported_tasks
from quire.serve.body import JSONRoute
from quire.serve.errors import ErrorBody, HttpError, json_response
from quire.serve.inputs import render_messages
from quire.serve.limits import refuse_more
from quire.serve.protocol import (
    DetokenizeAnswer,
    DetokenizeRequest,
    TokenizeAnswer,
    TokenizeChatRequest,
    TokenizeTextRequest,
)
from quire.serve.server import Server, server_of
from quire.serve.tools import read_tool_use
from quire.text.pacing import LazyList
from quire.text.workers.wire import Cut
from quire.types.errors import RequestError


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
    supported_tasks: list[str]
    input_modalities: list[str]
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
        "supported_tasks": list(supported_tasks(server.llm.config)),
        "input_modalities": ["text", *modalities_of(server.llm.config)],
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


# ---- /tokenize, /detokenize, /tokenizer_info

tokens_router = APIRouter(route_class=JSONRoute, tags=["tokens"])
info_router = APIRouter(tags=["tokens"])  # only if it is asked for


def _kind(body: Any) -> str | None:
    if not isinstance(body, dict):
        return "prompt"
    return next((name for name in ("messages", "prompt") if name in body), None)


TokenizeRequest = Annotated[
    Annotated[TokenizeTextRequest, Tag("prompt")] | Annotated[TokenizeChatRequest, Tag("messages")],
    Discriminator(_kind, custom_error_type="no_text", custom_error_message="give a prompt or messages"),
]


@tokens_router.post("/tokenize", responses={200: {"model": TokenizeAnswer}, 400: {"model": ErrorBody}})
async def tokenize(request: TokenizeRequest, raw: Request) -> Response:
    server = server_of(raw)
    ids = await _encode(server, request)
    tokenizer = (await server.prompts(request.model))[0].tokenizer
    answer: dict[str, Any] = {
        "count": len(ids),
        "max_model_len": server.llm.max_model_len,
        "tokens": ids,
        "token_strs": LazyList(map(tokenizer.token, ids)) if request.return_token_strs and tokenizer is not None else None,
    }
    return json_response(answer)


async def _encode(server: Server, request: TokenizeTextRequest | TokenizeChatRequest) -> list[int]:
    await server.check(request)
    if isinstance(request, TokenizeChatRequest):
        read_tool_use(request.tools, "none", None)
        cut = Cut(server.limits.prompt_tokens)
        return (await render_messages(server, request, request.messages, request.documents, request.tools, cut=cut)).ids
    refuse_more("prompt", len(request.prompt), server.limits.prompt_characters, "characters")
    prompts, _ = await server.prompts(request.model)
    prompts.refuse_hopeless(len(request.prompt), "prompt")
    cut = Cut(server.limits.prompt_tokens)
    return (await prompts.encode(request.prompt, request.add_special_tokens, cut, "prompt")).ids


@tokens_router.post("/detokenize", responses={200: {"model": DetokenizeAnswer}, 400: {"model": ErrorBody}})
async def detokenize(request: DetokenizeRequest, raw: Request) -> Response:
    server = server_of(raw)
    await server.check(request)
    refuse_more("tokens", len(request.tokens), server.limits.detokenize_tokens, "token ids")
    if server.llm.tokenizer is None:
        raise RequestError("there is no tokenizer: the server was started with skip_tokenizer_init")
    prompts, _ = await server.prompts(request.model)
    answer: DetokenizeAnswer = {"prompt": await prompts.decode(request.tokens, request.skip_special_tokens)}
    return json_response(answer)


@info_router.get("/tokenizer_info", responses={404: {"model": ErrorBody}})
async def tokenizer_info(raw: Request) -> Response:
    """Return the fields of tokenizer_config.json without file names, and the chat template in use."""
    tokenizer = server_of(raw).llm.tokenizer
    if tokenizer is None:
        raise HttpError(404, "there is no tokenizer: the server was started with skip_tokenizer_init")
    info = {name: value for name, value in tokenizer.init_kwargs.items() if not name.endswith(("_file", "name_or_path"))}
    info.setdefault("tokenizer_class", type(tokenizer).__name__)
    template = tokenizer.chat_template
    return json_response(info | ({} if template is None else {"chat_template": template}))
