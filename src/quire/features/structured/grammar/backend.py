"""The seam: a library that can tell which tokens keep a text within a grammar."""

from collections.abc import Sequence
from typing import Protocol

from quire.types.structured import StructuredOutputsParams


class GrammarError(Exception):
    """What is wrong with a grammar, for whoever wrote it."""


class Matcher(Protocol):
    """Where one text stands in its grammar."""

    def copy(self) -> "Matcher":
        """Another text at the same place. What one of them uses up is not missing for another."""

    def accept(self, tokens: Sequence[int]) -> None:
        """The text goes on with these. If it may not, there is an `error`."""

    def valid(self, tokens: Sequence[int]) -> int:
        """With how many of these the text may go on."""

    def rollback(self, count: int) -> None:
        """The last so many tokens did not come. An `error` that they led to is gone with them."""

    def forced(self) -> list[int]:
        """The tokens that must come next; empty where there is a choice."""

    @property
    def done(self) -> bool:
        """The text is complete and nothing may follow but its end."""

    @property
    def error(self) -> str | None:
        """Why there are no more masks: the text left the grammar, or a step took more work than is allowed."""


class GrammarBackend(Protocol):
    words: int  # 32-bit words of a mask: bit i of the mask, counted from the lowest of word 0, is token i
    eos_ids: tuple[int, ...]

    def translate(self, params: StructuredOutputsParams) -> str:
        """What is asked in the library's own words. Raises GrammarError."""

    def load(self, source: str) -> Matcher:
        """Of what `translate` gave, at the beginning of a text. Raises GrammarError."""

    def fill(self, rows: Sequence[tuple[Matcher, int]], address: int, room: int) -> None:
        """Writes the mask of each matcher to its row of the `room` rows of masks at `address`, unless it has an `error`."""
