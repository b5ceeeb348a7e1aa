"""Access control: API keys, the rule that a server without one listens on loopback only, and the Host header.

For the routers: `request.state.tenant` (str or None) is passed to the engine as `cache_tenant`; `request.state.trusted` is true
if there is no key, or if the client has one: it may see details of this server.
"""

import hashlib
import hmac
import ipaddress
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache

from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.config.server_args import ServerArgs
from quire.serve.errors import error_body, json_response, shaped
from quire.text.workers.pool import current_tenant
from quire.types.errors import ConfigError

KEY_VARIABLES = ("QUIRE_API_KEY", "VLLM_API_KEY")
_KEY_HEADERS = (b"authorization", b"x-api-key")  # the first that is there counts, and may occur once
_TENANT_SALT = b"quire prefix-cache tenant"


def find_keys(settings: ServerArgs, environment: Mapping[str, str]) -> list[str]:
    """Return the keys of the command line, or else the environment's; none with --no-auth."""
    if not settings.auth:
        return []
    if settings.api_key:
        return list(dict.fromkeys(settings.api_key))
    return [key for name in KEY_VARIABLES if (key := environment.get(name, "").strip())][:1]


def check_exposure(settings: ServerArgs, reachable: bool, keys: Sequence[str]) -> None:
    """`reachable`: other machines can connect to where the server will listen."""
    if reachable and settings.auth and not keys:
        raise ConfigError(
            f"{settings.host} can be reached from other machines, and there is no API key: give --api-key (or QUIRE_API_KEY), "
            "use --no-auth to serve all clients, or leave --host out to listen on loopback"
        )


class Keys:
    """Compares in constant time: with every key, and on digests, so that neither position, length nor content shows."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]
        # one key is one tenant, and needs no name; the names of several do not change when the server is restarted
        self._tenants = [hmac.new(_TENANT_SALT, key.encode(), hashlib.sha256).hexdigest()[:32] for key in keys]

    def __len__(self) -> int:
        return len(self._digests)

    def find(self, value: bytes, header: bytes = b"authorization") -> int | None:
        """The number of the key in a header: Authorization: Bearer KEY, or Anthropic's X-Api-Key: KEY."""
        scheme, _, token = value.partition(b" ") if header == b"authorization" else (b"bearer", b"", value)
        digest = hashlib.sha256(token.strip()).digest()
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return matches.index(True) if scheme.lower() == b"bearer" and any(matches) else None

    def tenant(self, number: int) -> str | None:
        return self._tenants[number] if len(self) > 1 else None


def glance(routes: Sequence[Route]) -> Callable[[Scope], bool]:
    """Return a quick check whether a request may be for one of these routes, whatever a proxy put before its path.

    A route's own pattern ignores a line end after the path; this check does not.
    """
    endings = tuple(route.path for route in routes)
    return lambda scope: scope["path"].endswith(endings)


class Guard:
    """Serves `public` routes itself; everything else, whatever its path looks like, is passed on only with a key."""

    def __init__(self, app: ASGIApp, keys: Keys, public: Sequence[Route]) -> None:
        self._app, self._keys, self._public = app, keys, public
        self._glance = glance(public)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = scope.setdefault("state", {})
        if not len(self._keys):
            state["trusted"] = True
            return await self._app(scope, receive, send)
        number = self._find(scope)
        state["trusted"] = number is not None
        for route in self._public if self._glance(scope) else ():
            match, child = route.matches(scope)
            if match is Match.FULL:
                scope.update(child)
                return await route.handle(scope, receive, send)
        if number is None:
            return await unauthorized(scope)(scope, receive, send)
        state["tenant"] = self._keys.tenant(number)
        current_tenant.set(state["tenant"])
        return await self._app(scope, receive, send)

    def _find(self, scope: Scope) -> int | None:
        given = [(value, header) for header in _KEY_HEADERS for name, value in scope["headers"] if name == header]
        alone = len(given) == 1 or (len(given) > 1 and given[0][1] != given[1][1])
        return self._keys.find(*given[0]) if alone else None


def unauthorized(scope: Scope) -> Response:
    message = "no valid API key was given: send it as a header, Authorization: Bearer KEY"
    body = error_body(401, message, kind="AuthenticationError")
    return json_response(shaped(body, scope), 401, {"WWW-Authenticate": "Bearer"})


# ---- the Host header

MISDIRECTED = 421
EVERY_HOST = "*"
MAX_SHOWN_CHARS = 100
_REMEMBERED_HOSTS = 256


class HostCheck:
    """Pass on requests whose Host header is a loopback name, the address that was connected to, or one of `names`.

    A web page can point its own name at 127.0.0.1 (DNS rebinding). The browser then treats a server on loopback as the page's
    own, and the page may read its answers. The Host header still has the page's name, so a server without a key checks it.
    A name such as *.example.com stands for all names that end so.
    """

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
