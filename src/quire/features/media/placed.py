"""Where the images and videos of a request are among its tokens. Nothing here imports torch."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from quire.features.media.positions import AXES, prompt_positions
from quire.types.media import Bidirectional, MediaItem, decode_offset
from quire.types.plan import Longs


class EmbeddedPart(NamedTuple):
    """Consecutive tokens of a row whose embeddings come from one item."""

    position: int  # of the first
    item: int
    first: int  # among the item's embeddings
    tokens: int


class PlacedMedia:
    """The items of a request: which tokens are embedded, rotary positions, and which tokens attend to later ones."""

    def __init__(
        self, items: Sequence[MediaItem], prompt_length: int, axes: int = 1, bidirectional: Bidirectional = ""
    ) -> None:
        """axes: of rotary positions. bidirectional: tokens that attend to later ones."""
        self.items = items
        self._prompt_length = prompt_length
        self._parts = list[EmbeddedPart]()
        for index, item in enumerate(items):
            first = 0
            for position, count in item.spans:
                self._parts.append(EmbeddedPart(position, index, first, count))
                first += count
        self._starts = [part.position for part in self._parts]
        self._ends = [part.position + part.tokens for part in self._parts]
        self.end = self._ends[-1] if self._ends else 0  # after the last embedded token
        self._offset, self._shifts = 0, np.empty((AXES, 0), np.int64)
        if axes == AXES and any(item.grid is not None for item in items):
            self._offset = decode_offset(items, prompt_length)
            self._shifts = prompt_positions(items, prompt_length) - np.arange(prompt_length, dtype=np.int64)
        self._bidirectional = bidirectional

    def embedded(self, begin: int, end: int) -> Iterator[EmbeddedPart]:
        """Yield the embedded tokens among positions begin ... end."""
        for part in self._parts[bisect_right(self._ends, begin) : bisect_left(self._starts, end)]:
            first, last = max(begin, part.position), min(end, part.position + part.tokens)
            yield EmbeddedPart(first, part.item, part.first + first - part.position, last - first)

    def spans(self, begin: int, end: int) -> list[tuple[int, int]]:
        """Return first positions and ends of spans, within which tokens attend to all, that have tokens in begin ... end."""
        if self._bidirectional == "prompt":
            return [(0, self._prompt_length)] if begin < self._prompt_length else []
        if self._bidirectional == "item":
            low, high = bisect_right(self._ends, begin), bisect_left(self._starts, end)
            return list(zip(self._starts[low:high], self._ends[low:high], strict=True))
        return []

    @property
    def has_shifts(self) -> bool:
        """Return whether any rotary position differs from the position."""
        return bool(self._offset) or bool(self._shifts.any())

    def shift(self, begin: int, end: int) -> int | None:
        """Return what is added to the positions begin ... end for rotary positions; None: it is not the same for all."""
        if begin >= self._prompt_length or not self._shifts.shape[1]:
            return self._offset
        shifts = self._shifts[:, begin:end]
        first = int(shifts[0, 0])
        if end > self._prompt_length and first != self._offset:
            return None
        return first if bool((shifts == first).all()) else None

    def shifts(self, begin: int, end: int) -> Longs:
        """Return what is added to each position, [3, end - begin]."""
        found = np.full((AXES, end - begin), self._offset, np.int64)
        prompt = self._shifts[:, begin:end]
        found[:, : prompt.shape[1]] = prompt
        return found
