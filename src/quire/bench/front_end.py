"""Measure the API process between a client and an engine, with a server whose steps only sleep.

    alone    single requests of one token, one after the other: how long the client waits beyond the step
    many     concurrent requests of many tokens: processor time of the API process per request before the first token, per
             token, and after the last one

Processor time is read from Linux, which counts it for every thread. A single request costs more than one of many, since the
process has slept and its CPU caches are cold. That part is in the time that the client waits.
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

STEP_S = 0.01  # that a step sleeps
MAX_TEXT_TOKENS, MIN_TEXT_TOKENS = 384, 4  # less if the model has fewer positions
MAX_TOKEN_ID = 250  # nearly every vocabulary has these tokens
WARM_UP, ALONE, MANY, TOKENS, ROUNDS = 20, 100, 32, 64, 5
MEASURED_SHARE = 0.75  # of the tokens of concurrent requests: by then no request has ended
SETTLE_S = 0.1  # after the last token, until the requests are finished
CHUNK = b"data: {"
START_TIMEOUT_S, ANSWER_TIMEOUT_S, STOP_TIMEOUT_S = 120.0, 60.0, 60.0
HEAD = b" HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"


@dataclass(frozen=True)
class FrontCost:
    """Costs in seconds.

    alone: latency of a single request beyond its step
    request, token, finish: processor time of the API process for one of many requests: at its start, per token, at its end
    """

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
    """The requests that fit the model."""

    longest: int  # tokens of prompt and answer
    vocabulary: int

    @property
    def tokens(self) -> int:
        return min(TOKENS, self.longest // 4)

    @property
    def prompt(self) -> int:
        return self.longest - 2 * self.tokens

    def body(self, chance: random.Random, tokens: int) -> bytes:
        prompt = [chance.randrange(min(MAX_TOKEN_ID, self.vocabulary)) for _ in range(self.prompt)]
        request = {"model": "it", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        return json.dumps(request).encode()


def measure_front_end(
    command: Sequence[str], positions: int, vocabulary: int, variables: Mapping[str, str] | None = None
) -> FrontCost:
    """Start a server, measure it, and stop it. Of its model only configuration and tokenizer are used.

    command: to which flags are appended; variables: added to its environment
    """
    if not Path("/proc/self/schedstat").exists():
        raise ConfigError("--front-end needs Linux: the API process is measured by /proc")
    if positions < MIN_TEXT_TOKENS:
        raise ConfigError(f"--front-end needs a model with {MIN_TEXT_TOKENS} positions at least, this one has {positions}")
    requests, port = Requests(min(MAX_TEXT_TOKENS, positions), vocabulary), _free_port()
    flags = [
        "--port", str(port), "--distributed-executor-backend", "fake", "--load-format", "dummy", "--max-num-seqs", str(MANY),
        "--max-model-len", str(requests.longest), "--async-scheduling", "--disable-log-stats", "--disable-uvicorn-access-log",
        "--served-model-name", "it", *with_thread_option(),
    ]  # fmt: skip
    variables_of_server = {**(environment() or os.environ), **(variables or {}), "QUIRE_FAKE_LATENCY": str(STEP_S)}
    with tempfile.TemporaryFile() as output:
        server = subprocess.Popen([*command, *flags], env=variables_of_server, stdout=output, stderr=output)
        try:
            return asyncio.run(_measure(server, port, requests))
        except EngineError as error:
            output.seek(0)
            raise EngineError(f"{error}: {output.read().decode(errors='replace').strip()[-500:]}") from None
        finally:
            _end(server)


def _end(server: "subprocess.Popen[bytes]") -> None:
    server.terminate()
    try:
        server.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


async def _measure(server: "subprocess.Popen[bytes]", port: int, requests: Requests) -> FrontCost:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not any(b" 200 " in line for _, line in await _ask(port, b"GET /readyz")):
        if server.poll() is not None or time.monotonic() > deadline:
            raise EngineError("the server for --front-end did not start")
        await asyncio.sleep(0.1)
    chance, tokens = random.Random(0), requests.tokens

    async def single(count: int) -> list[float]:
        return [await _first_token(port, requests.body(chance, 1)) for _ in range(count)]

    async def many() -> tuple[float, float, float]:
        tally, bodies = Tally(MANY, tokens, server.pid), [requests.body(chance, 1 + tokens) for _ in range(MANY)]
        await asyncio.gather(*(_first_token(port, body, tally.counter(i)) for i, body in enumerate(bodies)))
        await asyncio.sleep(SETTLE_S)
        return tally.costs()

    await single(WARM_UP)
    alone = median(await single(ALONE)) - STEP_S
    await many()  # warm-up
    costs = [await many() for _ in range(ROUNDS)]
    return FrontCost(max(0.0, alone), *(max(0.0, median(parts)) for parts in zip(*costs, strict=True)))


class Tally:
    """API processor time under concurrent requests: until all have begun, after 75% of the tokens, at the end."""

    def __init__(self, requests: int, tokens: int, pid: int) -> None:
        self._counts, self._all, self._pid = [0] * requests, requests * (1 + tokens), pid
        self._marks = [(0, _busy(pid))]  # (chunks that have come, processor seconds)

    def counter(self, request: int) -> Callable[[], None]:
        def note() -> None:
            self._counts[request] += 1
            total = sum(self._counts)
            if (len(self._marks) == 1 and all(self._counts)) or (len(self._marks) == 2 and total >= MEASURED_SHARE * self._all):
                self._marks.append((total, _busy(self._pid)))

        return note

    def costs(self) -> tuple[float, float, float]:
        """Return seconds per request, per token, and after a request's last token."""
        (_, start), (begun, first), (most, then), end = *self._marks, _busy(self._pid)
        token = max(0.0, (then - first) / max(1, most - begun))
        count, total = len(self._counts), sum(self._counts)
        return (first - start - begun * token) / count, token, (end - then - (total - most) * token) / count


def _busy(pid: int) -> float:
    """Return the processor seconds of a process's main thread."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9


async def _first_token(port: int, body: bytes, on_chunk: Callable[[], None] | None = None) -> float:
    """Return the time to the first token; `on_chunk` is called at every chunk."""
    began = time.perf_counter()
    lines = await _ask(port, b"POST /v1/completions", body, on_chunk)
    came = [moment for moment, line in lines if line.startswith(CHUNK)]
    if not came or not any(line.startswith(b"data: [DONE]") for _, line in lines):
        raise EngineError(b"".join(line for _, line in lines).decode(errors="replace")[-300:] or "no answer came")
    return came[0] - began


async def _ask(
    port: int, what: bytes, body: bytes = b"", on_chunk: Callable[[], None] | None = None
) -> list[tuple[float, bytes]]:
    """Return the lines of the answer with their times; none if the server does not listen."""
    lines: list[tuple[float, bytes]] = []
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                writer.write(what + HEAD % len(body) + body)
                while line := await reader.readline():
                    lines.append((time.perf_counter(), line))
                    if on_chunk is not None and line.startswith(CHUNK):
                        on_chunk()
            finally:
                writer.close()
    except TimeoutError:
        raise EngineError(f"the server for --front-end did not answer within {ANSWER_TIMEOUT_S:g} s") from None
    except OSError:
        pass
    return lines


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
