"""An answer while it is made, for whoever listens on an event loop."""

import asyncio

from quire.paced import Pace
from quire.text.outputs import RequestAnswer


class Stream:
    """What one request has to tell. An output is made when it is taken, of all there is: slow listeners lose nothing."""

    __slots__ = ("_error", "_waiter", "answer")

    def __init__(self, answer: RequestAnswer) -> None:
        self.answer = answer
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    def wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done() and not waiter.get_loop().is_closed():
            waiter.set_result(None)

    def fail(self, error: Exception) -> None:
        self._error = error
        self.wake()

    def news(self) -> "asyncio.Future[None]":
        """To be awaited while there is no output."""
        if self._error is not None:
            raise self._error
        self._waiter = asyncio.get_running_loop().create_future()
        return self._waiter


async def catch_up(answer: RequestAnswer) -> None:
    pace = Pace()
    while answer.behind:
        await pace()
        answer.catch_up()
