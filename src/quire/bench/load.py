"""Send requests when they are due, within the concurrency limit, record every one that ended, and show the progress."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from tqdm import tqdm

from quire.bench.client import Client, reason
from quire.bench.metrics import Record
from quire.bench.openai import StreamReceiver, WholeReceiver


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
    """One run of a load. `records` are of requests that ended, `live` of those in flight."""

    def __init__(self, send: Send, max_concurrency: int | None = None) -> None:
        self.records: list[Record] = []
        self.live: dict[int, Record] = {}
        self.interrupted = False
        self.duration = 0.0
        self._send = send
        self._slots = asyncio.Semaphore(max_concurrency) if max_concurrency else None

    async def run(self, requests: Sequence[Outgoing]) -> None:
        """Send all requests and wait for the last answer. When cancelled, drop the requests in flight."""
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


def sender(client: Client, path: str, *, keep_text: bool = False, streams: bool = True) -> Send:
    """Return a function that sends requests to one endpoint; a failure becomes the error of the request's record.

    streams: answers are streams of chunks rather than one JSON object
    """

    async def send(request: Outgoing, record: Record) -> None:
        receiver = StreamReceiver(record, keep_text) if streams else WholeReceiver(record)
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


PROGRESS_INTERVAL_S = 0.5


@asynccontextmanager
async def progress(load: Load, total: int, *, disable: bool) -> AsyncIterator[None]:
    """Show a progress bar with the requests in flight and the token rate; without a terminal show nothing."""
    with tqdm(total=total, unit="req", disable=disable or None, dynamic_ncols=True) as bar:
        if bar.disable:
            yield
            return
        task = asyncio.create_task(_watch(load, bar))
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            bar.update(len(load.records) - bar.n)


async def _watch(load: Load, bar: "tqdm[None]") -> None:
    ended = tokens = ended_tokens = 0
    last = time.perf_counter()
    while True:
        await asyncio.sleep(PROGRESS_INTERVAL_S)
        now = time.perf_counter()
        ended_tokens += sum(len(record.arrivals) for record in load.records[ended:])
        ended = len(load.records)
        seen = ended_tokens + sum(len(record.arrivals) for record in load.live.values())
        bar.set_postfix_str(f"{len(load.live)} running, {(seen - tokens) / (now - last):,.0f} chunks/s", refresh=False)
        bar.update(ended - bar.n)
        bar.refresh()
        tokens, last = seen, now
