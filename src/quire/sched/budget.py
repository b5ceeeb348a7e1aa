"""How many tokens the next step may have.

Whoever generates waits for the prompts that run beside its token, so steps are short while few prompt tokens wait. But each
step reads the keys and values of all who run once more: the more there is to read, the more prompt tokens it takes to make that
a small part of the step.

    tokens = max(least, waiting / 4 + running, pages in use · per_page)      from `usual` on, only what is much more

Where the tokens themselves make a step long (a CPU), it is measured how long (`TimedBudget`).
"""

from dataclasses import dataclass
from typing import Protocol

LEAST, USUAL = 1024, 2048  # the second is what steps are recorded for as CUDA graphs (`runner/buckets.py`)
STEPS = 4  # in which those who wait are to be through, as far as `usual` allows
BESIDE = 512
WORTH = 1.5  # times `usual`: what a longer step has at least
MACHINE_BALANCE = 170  # operations that a GPU does while it reads a byte: of an H200 as measured, others differ by a fifth
READING = 0.1  # how much of the time for prompts the reading may take
WAIT = 0.25  # seconds that prompts may take in a step while others wait for their next token
ALONE = 1.0  # and while nobody does
FEWEST, FEWEST_ALONE = 16, 256  # prompt tokens of a step, however long they take
UNKNOWN = 128  # before anything was measured
STEADY = 32  # prompt tokens after which a measurement counts as much as all before it


class Budget(Protocol):
    def tokens(self, pages: int, running: int, waiting: int, decoding: bool) -> int:
        """`pages` are in use, `running` requests have a token each, and `waiting` prompt tokens are left. `decoding`: some wait
        for their next token."""

    def took(self, rows: int, tokens: int, seconds: float) -> None:
        """A step of so many rows and tokens took so long."""


@dataclass(frozen=True)
class StepBudget:
    most: int
    least: int
    usual: int
    beside: int  # room for prompt tokens, however many run
    per_page: float

    @classmethod
    def constant(cls, tokens: int) -> "StepBudget":
        return cls(tokens, tokens, tokens, 0, 0.0)

    @classmethod
    def following(cls, most: int, page_bytes: int, parameters: int) -> "StepBudget":
        """For a model of so many parameters on a GPU: a token takes two operations for each of them."""
        per_page = page_bytes * MACHINE_BALANCE / (2 * parameters * READING)
        return cls(most, min(LEAST, most), min(USUAL, most), BESIDE, per_page)

    def tokens(self, pages: int, running: int, waiting: int, decoding: bool = True) -> int:  # noqa: ARG002
        paying = int(pages * self.per_page)
        if paying < WORTH * self.usual:
            paying = min(max(paying, waiting // STEPS + running, self.least), self.usual)
        return min(max(paying, running + self.beside), self.most)

    def took(self, rows: int, tokens: int, seconds: float) -> None:
        """It does not matter here."""


class TimedBudget:
    """Prompts may take `WAIT` seconds of a step, or as long as the tokens beside them: those go at half their pace at least,
    and prompts have half of the machine at least."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._plain = 0.0  # seconds of a step without prompts
        self._each = 0.0  # seconds that a prompt token adds; 0 = not known

    def tokens(self, pages: int, running: int, waiting: int, decoding: bool) -> int:  # noqa: ARG002
        wait, fewest = (max(WAIT - self._plain, self._plain), FEWEST) if decoding else (ALONE, FEWEST_ALONE)
        count = int(wait / self._each) // FEWEST * FEWEST if self._each else UNKNOWN
        return min(running + max(count, fewest), self._most)

    def took(self, rows: int, tokens: int, seconds: float) -> None:
        more = tokens - rows
        if not more:
            self._plain += (seconds - self._plain) / 2 if self._plain else seconds
        elif seconds > self._plain:
            each = (seconds - self._plain) / more
            self._each += (each - self._each) * (more / (more + STEADY) if self._each else 1.0)
