"""Rotary positions of prompts with images and videos, for models whose rotary positions have three axes (M-RoPE).

A text token has one position on all axes. A token of a grid has the position of its frame, its row and its column, counted
from the position at which the grid begins; the text after a grid continues after the larger number of its rows and columns.

    text  t t t t          [ 0 1 2 3 ]
    grid  1 x 2 x 3        frame [ 4 4 4 4 4 4 ]   row [ 4 4 4 5 5 5 ]   column [ 4 5 6 4 5 6 ]
    text  t t              [ 7 8 ]

Tokens after the prompt continue after the highest position of the prompt, whichever axis it is on.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from quire.types.media import MediaItem

Positions = npt.NDArray[np.int32]
AXES = 3  # frame, row, column


class Part(NamedTuple):
    """A range of prompt tokens: text, or the frames of one grid."""

    start: int  # of its first token in the prompt
    tokens: int
    first: int  # rotary position where it begins
    item: MediaItem | None  # None: text

    @property
    def frames(self) -> npt.NDArray[np.int64]:
        """Return the frame positions of a grid, counted from `first`."""
        assert self.item is not None and self.item.grid is not None
        _, rows, columns = self.item.grid
        # float32, in which the reference multiplies
        return (np.arange(self.tokens // (rows * columns), dtype=np.float32) * np.float32(self.item.interval)).astype(np.int64)

    @property
    def highest(self) -> int:
        """Return the highest rotary position."""
        if self.item is None or self.item.grid is None:
            return self.first + self.tokens - 1
        return self.first + max(int(self.frames[-1]), *(side - 1 for side in self.item.grid[1:]))


def prompt_positions(items: Sequence[MediaItem], length: int) -> Positions:
    """Return the rotary positions of a prompt, [3, length]. items: by rising position"""
    positions = np.empty((AXES, length), np.int32)
    for part in _parts(items, length):
        found = positions[:, part.start : part.start + part.tokens]
        if part.item is None or part.item.grid is None:
            found[:] = np.arange(part.first, part.first + part.tokens)
            continue
        _, rows, columns = part.item.grid
        axes = np.meshgrid(part.frames, np.arange(rows), np.arange(columns), indexing="ij")
        found[:] = np.stack(axes).reshape(AXES, -1) + part.first
    return positions


def decode_offset(items: Sequence[MediaItem], length: int) -> int:
    """Return what is added to the position of a token after the prompt, on all axes; 0: nothing differs from text."""
    return max((part.highest for part in _parts(items, length)), default=-1) + 1 - length


def decode_jump(items: Sequence[MediaItem], length: int) -> int:
    """Return how many rotary positions are skipped between the prompt and the first token after it.

    If it is not 0, the keys of later tokens depend on where the prompt ends.
    """
    following = 0
    for part in _parts(items, length):
        following = _next_position(part)
    return decode_offset(items, length) + length - following


def _parts(items: Sequence[MediaItem], length: int) -> Iterator[Part]:
    start = first = 0
    for item in items:
        for begin, count in item.spans if item.grid is not None else ():
            if begin > start:
                yield Part(start, begin - start, first, None)
                first += begin - start
            yield (part := Part(begin, count, first, item))
            start, first = begin + count, _next_position(part)
    if length > start:
        yield Part(start, length - start, first, None)


def _next_position(part: Part) -> int:
    if part.item is None or part.item.grid is None:
        return part.first + part.tokens
    return part.first + max(part.item.grid[1:])
