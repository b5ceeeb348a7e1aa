"""Offers requests: each when it is due, never more at once than allowed, and keeps a record of every one that ended."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from quire.bench.client import Client, reason
from quire.bench.openai import StreamReceiver
from quire.bench.record import Record


@dataclass(frozen=True)
class Outgoing:
    """A request, ready to be sent."""

    name: str
    body: bytes
    due: float  # seconds after the start
    asked_tokens: int = 0
    prompt_tokens: int = 0


Send = Callable[[Outgoing, Record], Awaitable[None]]


class Load:
    """One run of a load. `records` are those that ended; `live` are under way."""

    def __init__(self, send: Send, max_concurrency: int | None = None) -> None:
        self.records: list[Record] = []
        self.live: dict[int, Record] = {}
        self.interrupted = False
        self.duration = 0.0
        self._send = send
        self._slots = asyncio.Semaphore(max_concurrency) if max_concurrency else None

    async def run(self, requests: Sequence[Outgoing]) -> None:
        """Ends with the last answer. When it is cancelled, it drops what is under way and keeps what has ended."""
        start = time.perf_counter()
        try:
            async with asyncio.TaskGroup() as group:
                for index, request in enumerate(requests):
                    early = start + request.due - time.perf_counter()
                    if early > 0:
                        await asyncio.sleep(early)
                    if self._slots is not None:
                        await self._slots.acquire()
                    group.create_task(self._one(index, request, start))
        except asyncio.CancelledError:
            self.interrupted = True
            task = asyncio.current_task()
            if task is not None:
                task.uncancel()
        self.duration = time.perf_counter() - start

    async def _one(self, index: int, request: Outgoing, start: float) -> None:
        record = Record(start + request.due, prompt_tokens=request.prompt_tokens, asked_tokens=request.asked_tokens)
        self.live[index] = record
        try:
            await self._send(request, record)
            self.records.append(record)
        finally:
            del self.live[index]
            if self._slots is not None:
                self._slots.release()


def sender(client: Client, path: str, *, keep_text: bool = False) -> Send:
    """Sends to one endpoint. Whatever goes wrong with a request is its record's error."""

    async def send(request: Outgoing, record: Record) -> None:
        receiver = StreamReceiver(record, keep_text)
        record.sent = time.perf_counter()
        try:
            await client.exchange("POST", path, request.body, receiver, request.name)
        except OSError as error:
            receiver.finish(time.perf_counter())
            cut = f"the stream was cut after {record.output_tokens} tokens: " if record.arrivals else ""
            record.error = f"{cut}{reason(error)}"
        else:
            receiver.finish(time.perf_counter())

    return send
