"""The token budget of a step.

Decoding requests wait for the prompts in the same step, so steps are short while few prompt tokens wait. But each step
reads the keys and values of all running requests: the more there is to read, the more prompt tokens a step needs so that
this is a small part of it.

    tokens = max(least, waiting / 4 + running, pages in use · per_page)      above `usual`, only a much larger budget

On a CPU the tokens themselves determine the step time, which is measured (`TimedBudget`). An embedding of an image or video
that a step encodes counts as a token.
"""

from dataclasses import dataclass
from typing import Protocol

MIN_TOKENS, USUAL_TOKENS = 1024, 2048  # the second is the largest step with a CUDA graph (`runner/buckets.py`)
BACKLOG_STEPS = 4  # in which waiting prompts should be computed, as far as `usual` allows
MIN_PROMPT_TOKENS = 512  # of a step, however many requests run
LONG_STEP_RATIO = 1.5  # times `usual`: minimum of a longer step
MACHINE_BALANCE = 170  # operations of a GPU per byte read: measured on an H200, others differ by a fifth
READING_SHARE = 0.1  # maximum time for reading keys and values, as a share of the time for prompts
PREFILL_S = 0.25  # time for prompts in a step while other requests decode
PREFILL_ALONE_S = 1.0  # and while none does
MIN_CHUNK, MIN_CHUNK_ALONE = 16, 256  # prompt tokens of a step, however long they take
INITIAL_CHUNK = 128  # prompt tokens before anything was measured
HALF_WEIGHT_TOKENS = 32  # prompt tokens with which a measurement counts as much as all before it


class Budget(Protocol):
    def tokens(self, pages: int, running: int, waiting: int, decoding: bool) -> int:
        """Return the tokens of the next step.

        pages: in use; running: requests with a token each; waiting: prompt tokens; decoding: some requests decode
        """

    def record_step_time(self, rows: int, tokens: int, seconds: float) -> None:
        """Record the duration of a step."""


@dataclass(frozen=True)
class StepBudget:
    most: int
    least: int
    usual: int
    prompt_reserve: int  # prompt tokens of a step, however many requests run
    per_page: float

    @classmethod
    def constant(cls, tokens: int) -> "StepBudget":
        return cls(tokens, tokens, tokens, 0, 0.0)

    @classmethod
    def following(cls, most: int, page_bytes: int, parameters: int) -> "StepBudget":
        """Return the budget of a model on a GPU, where a token takes two operations per parameter."""
        per_page = page_bytes * MACHINE_BALANCE / (2 * parameters * READING_SHARE)
        return cls(most, min(MIN_TOKENS, most), min(USUAL_TOKENS, most), MIN_PROMPT_TOKENS, per_page)

    def tokens(self, pages: int, running: int, waiting: int, decoding: bool = True) -> int:  # noqa: ARG002
        paying = int(pages * self.per_page)
        if paying < LONG_STEP_RATIO * self.usual:
            paying = min(max(paying, waiting // BACKLOG_STEPS + running, self.least), self.usual)
        return min(max(paying, running + self.prompt_reserve), self.most)

    def record_step_time(self, rows: int, tokens: int, seconds: float) -> None:
        """Ignore it: this budget does not depend on times."""


class TimedBudget:
    """A budget by measured times: prompts may take `PREFILL_S` of a step, or as long as its decode rows.

    So decoding has at least half of its speed, and prompts at least half of the processor time.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._plain = 0.0  # seconds of a step without prompts
        self._each = 0.0  # seconds that a prompt token adds; 0 = not known

    def tokens(self, pages: int, running: int, waiting: int, decoding: bool) -> int:  # noqa: ARG002
        seconds, minimum = (
            (max(PREFILL_S - self._plain, self._plain), MIN_CHUNK) if decoding else (PREFILL_ALONE_S, MIN_CHUNK_ALONE)
        )
        count = int(seconds / self._each) // MIN_CHUNK * MIN_CHUNK if self._each else INITIAL_CHUNK
        return min(running + max(count, minimum), self._most)

    def record_step_time(self, rows: int, tokens: int, seconds: float) -> None:
        more = tokens - rows
        if not more:
            self._plain += (seconds - self._plain) / 2 if self._plain else seconds
        elif seconds > self._plain:
            each = (seconds - self._plain) / more
            self._each += (each - self._each) * (more / (more + HALF_WEIGHT_TOKENS) if self._each else 1.0)
