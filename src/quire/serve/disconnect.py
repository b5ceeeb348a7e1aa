"""A client that goes away takes its work with it: generation and the wait for `http.disconnect` run side by side."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

T = TypeVar("T")


class ClientGone(Exception):
    """The client hung up; its work was cancelled."""


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, or ClientGone as soon as the client hangs up. `work` has ended either way."""
    working = asyncio.create_task(work)
    watching = asyncio.create_task(client_gone(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGone
    finally:
        await stop(working, watching)


async def client_gone(receive: Receive) -> None:
    """Returns when the client has hung up. The body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def stop(*tasks: "asyncio.Task[Any]") -> None:
    """Cancels what still runs and waits until it has ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
