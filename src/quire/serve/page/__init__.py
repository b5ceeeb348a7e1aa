"""The page at `/` (chat, and the engine at work) and the API reference at `/docs`: written as small files, each sent as one.

Their policy names every script and style sheet by its hash, so nothing else runs, forbids making HTML of text, and allows
requests to this server only. The pages hold no secret and nothing of the model: they ask for all of that, with the key if there
is one.
"""

import base64
import hashlib
import re
import urllib.parse
from functools import cache
from importlib.resources import files

from starlette.responses import Response

MOST_BYTES = 110_000  # of a page, as it is sent

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
    return (files(__name__) / name).read_text(encoding="utf-8")
