"""The page at `/`, the API reference at `/docs`, and the server's configuration for developers (/server_info).

A page consists of small files in `page/` and is sent as one. Its content security policy names every script and style sheet
by hash, forbids HTML made from text, and allows requests to this server only. Pages contain no secret and nothing about the
model: they request all of that, with the API key if there is one.
"""

import base64
import dataclasses
import hashlib
import json
import os
import platform
import re
import urllib.parse
from collections.abc import Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from quire import __version__
from quire.features.pooling.host import supported_tasks
from quire.serve.auth import KEY_VARIABLES, unauthorized
from quire.serve.errors import error_body, json_response
from quire.serve.health import ServerState
from quire.serve.pooling.routes import example_of
from quire.serve.vllm_routes import developing

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
        tasks = ("generate",) if service is None else supported_tasks(service.llm.config)
        curl = _curl(str(request.base_url).rstrip("/"), chat, self._keyed, tasks)
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


def _curl(url: str, chat: bool, keyed: bool, tasks: Sequence[str]) -> str:
    """A model without a chat template completes prompts only; a pooling model has the endpoints of its tasks."""
    path, body = "/v1/completions", '{"prompt": "The capital of France is", "max_tokens": 16}'
    if chat:
        question = "What is the capital of France? Answer in one word."
        path, body = "/v1/chat/completions", f'{{"messages": [{{"role": "user", "content": "{question}"}}], "max_tokens": 64}}'
    if "generate" not in tasks:
        path, body = example_of(tasks)
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


# ---- pages

MAX_BYTES = 110_000  # of a page, as it is sent

_SCRIPT = re.compile(r'<script src="([\w.]+)"></script>')
_STYLE = re.compile(r'<link rel="stylesheet" href="([\w.]+)">')
_ICON = re.compile(r'<link rel="icon" href="([\w.]+)">')
_COMMENT = re.compile(r"^ *(?://.*|/\*\*? .*\*/)$| +// .*$", re.MULTILINE)
_SPACE = re.compile(r"^\s+", re.MULTILINE)
_CSS_SPACE = re.compile(r"(?<=[:;,{}])[ \n]|[ \n](?=[{}])|;(?=\s*})")
_JS_LINES = re.compile(r"(?<={)\n|\n(?=})")  # no text of ours has lines of its own
_POLICY = (
    "default-src 'none'; connect-src 'self'; img-src data:; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)


def page() -> Response:
    return _response("index.html")


def docs_page() -> Response:
    """Return the API reference. It reads openapi.json of this server and nothing from elsewhere."""
    return _response("docs.html")


def favicon() -> Response:
    return Response(_read("favicon.svg"), media_type="image/svg+xml", headers={"Cache-Control": "max-age=86400"})


def _response(name: str) -> Response:
    html, headers = _assembled(name)
    return Response(html, media_type="text/html", headers=headers)


@cache
def _assembled(name: str) -> tuple[bytes, dict[str, str]]:
    html = _read(name)
    hashes: dict[str, list[str]] = {"script": [], "style": []}

    def inline(kind: str, found: re.Match[str]) -> str:
        text = _SPACE.sub("", _COMMENT.sub("", _read(found[1])))
        text = (_CSS_SPACE if kind == "style" else _JS_LINES).sub("", text)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        hashes[kind].append(f"'sha256-{digest}'")
        return f"<{kind}>{text}</{kind}>"

    html = _ICON.sub(lambda found: f'<link rel="icon" href="data:image/svg+xml,{urllib.parse.quote(_read(found[1]))}">', html)
    html = _STYLE.sub(lambda found: inline("style", found), html)
    html = _SCRIPT.sub(lambda found: inline("script", found), html)
    allowed = "".join(f"; {kind}-src {' '.join(named)}" for kind, named in hashes.items())
    headers = {
        "Content-Security-Policy": _POLICY + allowed,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
        "Vary": "Accept",
    }
    return html.encode(), headers


def _read(name: str) -> str:
    return (files("quire.serve") / "page" / name).read_text(encoding="utf-8")
