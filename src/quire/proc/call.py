"""PendingCalls over a channel: each carries a number, and its reply arrives later with the same number."""

import asyncio
import itertools
from collections.abc import Callable
from typing import Any


class PendingCalls:
    """PendingCalls whose reply has not arrived."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._futures: dict[int, asyncio.Future[Any]] = {}

    def number(self) -> int:
        """Return the number of a call whose reply nobody awaits."""
        return next(self._numbers)

    async def ask(self, send: Callable[[int], None]) -> Any:
        """Send a call and return its reply. `send` gets the number of the call."""
        number = next(self._numbers)
        future = self._futures[number] = asyncio.get_running_loop().create_future()
        try:
            send(number)
            return await future
        finally:
            del self._futures[number]

    def settle(self, number: int, value: Any, error: Exception | None = None) -> None:
        """Deliver a reply. Replies to unknown numbers are ignored: their caller was cancelled."""
        future = self._futures.get(number)
        if future is not None and not future.done():
            if error is None:
                future.set_result(value)
            else:
                future.set_exception(error)

    def fail_all(self, error: Exception) -> None:
        """The peer is gone: raise `error` in all callers."""
        for number in list(self._futures):
            self.settle(number, None, error)
