"""A progress bar that also shows what is under way and how fast tokens come."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from tqdm import tqdm

from quire.bench.load import Load

INTERVAL = 0.5


@asynccontextmanager
async def progress(load: Load, total: int, *, disable: bool) -> AsyncIterator[None]:
    """Without a terminal there is no bar."""
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
        await asyncio.sleep(INTERVAL)
        now = time.perf_counter()
        ended_tokens += sum(len(record.arrivals) for record in load.records[ended:])
        ended = len(load.records)
        seen = ended_tokens + sum(len(record.arrivals) for record in load.live.values())
        bar.set_postfix_str(f"{len(load.live)} running, {(seen - tokens) / (now - last):,.0f} chunks/s", refresh=False)
        bar.update(ended - bar.n)
        bar.refresh()
        tokens, last = seen, now
