"""Generated traffic in the shape of recorded traces: conversations as in ShareGPT, agents, and Mooncake's requests.

    chat       short system prompts, few of them often; turns with pauses of minutes; most messages short, some long
    agent      long instructions shared by many tasks; each step adds a tool's result, seconds later
    mooncake   blocks of 512 tokens: sessions over long documents, one preamble for all, and many prompts that come once

Lengths are log-normal, numbers of turns geometric, sessions arrive by Poisson. Everything depends on the seed only.
"""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from quire.sim.trace import MOONCAKE_BLOCK, Arrival, Blocks, Contents, Trace, mooncake_arrivals


@dataclass(frozen=True)
class Lengths:
    """Log-normal lengths, in tokens."""

    median: float
    spread: float  # standard deviation of the logarithm
    most: int

    def draw(self, rng: np.random.Generator, scale: float) -> int:
        length = min(self.most, math.exp(rng.normal(math.log(self.median), self.spread)))
        return max(1, round(length * scale))


@dataclass(frozen=True)
class Sessions:
    """Sessions whose prompts grow: each is the session up to then and a new message."""

    per_second: float  # sessions
    beginnings: tuple[int, ...]  # tokens of the shared ones; the first is the most frequent (Zipf)
    turns: float  # mean
    messages: Lengths
    answers: Lengths
    pauses: Lengths  # seconds

    def arrivals(self, rng: np.random.Generator, requests: int, scale: float) -> list[Arrival]:
        contents, start, found = Contents(), 0.0, list[Arrival]()
        shared = [(contents.new(), max(1, round(length * scale))) for length in self.beginnings]
        weights = 1 / np.arange(1, len(shared) + 1)
        while len(found) < 2 * requests:  # sessions that begin later have their place among these
            start += rng.exponential(1 / self.per_second)
            at = start
            history: Blocks = (shared[rng.choice(len(shared), p=weights / weights.sum())],)
            for _ in range(rng.geometric(1 / self.turns)):
                history = (*history, (contents.new(), self.messages.draw(rng, scale)))
                output, echo = self.answers.draw(rng, scale), contents.new()
                found.append(Arrival(at, history, output, echo))
                history = (*history, (echo, output))
                at += self.pauses.draw(rng, 1.0)
        return sorted(found, key=lambda arrival: arrival.at)[:requests]


CHAT = Sessions(
    0.5, (700, 250, 120, 60, 400, 90, 1200, 30), 3.5, Lengths(60, 1.4, 4000), Lengths(160, 0.9, 1500), Lengths(60, 0.8, 900)
)
AGENT = Sessions(0.12, (6000, 3500, 9000, 2200), 12.0, Lengths(350, 1.2, 8000), Lengths(90, 0.7, 800), Lengths(8, 0.9, 300))
SESSIONS_PER_SECOND, PREAMBLE_BLOCKS, SESSION_SHARE, FOLLOWING = 0.8, 2, 0.4, 0.7


def mooncake_lines(rng: np.random.Generator, requests: int, scale: float = 1.0) -> Iterator[str]:
    """Yield lines of Mooncake's format: timestamp (ms), input_length, output_length, hash_ids."""
    documents, answers, pauses = Lengths(6000, 0.9, 60_000), Lengths(150, 0.9, 1500), Lengths(45, 0.8, 600)
    start, fresh, found = 0.0, PREAMBLE_BLOCKS, list[tuple[float, int, int, list[int]]]()
    while len(found) < 2 * requests:
        start += rng.exponential(1 / SESSIONS_PER_SECOND)
        at, hashes = start, list(range(PREAMBLE_BLOCKS)) if rng.random() < 0.7 else []
        turns = rng.geometric(1 - FOLLOWING) if rng.random() < SESSION_SHARE else 1
        for turn in range(turns):
            new = documents.draw(rng, 1.0 if turn == 0 else 0.15)
            added = max(1, new // MOONCAKE_BLOCK)
            hashes = [*hashes, *range(fresh, fresh + added)]
            fresh += added + 1
            partial = int(rng.integers(1, MOONCAKE_BLOCK))
            found.append((at, len(hashes) * MOONCAKE_BLOCK - partial, answers.draw(rng, scale), hashes))
            at += pauses.draw(rng, 1.0)
    for at, length, output, hashes in sorted(found, key=lambda request: request[0])[:requests]:
        line = {"timestamp": round(1000 * at), "input_length": length, "output_length": output, "hash_ids": hashes}
        yield json.dumps(line)


def _mooncake(rng: np.random.Generator, requests: int, scale: float) -> list[Arrival]:
    arrivals = mooncake_arrivals("mooncake", mooncake_lines(rng, requests, scale))
    if scale == 1.0:
        return arrivals
    return [Arrival(each.at, _scaled(each.blocks, scale), each.output, each.echo) for each in arrivals]


def _scaled(blocks: Blocks, scale: float) -> Blocks:
    return tuple((content, max(1, round(tokens * scale))) for content, tokens in blocks)


SHAPES: dict[str, Callable[[np.random.Generator, int, float], list[Arrival]]] = {
    "chat": CHAT.arrivals,
    "agent": AGENT.arrivals,
    "mooncake": _mooncake,
}
USUAL_REQUESTS = 1000


def shaped_trace(name: str, requests: int | None, seed: int, scale: float = 1.0) -> Trace:
    """Return traffic of a shape. scale: of all lengths in tokens, for small caches."""
    found = SHAPES[name](np.random.default_rng(seed), requests or USUAL_REQUESTS, scale)
    first = found[0].at
    return Trace(name, [Arrival(each.at - first, each.blocks, each.output, each.echo) for each in found])
