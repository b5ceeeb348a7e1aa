"""What is between a client and an engine, measured: a server of ours whose steps only wait, and a client beside it.

    alone    one request after the other, each of one token: how long its client waits beyond the step
    many     requests together, of many tokens: what the API process does for each of them before the first token, for every
             token, and after the last

The API process is told by its time on a processor, which Linux counts for every thread. A lone request takes it longer than one
of many: it has slept, and so have its caches. That is told by how long the client waits.
"""

import asyncio
import json
import os
import random
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from quire.proc.spawn import environment, with_thread_option
from quire.types.errors import ConfigError, EngineError

STEP = 0.01  # seconds that a step waits
LONGEST, SHORTEST = 384, 4  # tokens of a text: half as many where a model has room for half
HIGHEST = 250  # token of a prompt: nearly every vocabulary has these
WARM_UP, ALONE, MANY, TOKENS, ROUNDS = 20, 100, 32, 64, 5
MOST = 0.75  # of the tokens of many: by then none has ended
SETTLING = 0.1  # seconds after the last token, for what is left to do
PART = b"data: {"
START, ANSWER, END = 120.0, 60.0, 60.0  # seconds at most
HEAD = b" HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"


@dataclass(frozen=True)
class FrontCost:
    """Seconds: `alone` is what a lone request takes beyond its step; the others are of the API process, with a request among
    others, with each token and after the last one."""

    alone: float
    request: float
    token: float
    finish: float

    def line(self) -> str:
        request, token, finish = 1000 * self.request, 1e6 * self.token, 1000 * self.finish
        busy = f"{request:.2f} ms for a request, {token:.0f} µs for a token, {finish:.2f} ms after the last"
        return f"between client and engine: {1000 * self.alone:.2f} ms for one alone; of the API process {busy}"


@dataclass(frozen=True)
class Requests:
    """That a model can have."""

    longest: int  # of its texts
    vocabulary: int

    @property
    def tokens(self) -> int:
        return min(TOKENS, self.longest // 4)

    @property
    def prompt(self) -> int:
        return self.longest - 2 * self.tokens

    def body(self, chance: random.Random, tokens: int) -> bytes:
        prompt = [chance.randrange(min(HIGHEST, self.vocabulary)) for _ in range(self.prompt)]
        request = {"model": "it", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        return json.dumps(request).encode()


def measure_front_end(
    command: Sequence[str], positions: int, vocabulary: int, variables: Mapping[str, str] | None = None
) -> FrontCost:
    """Starts a server by a `command` that takes more flags, with these `variables` in its environment, and ends it. Of its
    model only configuration and tokenizer are used."""
    if not Path("/proc/self/schedstat").exists():
        raise ConfigError("--front-end needs Linux: the API process is measured by /proc")
    if positions < SHORTEST:
        raise ConfigError(f"--front-end needs a model with {SHORTEST} positions at least, this one has {positions}")
    requests, port = Requests(min(LONGEST, positions), vocabulary), _free_port()
    flags = [
        "--port", str(port), "--distributed-executor-backend", "fake", "--load-format", "dummy", "--max-num-seqs", str(MANY),
        "--max-model-len", str(requests.longest), "--async-scheduling", "--disable-log-stats", "--disable-uvicorn-access-log",
        "--served-model-name", "it", *with_thread_option(),
    ]  # fmt: skip
    around = {**(environment() or os.environ), **(variables or {}), "QUIRE_FAKE_LATENCY": str(STEP)}
    with tempfile.TemporaryFile() as said:
        server = subprocess.Popen([*command, *flags], env=around, stdout=said, stderr=said)
        try:
            return asyncio.run(_measure(server, port, requests))
        except EngineError as error:
            said.seek(0)
            raise EngineError(f"{error}: {said.read().decode(errors='replace').strip()[-500:]}") from None
        finally:
            _end(server)


def _end(server: "subprocess.Popen[bytes]") -> None:
    server.terminate()
    try:
        server.wait(END)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


async def _measure(server: "subprocess.Popen[bytes]", port: int, requests: Requests) -> FrontCost:
    deadline = time.monotonic() + START
    while not any(b" 200 " in line for _, line in await _ask(port, b"GET /readyz")):
        if server.poll() is not None or time.monotonic() > deadline:
            raise EngineError("the server whose front end was to be measured did not start")
        await asyncio.sleep(0.1)
    chance, tokens = random.Random(0), requests.tokens

    async def lone(count: int) -> list[float]:
        return [await _first_token(port, requests.body(chance, 1)) for _ in range(count)]

    async def many() -> tuple[float, float, float]:
        tally, bodies = Tally(MANY, tokens, server.pid), [requests.body(chance, 1 + tokens) for _ in range(MANY)]
        await asyncio.gather(*(_first_token(port, body, tally.heard(i)) for i, body in enumerate(bodies)))
        await asyncio.sleep(SETTLING)
        return tally.costs()

    await lone(WARM_UP)
    alone = median(await lone(ALONE)) - STEP
    await many()  # what it does for the first time then
    costs = [await many() for _ in range(ROUNDS)]
    return FrontCost(max(0.0, alone), *(max(0.0, median(parts)) for parts in zip(*costs, strict=True)))


class Tally:
    """Of requests together: how long the API process was busy until all had begun, until most was told, and at the end."""

    def __init__(self, requests: int, tokens: int, pid: int) -> None:
        self._counts, self._all, self._pid = [0] * requests, requests * (1 + tokens), pid
        self._marks = [(0, _busy(pid))]  # lines that had come, seconds

    def heard(self, request: int) -> Callable[[], None]:
        def note() -> None:
            self._counts[request] += 1
            told = sum(self._counts)
            if (len(self._marks) == 1 and all(self._counts)) or (len(self._marks) == 2 and told >= MOST * self._all):
                self._marks.append((told, _busy(self._pid)))

        return note

    def costs(self) -> tuple[float, float, float]:
        """Now that all is done: for a request, for a token, and after its last."""
        (_, start), (begun, first), (most, then), end = *self._marks, _busy(self._pid)
        token = max(0.0, (then - first) / max(1, most - begun))
        count, told = len(self._counts), sum(self._counts)
        return (first - start - begun * token) / count, token, (end - then - (told - most) * token) / count


def _busy(pid: int) -> float:
    """Seconds that the main thread of a process has run."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9


async def _first_token(port: int, body: bytes, heard: Callable[[], None] | None = None) -> float:
    """`heard` is called with every part of the answer."""
    began = time.perf_counter()
    lines = await _ask(port, b"POST /v1/completions", body, heard)
    came = [moment for moment, line in lines if line.startswith(PART)]
    if not came or not any(line.startswith(b"data: [DONE]") for _, line in lines):
        raise EngineError(b"".join(line for _, line in lines).decode(errors="replace")[-300:] or "no answer came")
    return came[0] - began


async def _ask(port: int, what: bytes, body: bytes = b"", heard: Callable[[], None] | None = None) -> list[tuple[float, bytes]]:
    """The lines of the answer, and when they came; none while nobody listens."""
    lines: list[tuple[float, bytes]] = []
    try:
        async with asyncio.timeout(ANSWER):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                writer.write(what + HEAD % len(body) + body)
                while line := await reader.readline():
                    lines.append((time.perf_counter(), line))
                    if heard is not None and line.startswith(PART):
                        heard()
            finally:
                writer.close()
    except TimeoutError:
        raise EngineError(f"the server whose front end was to be measured did not answer within {ANSWER:g} s") from None
    except OSError:
        pass
    return lines


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
