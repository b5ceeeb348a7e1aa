"""How many tokens the next step may have.

Whoever generates waits for the prompts that run beside its token, so steps are short while few prompt tokens wait. But each
step reads the keys and values of all who run once more: the more there is to read, the more prompt tokens it takes to make that
a small part of the step.

    tokens = max(least, waiting / 4 + running, pages in use · per_page)      from `usual` on, only what is much more
"""

from dataclasses import dataclass

LEAST, USUAL = 1024, 2048  # the second is what steps are recorded for as CUDA graphs (`runner/buckets.py`)
STEPS = 4  # in which those who wait are to be through, as far as `usual` allows
BESIDE = 512
WORTH = 1.5  # times `usual`: what a longer step has at least
MACHINE_BALANCE = 170  # operations that a GPU does while it reads a byte: of an H200 as measured, others differ by a fifth
READING = 0.1  # how much of the time for prompts the reading may take


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

    def tokens(self, pages: int, running: int, waiting: int) -> int:
        """`pages` are in use, `running` requests have a token each, and `waiting` prompt tokens are left."""
        paying = int(pages * self.per_page)
        if paying < WORTH * self.usual:
            paying = min(max(paying, waiting // STEPS + running, self.least), self.usual)
        return min(max(paying, running + self.beside), self.most)
