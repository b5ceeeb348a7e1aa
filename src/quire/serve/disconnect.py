"""A client that goes away takes its work with it: somebody waits for `http.disconnect` beside whatever is done for it."""

import asyncio
from types import TracebackType
from typing import Any

from starlette.types import Receive


class ClientGone(Exception):
    """The client hung up; its work was cancelled."""


class UnlessGone:
    """What is done inside is cancelled when the client hangs up; ClientGone is raised then. The body must have been read."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._watch: asyncio.Task[None] | None = None
        self._gone = False

    async def __aenter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._start = asyncio.get_running_loop().call_soon(self._begin)  # when there is a moment to wait in

    def _begin(self) -> None:
        self._watch = asyncio.create_task(_client_gone(self._receive))
        self._watch.add_done_callback(self._end)

    def _end(self, watch: "asyncio.Task[None]") -> None:
        if not watch.cancelled():
            self._gone = True
            self._task.cancel()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._start.cancel()
        if self._watch is not None:
            self._watch.remove_done_callback(self._end)
            self._watch.cancel()
        if self._gone and not self._task.uncancel() and kind is asyncio.CancelledError:
            raise ClientGone from None


async def _client_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def stop(*tasks: "asyncio.Task[Any]") -> None:
    """Cancels what still runs and waits until it has ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
