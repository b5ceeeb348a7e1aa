"""The interface to a grammar library, which computes the tokens that keep a text within a grammar."""

from collections.abc import Sequence
from typing import Protocol

from quire.types.structured import StructuredOutputsParams


class GrammarError(Exception):
    """An error in a grammar, with a message for its author."""


class Matcher(Protocol):
    """The state of one text in its grammar."""

    def copy(self) -> "Matcher":
        """Return an independent matcher in the same state, with limits of its own."""

    def accept(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text. Tokens that are not allowed set `error`."""

    def valid(self, tokens: Sequence[int]) -> int:
        """Return the number of leading tokens that are allowed."""

    def rollback(self, count: int) -> None:
        """Remove the last `count` tokens, and an `error` that they caused."""

    def forced(self) -> list[int]:
        """Return the tokens that must come next; empty if there is a choice."""

    @property
    def done(self) -> bool:
        """The text is complete and nothing may follow but its end."""

    @property
    def error(self) -> str | None:
        """Why there are no more masks: the text left the grammar, or a step exceeded its work limit."""


class GrammarBackend(Protocol):
    words: int  # 32-bit words of a mask: bit i of the mask, counted from the lowest of word 0, is token i
    eos_ids: tuple[int, ...]

    def translate(self, params: StructuredOutputsParams) -> str:
        """Return the constraint as source for `load`. Raises GrammarError."""

    def load(self, source: str) -> Matcher:
        """Return the matcher of a source, at the beginning of a text. Raises GrammarError."""

    def fill(self, rows: Sequence[tuple[Matcher, int]], address: int, room: int) -> None:
        """Write each matcher's mask to its row of the `room` rows at `address`, unless the matcher has an `error`."""
