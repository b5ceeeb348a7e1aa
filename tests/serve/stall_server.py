"""`quire serve` with a pulse on its event loop: `python stall_server.py ARGUMENTS...`.

For every byte on its standard input it writes the longest stall since the last one, in seconds. A stall is a time in which the
loop did not get its turn *and this process computed*: on the loop itself, or in a thread that kept the interpreter's lock. What
neighbours take of the processor is no stall.
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
        told, longest = longest, 0.0
        os.write(1, f"{told:.6f}\n".encode())


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
