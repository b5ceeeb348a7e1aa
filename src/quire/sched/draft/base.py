"""The seam: whoever can guess from a text how it goes on is a host drafter. One file each; `make` knows them by name.

A package brings its own under the entry point group `quire.drafters`, or is named by `custom_class`.
"""

from array import array
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

Longs = npt.NDArray[np.int64]


class Text(NamedTuple):
    tokens: "array[int]"  # prompt and output; to be read, and not to be kept
    prompt: int  # how many of them are the prompt
    scope: tuple[str, ...]  # whose it is: what was learnt from a text is for texts of the same scope only


class HostDrafter(Protocol):
    def propose(self, text: Text, most: int) -> Sequence[int]:
        """Up to `most` tokens that may come next, likely ones only. Asked whenever the text has grown: it has to be quick."""

    def finished(self, text: Text) -> None:
        """The text is complete, or was given up."""


class BatchDrafter(Protocol):
    """One that takes its time, so it is asked for all texts of a step together, and only where that pays."""

    def propose_all(self, texts: Mapping[str, Text], most: int) -> Mapping[str, Sequence[int]]:
        """Up to `most` tokens that may come next, by the names of the texts. A text only grows."""

    def leave(self, name: str) -> None:
        """The text is complete, or was given up."""

    def idle(self) -> bool:
        """Uses a moment without work. False = there is nothing to prepare."""

    def close(self) -> None:
        """Gives memory back."""


def matches(tokens: npt.NDArray[np.int32], least: int, most: int) -> tuple[Longs, int]:
    """Where the last few tokens stood before: the places behind them, rising, and how many are equal there, from `least` to
    `most`. All places have the longest match that there is; none, and 0, if there is none."""
    none = np.empty(0, np.int64)
    if len(tokens) <= least:
        return none, 0
    last = len(tokens) - 1
    places: Longs = np.flatnonzero(tokens[:last] == tokens[last])  # of a last token
    length = 1
    while len(places) and length < min(most, last):
        places_before = places[places >= length]
        longer = places_before[tokens[places_before - length] == tokens[last - length]]
        if not len(longer):
            break
        places, length = longer, length + 1
    return (places + 1, length) if len(places) and length >= least else (none, 0)
