"""The HTTP server: uvicorn with our connections, whose signals are the launcher's business."""

import contextlib
import socket
import ssl
from collections.abc import Iterator
from functools import partial
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from quire.config.server_args import ServerArgs
from quire.serve.connection import ClientConnection
from quire.serve.crowd import Crowd, raise_descriptor_limit
from quire.serve.handshakes import Handshakes
from quire.serve.limits import LIMITS, ServerLimits
from quire.serve.sockets import BACKLOG
from quire.types.errors import ConfigError

LAST_WORDS = 5.0  # seconds for responses to be written after their requests were ended
TICKS = 10  # of uvicorn in a second


class HttpServer(uvicorn.Server):
    def __init__(self, settings: ServerArgs, app: ASGIApp, limits: ServerLimits = LIMITS) -> None:
        self.crowd = Crowd(limits, raise_descriptor_limit())
        self._handshakes: Handshakes | None = None
        super().__init__(_config(settings, app, self.crowd))

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        context = self.config.ssl
        if context is None or sockets is None:
            await super().startup(sockets)
            return
        await super().startup([])
        self._handshakes = Handshakes(self.crowd, context, self._connect)
        for listener in sockets:
            self._handshakes.listen(listener, self.config.backlog)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._handshakes is not None:
            self._handshakes.close()
        await super().shutdown(sockets)

    def _connect(self) -> ClientConnection:
        connect: Any = self.config.http_protocol_class
        made = connect(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)
        assert isinstance(made, ClientConnection)
        return made

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def on_tick(self, counter: int) -> bool:
        if counter % TICKS == 0:
            self.crowd.look()
        return await super().on_tick(counter)


def _config(settings: ServerArgs, app: ASGIApp, crowd: Crowd) -> uvicorn.Config:
    config = uvicorn.Config(
        app,
        log_config=None,
        http=partial(ClientConnection, crowd=crowd, tells_ids=settings.enable_request_id_headers),  # type: ignore[arg-type]
        lifespan="off",
        ws="none",
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=settings.timeout_keep_alive,
        timeout_graceful_shutdown=int(LAST_WORDS),
        ssl_keyfile=settings.ssl_keyfile,
        ssl_certfile=settings.ssl_certfile,
        ssl_ca_certs=settings.ssl_ca_certs,
        ssl_cert_reqs=settings.ssl_cert_reqs,
        ssl_ciphers=settings.ssl_ciphers or "DEFAULT",
    )
    try:
        config.load()
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"the TLS certificate or its key cannot be used: {error}") from None
    return config
