"""The named offline workloads: random token ids with fixed seeds, so that every engine that runs them does the same work.

They know a vocabulary's size and nothing else. A name stands for its prompts forever: figures of years are compared by it.
"""

import random
from collections.abc import Callable

import numpy as np

from quire.bench.samples import Sample

Dice = random.Random
MARGIN = 10  # ids at both ends of the vocabulary that are left out


def single(dice: Dice, vocab_size: int) -> list[Sample]:
    """One user, latency."""
    return [_sample(_ids(dice, 128, vocab_size), 512)]


def mixed(dice: Dice, vocab_size: int) -> list[Sample]:
    """Many users, all lengths."""
    return [_sample(_ids(dice, dice.randint(100, 1024), vocab_size), dice.randint(100, 1024)) for _ in range(256)]


def batch(dice: Dice, vocab_size: int) -> list[Sample]:
    """More requests than run at once."""
    return [_sample(_ids(dice, 512, vocab_size), 256) for _ in range(1024)]


def prefill(dice: Dice, vocab_size: int) -> list[Sample]:
    """Long prompts and one token each."""
    return [_sample(_ids(dice, 4096, vocab_size), 1) for _ in range(64)]


def longctx(dice: Dice, vocab_size: int) -> list[Sample]:
    """Long contexts."""
    return [_sample(_ids(dice, 16384, vocab_size), 256) for _ in range(32)]


def shared(dice: Dice, vocab_size: int) -> list[Sample]:
    """One long prefix for all."""
    head = _ids(dice, 2048, vocab_size)
    return [_sample(head + _ids(dice, 64, vocab_size), 64) for _ in range(512)]


def cpu1(dice: Dice, vocab_size: int) -> list[Sample]:
    """One user of a laptop."""
    return [_sample(_ids(dice, 128, vocab_size), 64)]


def cpu16(dice: Dice, vocab_size: int) -> list[Sample]:
    """What a small machine can run at once."""
    return [_sample(_ids(dice, 128, vocab_size), 64) for _ in range(16)]


def cpu64(dice: Dice, vocab_size: int) -> list[Sample]:
    """A full batch on a small machine."""
    return [_sample(_ids(dice, 64, vocab_size), 64) for _ in range(64)]


WORKLOADS: dict[str, Callable[[Dice, int], list[Sample]]] = {
    make.__name__: make for make in (single, mixed, batch, prefill, longctx, shared, cpu1, cpu16, cpu64)
}


def workload(name: str, vocab_size: int) -> list[Sample]:
    return WORKLOADS[name](random.Random(f"wl-{name}"), vocab_size)


def _ids(dice: Dice, count: int, vocab_size: int) -> list[int]:
    return [dice.randrange(MARGIN, vocab_size - MARGIN) for _ in range(count)]


def _sample(ids: list[int], output_tokens: int) -> Sample:
    return Sample(np.array(ids, dtype=np.int32), output_tokens, len(ids))
