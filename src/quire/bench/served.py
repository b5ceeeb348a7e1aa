"""How long the steps of a server take that is being loaded: from one part of its streams to the next, with one stream and with
many. Beside the engine, the API process and the client want cores then, and all of them memory."""

import asyncio
import random
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from quire.bench.front_end import body, complete, wait_ready, with_server

ROWS = (1, 4, 16)  # streams at a time
PROMPT, TOKENS = 32, 64  # of each, as far as there is room
EDGE = 8  # parts at the beginning and at the end of a stream that do not count: others come and go then
ROUNDS, LONG = 5, 20.0  # of each number of streams, or so many seconds
START, ANSWER = 1800.0, 1800.0  # seconds at most


@dataclass(frozen=True)
class ServedTurn:
    """From the end of a step to the end of the next, with so many rows of one token, each of which looks at so many keys."""

    rows: int
    keys: float
    seconds: float


def measure_served(
    command: Sequence[str], most: int, longest: int, vocabulary: int, variables: Mapping[str, str]
) -> list[ServedTurn]:
    """The medians. `most` streams at a time, texts of at most `longest` tokens. See `measure_front_end`."""
    tokens = min(TOKENS, longest // 2)
    prompt = min(PROMPT, longest - tokens)
    edge = min(EDGE, tokens // 4)

    async def scene(server: "subprocess.Popen[bytes]", port: int) -> list[ServedTurn]:
        await wait_ready(server, port, START)
        chance = random.Random(0)

        async def round_of(rows: int) -> list[float]:
            asked = [body(chance, prompt, tokens, vocabulary) for _ in range(rows)]
            came = await asyncio.gather(*(complete(port, each, seconds=ANSWER) for each in asked))
            begun, over = max(parts[0] for parts in came), min(parts[-1] for parts in came)
            return [
                then - now
                for parts in came
                for now, then in pairwise(parts[edge : len(parts) - edge])
                if begun <= now and then <= over
            ]

        found: list[ServedTurn] = []
        for rows in [count for count in ROWS if count <= most]:
            began, gaps = time.perf_counter(), list[float]()
            await round_of(rows)  # what it does for the first time then
            for _ in range(ROUNDS):
                gaps += await round_of(rows)
                if time.perf_counter() - began > LONG:
                    break
            if gaps:
                found.append(ServedTurn(rows, prompt + tokens / 2, median(gaps)))
        return found

    return with_server(command, variables, scene)
