"""What is between a client and an engine, measured: a server of ours whose steps only wait, and a client beside it.

    alone    one request after the other, each of one token: how long its client waits beyond the step
    many     requests together, of many tokens: what the API process does for each

The API process is told by its time on a processor, which Linux counts for every thread.
"""

import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from quire.types.errors import ConfigError, EngineError

STEP = 0.01  # seconds that a step waits
PROMPT, HIGHEST = 256, 250  # tokens of a prompt, and the largest of them: every vocabulary has these
WARM_UP, ALONE, MANY, TOKENS = 20, 100, 32, 64
START = 120.0  # seconds
HEAD = b" HTTP/1.1\r\nHost: here\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"


@dataclass(frozen=True)
class FrontCost:
    """Seconds: `alone` is what a lone request takes beyond its step, `request` and `token` are of the API process."""

    alone: float
    request: float
    token: float

    def line(self) -> str:
        busy = f"{1000 * self.request:.2f} ms for a request and {1e6 * self.token:.0f} µs for a token"
        return f"between client and engine: {1000 * self.alone:.2f} ms for one alone; of the API process {busy}"


def measure_front_end(model: str) -> FrontCost:
    """Starts a server and ends it. Of the model only configuration and tokenizer are used."""
    if not Path("/proc/self/schedstat").exists():
        raise ConfigError("--front-end needs Linux: the API process is measured by /proc")
    port = _free_port()
    command = [
        sys.executable, "-m", "quire.cli.main", "serve", model, "--port", str(port), "--distributed-executor-backend", "fake",
        "--load-format", "dummy", "--max-num-seqs", str(MANY), "--max-model-len", str(PROMPT + 2 * TOKENS),
        "--async-scheduling", "--disable-log-stats", "--disable-uvicorn-access-log", "--served-model-name", "it",
    ]  # fmt: skip
    with tempfile.TemporaryFile() as said:
        server = subprocess.Popen(command, env=os.environ | {"QUIRE_FAKE_LATENCY": str(STEP)}, stdout=said, stderr=said)
        try:
            return asyncio.run(_measure(server, port))
        except EngineError as error:
            said.seek(0)
            raise EngineError(f"{error}: {said.read().decode(errors='replace').strip()[-500:]}") from None
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(60)


async def _measure(server: "subprocess.Popen[bytes]", port: int) -> FrontCost:
    deadline = time.monotonic() + START
    while not any(b" 200 " in line for _, line in await _ask(port, b"GET /readyz")):
        if server.poll() is not None or time.monotonic() > deadline:
            raise EngineError("the server whose front end was to be measured did not start")
        await asyncio.sleep(0.1)
    chance = random.Random(0)

    async def lone(count: int) -> list[float]:
        return [await _first_token(port, chance, 1) for _ in range(count)]

    await lone(WARM_UP)
    began = _busy(server.pid)
    alone = median(await lone(ALONE)) - STEP
    each = (_busy(server.pid) - began) / ALONE
    began = _busy(server.pid)
    await asyncio.gather(*(_first_token(port, chance, 1 + TOKENS) for _ in range(MANY)))
    token = max(0.0, (_busy(server.pid) - began - MANY * each) / (MANY * TOKENS))
    return FrontCost(max(0.0, alone), max(0.0, each - token), token)


def _busy(pid: int) -> float:
    """Seconds that the main thread of a process has run."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9


async def _first_token(port: int, chance: random.Random, tokens: int) -> float:
    prompt = [chance.randrange(HIGHEST) for _ in range(PROMPT)]
    request = {"model": "it", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    body = json.dumps(request).encode()
    began = time.perf_counter()
    lines = await _ask(port, b"POST /v1/completions", body)
    came = [moment for moment, line in lines if line.startswith(b"data: {")]
    if not came:
        raise EngineError(b"".join(line for _, line in lines).decode(errors="replace")[-300:] or "no answer came")
    return came[0] - began


async def _ask(port: int, what: bytes, body: bytes = b"") -> list[tuple[float, bytes]]:
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


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
