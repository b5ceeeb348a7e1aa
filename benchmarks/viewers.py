"""What viewers of /engine/events cost: a steady load on a server whose engine needs no model, with none, one and ten of them.

    python benchmarks/viewers.py MODEL [--streams 256] [--latency 0.2] [--seconds 3] [--rounds 15]

Keeps so many streams open that new ones begin whenever others end. Windows without viewers, with one and with ten take turns;
of each window it notes the processor time that the API process and the engine process took for a token, and prints medians of
what viewers add to the windows before and after. That is told several times a second, whatever the load, and little more with
every step: so it is printed as a share of a second, which is what a process that has no time left loses. Steps that are long
(--latency) leave the processes little else to do, and the difference can be seen on a busy machine.

    python benchmarks/viewers.py --steps

prints what the processes pay for every step and for everything that is told, without a server.
Of MODEL only the configuration and the tokenizer are used. Linux only: processor times come from /proc.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from front_end import child, free_port
from host_cost import PAGE, PROMPT, SPREAD, VOCABULARY, request

from quire.cache.layout import make_layout
from quire.engine import ipc
from quire.engine.watch import Watch
from quire.sched.scheduler import Scheduler
from quire.serve import engine_views as views
from quire.serve.engine_events import encode
from quire.serve.engine_views import PageView, RequestTraces
from quire.types.cache import LayerCache
from quire.types.plan import StepResult

HOST = "127.0.0.1"
CROWDS = (1, 10)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--steps", action="store_true", help="the parts of it, without a server")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--input-len", type=int, default=32)
    parser.add_argument("--latency", type=float, default=0.2, help="seconds that a step keeps the device busy")
    parser.add_argument("--seconds", type=float, default=3.0, help="of a window")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    if options.steps:
        print_steps(options.streams, options.tokens)
        return 0
    port = free_port()
    server = subprocess.Popen(
        [sys.executable, "-m", "quire.cli.main", "serve", options.model, "--port", str(port), "--distributed-executor-backend",
         "fake", "--max-num-seqs", str(options.streams), "--disable-uvicorn-access-log", "--disable-log-stats"],
        env={**os.environ, "QUIRE_FAKE_LATENCY": str(options.latency)},
    )  # fmt: skip
    try:
        asyncio.run(measure(port, server.pid, options))
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(60)
    return 0


async def measure(port: int, api: int, options: argparse.Namespace) -> None:
    while not await asyncio.to_thread(ready, port):
        await asyncio.sleep(0.2)
    engine = child(api)
    load = [asyncio.create_task(streams(port, options, seed)) for seed in range(options.streams)]
    await asyncio.sleep(3 * options.seconds)
    rates = []

    async def window(viewers: int) -> list[float]:
        """Microseconds of each process for a token."""
        watching = [asyncio.create_task(watch(port)) for _ in range(viewers)]
        await asyncio.sleep(0.5)
        before = (await asyncio.to_thread(tokens, port), spent(api), spent(engine))
        began = time.monotonic()
        await asyncio.sleep(options.seconds)
        after = (await asyncio.to_thread(tokens, port), spent(api), spent(engine))
        count, *times = (a - b for a, b in zip(after, before, strict=True))
        rates.append(count / (time.monotonic() - began))
        await end(watching)
        return [each / count for each in times]

    added: dict[int, list[list[float]]] = {crowd: [] for crowd in CROWDS}
    base = [await window(0)]
    for _ in range(options.rounds):
        for crowd in CROWDS:
            watched, after = await window(crowd), await window(0)
            added[crowd].append([w - (a + b) / 2 for w, a, b in zip(watched, base[-1], after, strict=True)])
            base.append(after)
    await end(load)
    rate = statistics.median(rates)
    print(f"{options.streams} streams, {rate:.0f} tokens/s; {options.rounds} rounds, windows of {options.seconds} s")
    alone = [statistics.median(column) * rate / 1e6 for column in zip(*base, strict=True)]
    print(f" 0 viewers: API process {alone[0]:.1%} of a second in a second, engine process {alone[1]:.1%}")
    for crowd in CROWDS:
        told = []
        for name, column in zip(("API", "engine"), zip(*added[crowd], strict=True), strict=True):
            low, middle, high = (each * rate / 1e6 for each in statistics.quantiles(column, n=4))
            told.append(f"{name} process {middle:+.2%} ({low:+.2%} to {high:+.2%})")
        print(f"{crowd:2d} viewers: {', '.join(told)}")


async def streams(port: int, options: argparse.Namespace, seed: int) -> None:
    """One after the other."""
    numbers = random.Random(seed)
    reader, writer = await asyncio.open_connection(HOST, port)
    length = numbers.randrange(1, options.tokens)  # of the first, so that they do not end together
    while True:
        prompt = [numbers.randrange(10, 200) for _ in range(options.input_len)]
        asked = {"prompt": prompt, "max_tokens": length, "ignore_eos": True, "stream": True}
        body = json.dumps(asked).encode()
        head = f"Host: {HOST}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(b"POST /v1/completions HTTP/1.1\r\n" + head.encode() + body)
        end = b""
        while not end.endswith(b"0\r\n\r\n"):
            piece = await reader.read(1 << 16)
            if not piece:
                raise ConnectionError("the server ended a stream")
            end = (end + piece)[-8:]
        length = options.tokens


async def watch(port: int) -> None:
    reader, writer = await asyncio.open_connection(HOST, port)
    try:
        writer.write(f"GET /engine/events HTTP/1.1\r\nHost: {HOST}\r\n\r\n".encode())
        while await reader.read(1 << 16):
            pass
    finally:
        writer.close()


async def end(tasks: "list[asyncio.Task[None]]") -> None:
    for task in tasks:
        task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.gather(*tasks)


def print_steps(running: int, length: int, steps: int = 2000) -> None:
    """A scheduler with invented results, watched; requests end and come as they do under a steady load."""
    pages = 2 * running * ((PROMPT + SPREAD + length) // PAGE + 1)
    scheduler = Scheduler(
        make_layout([LayerCache(8, 128, None)], PAGE, 2), pages=pages, max_model_len=PROMPT + SPREAD + length,
        max_batched_tokens=8192, max_seqs=running,
    )  # fmt: skip
    rng, number, clock = np.random.default_rng(0), 0, time.thread_time
    watch = Watch(scheduler.roster, scheduler.pool)
    spent: dict[str, list[float]] = {"moves": [], "planned": [], "landing": [], "landed": [], "snapshots": [], "heard": []}

    def timed(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            began = clock()
            result = work(*args)
            spent[name].append(clock() - began)
            return result

        return run

    scheduler.roster.on_move = timed("moves", watch.moved)
    planned, landing, landed = (timed(name, getattr(watch, name)) for name in ("planned", "landing", "landed"))
    tell = timed("snapshots", lambda: ipc.encode(ipc.Seen(watch.look())))
    traces, pages_seen = RequestTraces(answer), PageView(pages)
    llm = SimpleNamespace(stats=scheduler.stats)

    def read(frame: bytes) -> int:
        """As the API process does for all viewers of a key together."""
        seen = ipc.decode_report(frame).snapshot
        traces.see(seen.requests)
        pages_seen.see(seen)
        events = [("requests", views.requests(traces.take(), None)), ("step", views.step(seen, llm, traces, None))]
        events.append(("pages", pages_seen.as_event(None, seen.t, seen.first, seen.cells)))
        return sum(len(encode(kind, event)) for kind, event in events if event is not None)

    hear, size = timed("heard", read), 0
    told, ended = 0, 0
    for step in range(steps):
        while len(scheduler.unfinished) < running:
            scheduler.add(request(number, length if number >= running else 1 + number % length, rng))
            number += 1
        scheduled = scheduler.schedule(0.0)
        assert scheduled is not None
        planned(scheduled)
        draws = scheduled.plan.sample.astype(np.int32)
        result = StepResult(step, draws, rng.integers(0, VOCABULARY, int(draws.sum()), dtype=np.int32))
        landing(scheduled, result, 0.02, time.monotonic())
        ended += sum(delta.finish_reason is not None for delta in scheduler.results.commit(scheduled, result))
        landed()
        if step % 10 == 9:
            watch._next = 0.0
            told += 1
            size += hear(tell())
    moves, planning, first, second, snapshot, heard = (statistics.median(each) * 1e6 for each in spent.values())
    print(f"{running} running, {ended} ended in {steps} steps; medians in microseconds of processor time, the clock's included")
    print(f"{planning + first + second:.1f} a step, {len(spent['moves']) / ended * moves:.1f} a request, {snapshot:.0f} each")
    print(f"in the API process, for all viewers of a key: {heard:.0f} a snapshot, which is {size / told / 1e3:.1f} KB")


def answer(key: str) -> Any:
    """As the server knows it."""
    prepared = SimpleNamespace(id=f"cmpl-{key:0>32}-0-{key}", requests=[SimpleNamespace(id=key)])
    return SimpleNamespace(prepared=prepared, metrics=SimpleNamespace(queued_ts=time.monotonic()))


def spent(pid: int) -> float:
    """Microseconds that a process has had a processor, all threads together."""
    files = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(file.read_text().split()[0]) for file in files) / 1e3


def tokens(port: int) -> float:
    with urllib.request.urlopen(f"http://{HOST}:{port}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("quire:generation_tokens_total"))


def ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://{HOST}:{port}/readyz") as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


if __name__ == "__main__":
    sys.exit(main())
