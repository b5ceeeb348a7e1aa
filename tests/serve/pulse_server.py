"""`quire serve` with a pulse on its event loop: `python pulse_server.py ARGUMENTS...`.

For every byte on standard input it writes the longest stall since the previous byte, in seconds. A stall is a time in which the
event loop did not run *and this process used a processor*: on the loop, or in a thread that held the GIL. Time in which other
processes had the processor does not count.
"""

import asyncio
import os
import sys
import threading
import time
from typing import Any

from quire.cli.main import main
from quire.serve.launch import ServerLaunch

EVERY = 0.002
longest = 0.0


async def pulse() -> None:
    global longest
    wall, used = time.perf_counter(), time.process_time()
    while True:
        await asyncio.sleep(EVERY)
        now, worked = time.perf_counter(), time.process_time()
        longest = max(longest, min(now - wall, worked - used))
        wall, used = now, worked


def answer() -> None:
    global longest
    while os.read(0, 1):
        stall, longest = longest, 0.0
        os.write(1, f"{stall:.6f}\n".encode())


run = ServerLaunch.run


async def run_with_pulse(self: ServerLaunch, started: float) -> Any:
    task = asyncio.create_task(pulse())
    try:
        return await run(self, started)
    finally:
        task.cancel()


if __name__ == "__main__":
    ServerLaunch.run = run_with_pulse  # type: ignore[method-assign]
    threading.Thread(target=answer, daemon=True).start()
    sys.exit(main(sys.argv[1:]))
