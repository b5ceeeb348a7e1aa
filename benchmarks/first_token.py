"""What a lone request waits for outside the device: its time to the first token, less what the engine needs for a step.

    python benchmarks/first_token.py MODEL [--requests 300] [--latency 0.01] [--input-len 512] [--against SOURCE ...]

Starts `quire serve MODEL` with the executor that only pretends to compute, whose steps take `--latency` seconds, and sends one
request after the other, each over a connection of its own, with a prompt of random token ids that nobody has seen before.
Prints percentiles of the time from before the connection is opened to the first token's arrival. `--against` names other source
trees (the directory that holds `quire`): their servers run side by side with this one's and get requests in turns, so that a
busy machine is as busy for all. Of MODEL only the configuration and the tokenizer are used.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

HERE = str(Path(__file__).absolute().parent.parent / "src")
WARM_UP = 20  # requests that are not counted
PERCENTILES = (50, 90, 99)
HEAD = b" HTTP/1.1\r\nHost: here\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--latency", type=float, default=0.01, help="of a step, in seconds")
    parser.add_argument("--input-len", type=int, default=512)
    parser.add_argument("--against", nargs="*", default=[], metavar="SOURCE")
    options = parser.parse_args()
    sources = [HERE, *options.against]
    ports = [free_port() for _ in sources]
    servers = [serve(source, port, options) for source, port in zip(sources, ports, strict=True)]
    try:
        times = asyncio.run(measure(ports, options))
    finally:
        for server in servers:
            server.send_signal(signal.SIGTERM)
        for server in servers:
            server.wait(60)
    print("ms to the first token" + "".join(f"{f'p{percentile}':>9}" for percentile in PERCENTILES))
    for source, taken in zip(sources, times, strict=True):
        ranked = sorted(taken)
        figures = [1000 * ranked[min(len(ranked) - 1, len(ranked) * percentile // 100)] for percentile in PERCENTILES]
        print(f"{source[-21:]:<21}" + "".join(f"{figure:>9.2f}" for figure in figures))


def serve(source: str, port: int, options: argparse.Namespace) -> "subprocess.Popen[bytes]":
    """With a step in flight while the next is planned, as on a GPU."""
    return subprocess.Popen(
        [sys.executable, "-m", "quire.cli.main", "serve", options.model, "--port", str(port), "--async-scheduling",
         "--distributed-executor-backend", "fake"],
        env=os.environ | {"PYTHONPATH": source, "QUIRE_FAKE_LATENCY": str(options.latency)}, stderr=subprocess.DEVNULL,
    )  # fmt: skip


async def measure(ports: list[int], options: argparse.Namespace) -> list[list[float]]:
    for port in ports:
        while not any(b" 200 " in line for _, line in await ask(port, b"GET /readyz")):
            await asyncio.sleep(0.1)
    chance = random.Random(0)
    times: list[list[float]] = [[] for _ in ports]
    for _ in range(WARM_UP + options.requests):
        for port, taken in zip(ports, times, strict=True):
            prompts = [[chance.randrange(100, 10_000) for _ in range(options.input_len)] for _ in range(2)]
            await first_token(port, options.model, prompts[0])  # whoever comes after others finds cold caches
            taken.append(await first_token(port, options.model, prompts[1]))
    return [taken[WARM_UP:] for taken in times]


async def first_token(port: int, model: str, prompt: list[int]) -> float:
    request = {"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0, "ignore_eos": True, "stream": True}
    body = json.dumps(request).encode()
    began = time.perf_counter()
    lines = await ask(port, b"POST /v1/completions", body)
    came = [moment for moment, line in lines if line.startswith(b"data: ")]
    if not came:
        sys.exit(b"".join(line for _, line in lines).decode())
    return came[0] - began


async def ask(port: int, what: bytes, body: bytes = b"") -> list[tuple[float, bytes]]:
    """The lines of the answer, and when they came; none while nobody listens."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return []
    writer.write(what + HEAD % len(body) + body)
    lines = []
    while line := await reader.readline():
        lines.append((time.perf_counter(), line))
    writer.close()
    return lines


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    main()
