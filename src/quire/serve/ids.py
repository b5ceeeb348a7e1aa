"""Every request has an id: the one it brought as X-Request-Id, or a new one. Every answer tells it."""

import re
import secrets

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.serve.limits import LIMITS

_SANE = re.compile(rb"[\x21-\x7e]{1,%d}" % LIMITS.identifier_characters)  # ids go into headers and logs


def choose_id(scope: Scope) -> str:
    chosen: bytes = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
    return chosen.decode() if _SANE.fullmatch(chosen) else secrets.token_hex(16)


class RequestIds:
    """Around everything, so that refusals have one as well."""

    def __init__(self, app: ASGIApp, told: bool) -> None:
        self._app, self._told = app, told

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = choose_id(scope)
        scope.setdefault("state", {})["request_id"] = request_id

        async def tell(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
            await send(message)

        await self._app(scope, receive, tell if self._told else send)
