"""The page at `/`: chat, and the engine at work. Written as small files, sent as one.

Its policy names every script and style sheet by its hash, so nothing else runs, forbids making HTML of text, and allows
requests to this server only. The page holds no secret and nothing of the model: it asks for all of that, with the key if there
is one.
"""

import base64
import hashlib
import re
from functools import cache
from importlib.resources import files

from starlette.responses import Response

MOST_BYTES = 80_000  # of the page, as it is sent

_SCRIPT = re.compile(r'<script src="([\w.]+)"></script>')
_STYLE = re.compile(r'<link rel="stylesheet" href="([\w.]+)">')
_COMMENT = re.compile(r"^ *(?://.*|/\*\*? .*\*/)$| +// .*$", re.MULTILINE)
_SPACE = re.compile(r"^\s+", re.MULTILINE)
_CSS_SPACE = re.compile(r"(?<=[:;,{}])[ \n]|[ \n](?=[{}])|;(?=\s*})")
_JS_LINES = re.compile(r"(?<={)\n|\n(?=})")  # no text of ours has lines of its own
_POLICY = (
    "default-src 'none'; connect-src 'self'; img-src data:; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)


def page() -> Response:
    html, headers = _assembled()
    return Response(html, media_type="text/html", headers=headers)


@cache
def _assembled() -> tuple[bytes, dict[str, str]]:
    html = _read("index.html")
    hashes: dict[str, list[str]] = {"script": [], "style": []}

    def inline(kind: str, found: re.Match[str]) -> str:
        text = _SPACE.sub("", _COMMENT.sub("", _read(found[1])))
        text = (_CSS_SPACE if kind == "style" else _JS_LINES).sub("", text)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        hashes[kind].append(f"'sha256-{digest}'")
        return f"<{kind}>{text}</{kind}>"

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
