"""Requests to the app by function call, without a socket: the routes, checks and errors are those of HTTP requests."""

import asyncio
from dataclasses import dataclass

import msgspec
from starlette.types import ASGIApp, Message, Scope

from quire.text.workers.pool import current_tenant

_OF_BATCH = "of_batch"  # in the state of a request: it is a line of a batch
RETRY_PAUSES_S = (0.1, 0.5, 2.0, 5.0)  # before a request that was refused with 503 is sent again
_JSON = b"application/json"


def is_batch_line(scope: Scope) -> bool:
    return _OF_BATCH in scope.get("state", ())


@dataclass(frozen=True)
class Answer:
    status: int
    body: bytes  # JSON


class LocalClient:
    """`priority`: sent with every request that has none of its own; None: nothing is sent."""

    def __init__(self, app: ASGIApp, priority: int | None = None) -> None:
        self._app = app
        self._headers = [] if priority is None else [(b"x-vllm-priority", str(priority).encode())]

    async def post(self, path: str, body: bytes, request_id: str, tenant: str | None) -> Answer:
        """Return the answer to a JSON request. A server that is too busy is asked again a few times."""
        current_tenant.set(tenant)
        for pause in RETRY_PAUSES_S:
            answer = await self._post(path, body, request_id, tenant)
            if answer.status != 503:
                return answer
            await asyncio.sleep(pause)
        return await self._post(path, body, request_id, tenant)

    async def _post(self, path: str, body: bytes, request_id: str, tenant: str | None) -> Answer:
        unread: list[bytes] = [body]
        status, kind, chunks = 500, b"", list[bytes]()

        async def receive() -> Message:
            if unread:
                return {"type": "http.request", "body": unread.pop(), "more_body": False}
            await asyncio.get_running_loop().create_future()  # the client does not disconnect
            raise AssertionError

        async def send(message: Message) -> None:
            nonlocal status, kind
            if message["type"] == "http.response.start":
                status = message["status"]
                kind = next((value for name, value in message["headers"] if name == b"content-type"), b"")
            else:
                chunks.append(message.get("body", b""))

        state = {"request_id": request_id, "tenant": tenant, "trusted": True, _OF_BATCH: True}
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
            "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "", "client": ("batch", 0),
            "server": None, "state": state,
            "headers": [(b"content-type", _JSON), (b"content-length", str(len(body)).encode()), *self._headers],
        }  # fmt: skip
        await self._app(scope, receive, send)
        content = b"".join(chunks)
        return Answer(status, content if kind.startswith(_JSON) else msgspec.json.encode(content.decode(errors="replace")))
