"""Which Host headers are answered.

A web page can point its own name at 127.0.0.1 (DNS rebinding): the browser then takes a server on loopback for the page's own,
and the page may read its answers. The Host header still has the page's name, so a server that needs no key checks it.
"""

import ipaddress
from collections.abc import Iterable
from functools import lru_cache

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.serve.errors import error_body, json_response, shaped

MISDIRECTED = 421
EVERY_HOST = "*"
MAX_SHOWN_CHARS = 100
_REMEMBERED_HOSTS = 256


class HostCheck:
    """Passes on requests whose Host header is a loopback name, the address that was connected to, or one of `names`. A name
    such as *.example.com stands for all names that end so."""

    def __init__(self, app: ASGIApp, names: Iterable[str]) -> None:
        self._app = app
        self._names = frozenset(map(normalized, names))
        self._check = lru_cache(_REMEMBERED_HOSTS)(self._allows)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        server = scope.get("server")
        for name, value in scope.get("headers", ()):
            if name == b"host" and not self._check(value, server[0] if server else None):
                return await _misdirected(value, scope)(scope, receive, send)
        return await self._app(scope, receive, send)

    def _allows(self, header: bytes, connected_to: str | None) -> bool:
        host = host_of(header.decode("latin-1"))
        if host in self._names or is_loopback(host) or (connected_to is not None and host == normalized(connected_to)):
            return True
        parents = (host[at:] for at, character in enumerate(host) if character == ".")
        return any(f"*{parent}" in self._names for parent in parents)


def host_of(header: str) -> str:
    """Return the host of a Host header, without its port and the brackets of an IPv6 address."""
    header = header.strip()
    if header.startswith("["):
        return normalized(header[1:].partition("]")[0])
    return normalized(header.partition(":")[0])


def normalized(host: str) -> str:
    return host.strip("[]").rstrip(".").lower()


def is_loopback(host: str) -> bool:
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _misdirected(header: bytes, scope: Scope) -> Response:
    host = header.decode("latin-1")[:MAX_SHOWN_CHARS]
    message = (
        f"the Host header must be a loopback name or an allowed one; got {host!r}. "
        f"Start the server with --allowed-hosts {host_of(host) or 'NAME'} to allow it."
    )
    return json_response(shaped(error_body(MISDIRECTED, message, kind="MisdirectedRequestError"), scope), MISDIRECTED)
