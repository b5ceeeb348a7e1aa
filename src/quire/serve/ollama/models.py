"""What Ollama's API says about models: /api/tags, /api/ps, /api/show and /api/version."""

import asyncio
import functools
from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any

from fastapi import APIRouter, Request, Response

from quire import __version__
from quire.config.facts import ModelFacts, count_heads
from quire.features.pooling.host import supported_tasks
from quire.files.gguf import GGML_TYPES, read_gguf
from quire.files.resolve import ModelFiles
from quire.serve.errors import json_response
from quire.serve.field_table import check_fields
from quire.serve.ollama.generation import ERRORS
from quire.serve.ollama.protocol import OllamaShowRequest, Options
from quire.serve.ollama.requests import OllamaRoute, find_model, full_name
from quire.serve.server import Server, files_digest, server_of
from quire.types.errors import ModelError

API_VERSION = "0.13.0"  # of Ollama whose API this is; clients require a minimum
NEVER = "9999-12-31T23:59:59Z"
_UNITS = ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "K"))
_DTYPES = {"float16": "F16", "bfloat16": "BF16", "float32": "F32"}
_PARAMETERS = {"repetition_penalty": "repeat_penalty", "max_tokens": "num_predict"}

router = APIRouter(tags=["Ollama"])
show_router = APIRouter(route_class=OllamaRoute, tags=["Ollama"])


@router.get("/api/version")
async def ollama_version() -> Response:
    return json_response({"version": API_VERSION, "quire_version": __version__})


@router.get("/api/tags")
async def ollama_tags(raw: Request) -> Response:
    return json_response({"models": await _models(server_of(raw))})


@router.get("/api/ps")
async def ollama_ps(raw: Request) -> Response:
    """All models are loaded, and stay so. Their size is that of their files."""
    server = server_of(raw)
    on_gpu = server.llm.config.device != "cpu"
    more = {"expires_at": NEVER, "context_length": server.llm.max_model_len}
    shown = [model | more | {"size_vram": model["size"] if on_gpu else 0} for model in await _models(server)]
    return json_response({"models": shown})


@show_router.post("/api/show", responses=ERRORS)
async def ollama_show(request: OllamaShowRequest, raw: Request) -> Response:
    server = server_of(raw)
    if request.model is None:
        request.model = request.name
    name = await find_model(server, request)
    if unknown := check_fields(request):
        server.unknown_fields.log(request, unknown)
    cards = {card["name"]: card for card in await _models(server)}
    card = cards.get(full_name(name), cards[full_name(server.names[0])])
    tokenizer = (await server.prompts(name))[0].tokenizer
    template = tokenizer.chat_template if tokenizer is not None and server.settings.enable_tokenizer_info_endpoint else None
    return json_response(
        {
            "license": "",
            "modelfile": f"FROM {full_name(name)}",
            "parameters": _parameters(server.llm.default_sampling),
            "template": template or "",
            "details": card["details"],
            "model_info": _info(server),
            "capabilities": _capabilities(server, tokenizer is not None and tokenizer.chat_template is not None),
            "modified_at": card["modified_at"],
        }
    )


async def _models(server: Server) -> list[dict[str, Any]]:
    """Return the list entries of the model, under each of its names, and of the adapters."""
    facts = server.llm.config.facts
    modified, weights, digests = await asyncio.to_thread(_about_files, facts.files)
    details = {
        "parent_model": "",
        "format": "gguf" if facts.files.format == "gguf" else "safetensors",
        "family": _family(facts),
        "families": [_family(facts)],
        "parameter_size": _parameter_size(facts.parameters),
        "quantization_level": weights or _weight_type(facts),
    }
    digest = _digest(*sorted(digests.items()))

    def entry(name: str, modified: float, digest: str, parent: str = "") -> dict[str, Any]:
        return {
            "name": full_name(name),
            "model": full_name(name),
            "modified_at": datetime.fromtimestamp(modified, UTC).isoformat().replace("+00:00", "Z"),
            "size": facts.weight_bytes,
            "digest": digest,
            "details": {**details, "parent_model": parent},
        }

    adapters = [
        entry(one.name, one.created, _digest(digest, one.name, one.created), full_name(one.base_model_name or server.names[0]))
        for one in server.adapters.all
    ]
    return [*(entry(name, modified, digest) for name in server.names), *adapters]


def _digest(*parts: Any) -> str:
    return sha256(repr(parts).encode()).hexdigest()


@functools.cache
def _about_files(files: ModelFiles) -> tuple[float, str, Mapping[str, str]]:
    """Return when the weights were written, the most frequent type of a GGUF file's matrices, and digests of the files."""
    digests = files_digest(files)
    try:
        modified = (files.weights[0] if files.weights else files.path).stat().st_mtime
        if files.format != "gguf":
            return modified, "", digests
        types = Counter(tensor.type for tensor in read_gguf(files.path).tensors.values() if len(tensor.shape) > 1)
    except (OSError, ModelError):  # the files were removed; the engine still has what it read
        return 0.0, "", digests
    return modified, GGML_TYPES[types.most_common(1)[0][0]][0] if types else "", digests


def _family(facts: ModelFacts) -> str:
    return str(facts.hf.get("model_type") or facts.architecture)


def _parameter_size(count: int) -> str:
    unit, letter = next(((unit, letter) for unit, letter in _UNITS if count >= unit), (1, ""))
    return f"{count / unit:.4g}{letter}"


def _weight_type(facts: ModelFacts) -> str:
    return _DTYPES.get(facts.dtype, facts.dtype) if facts.quantization is None else facts.quantization.method.upper()


def _info(server: Server) -> dict[str, Any]:
    facts = server.llm.config.facts
    family = _family(facts)
    heads = count_heads(facts)
    info = {
        "general.architecture": family,
        "general.parameter_count": facts.parameters,
        f"{family}.context_length": server.llm.max_model_len,
        f"{family}.embedding_length": facts.hidden_size,
        f"{family}.vocab_size": facts.vocab_size,
        f"{family}.attention.head_count": heads,
        f"{family}.attention.head_count_kv": facts.hf.get("num_key_value_heads") or heads,
        f"{family}.block_count": facts.hf.get("num_hidden_layers"),
    }
    return {name: value for name, value in info.items() if value is not None}


def _parameters(defaults: Mapping[str, Any]) -> str:
    """Return the sampling defaults as lines of a Modelfile."""
    lines = ((_PARAMETERS.get(name, name), value) for name, value in defaults.items())
    return "\n".join(f"{name:<30} {value}" for name, value in lines if name in Options.model_fields)


def _capabilities(server: Server, chats: bool) -> list[str]:
    tasks = supported_tasks(server.llm.config)
    found = {
        "completion": "generate" in tasks,
        "vision": server.llm.media.media is not None and chats,
        "tools": "generate" in tasks and chats,
        "thinking": server.formats.reasoning is not None,
        "embedding": "embed" in tasks,
    }
    return [name for name, has in found.items() if has]
