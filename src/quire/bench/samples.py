"""The requests of a benchmark: prompts with output lengths, random prompts, and the named workloads."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.bench.metrics import check_count

Ids = npt.NDArray[np.int32]

# Each is one token in nearly every byte-pair vocabulary when a space stands before it.
WORDS = tuple(
    """
    time year people way day man thing woman life child world school state family student group country problem hand part
    place case week company system program question work government number night point home water room mother area money
    story fact month lot right study book eye job word business issue side kind head house service friend father power hour
    game line end member law car city community name president team minute idea body information back parent face others
    level office door health person art war history party result change morning reason research girl guy moment air teacher
    force education foot boy age policy process music market sense nation plan college interest death experience effect use
    class control care field development role effort rate heart drug show leader light voice wife police mind price report
    decision son view relationship town road arm difference value building action season society tax director position
    player record paper space ground form event official matter center couple site project activity star table need court
    oil situation cost industry figure street image phone data picture practice piece land product doctor wall patient
    worker news test movie north love support technology step baby computer type attention film tree source red green blue
    white black big small high low long short young old new good great first last next early late open hard clear real best
    better sure free true full special easy strong possible whole certain simple left past hot cold fine common poor natural
    """.split()  # noqa: SIM905
)


@dataclass(frozen=True)
class Sample:
    """One request: a prompt (text, or token ids) or chat messages."""

    prompt: str | Ids | None
    output_tokens: int
    prompt_tokens: int | None = None  # if it is known before the answer
    messages: list[dict[str, Any]] | None = None
    at: float | None = None  # seconds after the start, if the data set has times


class RandomPrompts:
    """Writes random prompts of a given length: token ids below `vocab_size`, or words, about one token each.

    Ids at both ends of the vocabulary, where special tokens are, are left out.
    """

    def __init__(self, vocab_size: int | None) -> None:
        self.vocab_size = vocab_size
        if vocab_size is None:
            self._low, self._high = 0, len(WORDS)
            return
        check_count("vocab-size", vocab_size, 2, 2**31 - 1)
        margin = min(100, vocab_size // 10)
        self._low, self._high = margin, vocab_size - margin

    @property
    def text(self) -> bool:
        return self.vocab_size is None

    def draw(self, rng: np.random.Generator, length: int) -> Ids:
        return rng.integers(self._low, self._high, length, dtype=np.int32)

    def write(self, symbols: Ids) -> str | Ids:
        return " ".join(WORDS[symbol] for symbol in symbols) if self.text else symbols


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
