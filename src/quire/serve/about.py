"""The server's description: a page at its address, and for developers its whole configuration."""

import dataclasses
import json
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from quire import __version__
from quire.serve.auth import KEY_VARIABLES, unauthorized
from quire.serve.developer import developing
from quire.serve.errors import error_body, json_response
from quire.serve.health import ServerState
from quire.serve.page import docs_page, favicon, page

_PREFIXES = ("QUIRE_", "VLLM_")
_SECRETS = ("KEY", "TOKEN", "SECRET", "PASSWORD")
_PACKAGES = ("torch", "transformers", "tokenizers", "llguidance", "triton", "uvicorn", "fastapi")


class About:
    def __init__(self, state: ServerState, keyed: bool) -> None:
        self._state, self._keyed = state, keyed

    @property
    def public(self) -> list[Route]:
        """What needs no API key: the pages, which ask for one and hold nothing."""
        settings = self._state.settings
        docs = [] if settings.disable_fastapi_docs else [Route(path, self.docs) for path in ("/docs", "/redoc")]
        pages = [] if settings.disable_page else [Route("/", self.page)]
        return [*pages, *docs, Route("/favicon.ico", self.favicon)]

    async def docs(self, _: Request) -> Response:
        return docs_page()

    async def favicon(self, _: Request) -> Response:
        return favicon()

    @property
    def routes(self) -> list[Route]:
        routes = self.public
        return [*routes, Route("/server_info", self.server_info)] if developing() else routes

    async def page(self, request: Request) -> Response:
        """The page for browsers; for all else a few lines, which name the model and therefore need the key."""
        if "text/html" in request.headers.get("accept", ""):
            return page()
        if not request.state.trusted:
            return unauthorized(request.scope)
        service, settings = self._state.service, self._state.settings
        title = "Quire" if service is None else f"Quire: {service.llm.config.served_names[0]}"
        state = f"Version {__version__}. " + ("The model is loading." if service is None else "Ready.")
        root = settings.root_path.rstrip("/")
        tokenizer = None if service is None else service.llm.tokenizer
        chat = tokenizer is None or tokenizer.chat_template is not None
        curl = _curl(str(request.base_url).rstrip("/"), chat, self._keyed)
        paths = [f"{root}{path}" for path in ("/docs", "/v1/models", "/metrics", "/health")]
        paths = paths[1:] if settings.disable_fastapi_docs else paths
        headers = {"Cache-Control": "no-store", "Vary": "Accept"}
        return PlainTextResponse("\n".join([title, state, "", curl, "", *paths, ""]), headers=headers)

    async def server_info(self, request: Request) -> Response:
        """vLLM's, with its names: the configuration as text or as JSON, and what the environment says. No secrets."""
        form = request.query_params.get("config_format", "text")
        if form not in ("text", "json"):
            return json_response(error_body(400, "config_format must be text or json", "config_format"), 400)
        service = self._state.service
        if service is None:
            return json_response(error_body(503, "the model is still loading", kind="ServiceUnavailableError"), 503)
        settings = dataclasses.asdict(self._state.settings) | {"api_key": None}
        config = {"engine": _plain(service.llm.config), "server": settings}
        return json_response(
            {
                "vllm_config": config if form == "json" else json.dumps(config, default=str),
                "vllm_env": {name: _shown(name) for name in sorted(os.environ) if name.startswith(_PREFIXES)},
                "system_env": _system(),
            }
        )


def _curl(url: str, chat: bool, keyed: bool) -> str:
    """A model without a chat template completes prompts only."""
    path, body = "/v1/completions", '{"prompt": "The capital of France is", "max_tokens": 16}'
    if chat:
        question = "What is the capital of France? Answer in one word."
        path, body = "/v1/chat/completions", f'{{"messages": [{{"role": "user", "content": "{question}"}}], "max_tokens": 64}}'
    key = f' -H "Authorization: Bearer ${KEY_VARIABLES[0]}"' if keyed else ""
    return f"curl {url}{path} -H 'Content-Type: application/json'{key} \\\n     -d '{body}'"


def _shown(name: str) -> str:
    return "***" if any(part in name for part in _SECRETS) else os.environ[name]


def _plain(value: Any) -> Any:
    """As JSON can hold it; whatever is named like a secret is left out."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(k): None if str(k).upper().endswith(_SECRETS) else _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def _system() -> dict[str, str]:
    facts = {"quire": __version__, "python": platform.python_version(), "platform": platform.platform()}
    for name in _PACKAGES:
        try:
            facts[name] = version(name)
        except PackageNotFoundError:
            continue
    return facts
