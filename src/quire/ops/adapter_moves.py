"""What of an adapter's file goes where on a device, and what each program of a launch does of that."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

ROWS, COLUMNS = 16, 256  # of a matrix, that a program moves
SPAN = 8192  # numbers that a program looks at
Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Moves:
    """`spans` [S, 2]: first number of each tensor of the file, and how many. `copies` [C, 6]: first number of a matrix in the
    flat piece, its rows and columns; its first number in the file, and how far rows and columns are from each other there."""

    spans: Integers
    copies: Integers
    device: torch.device

    @cached_property
    def looked(self) -> Tensor:
        """[n, 3] int64: what a program looks at: which span, its first number and how many."""
        pieces = -(-self.spans[:, 1] // SPAN)
        owner = np.repeat(np.arange(len(self.spans)), pieces)
        within = SPAN * _counted(pieces)
        first, count = self.spans[owner].T
        return self._there(np.stack([owner, first + within, np.minimum(count - within, SPAN)], 1))

    @cached_property
    def moved(self) -> Tensor:
        """[n, 3] int64: what a program moves: of which copy, its first row and column."""
        down, across = -(-self.copies[:, 1] // ROWS), -(-self.copies[:, 2] // COLUMNS)
        owner = np.repeat(np.arange(len(self.copies)), down * across)
        row, column = np.divmod(_counted(down * across), across[owner])
        return self._there(np.stack([owner, row * ROWS, column * COLUMNS], 1))

    @cached_property
    def table(self) -> Tensor:
        return self._there(self.copies)

    def _there(self, numbers: Integers) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(numbers, np.int64)).to(self.device)


def _counted(sizes: Integers) -> Integers:
    """0, 1, ... for each of the sizes anew."""
    ends = np.cumsum(sizes)
    counted: Integers = np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(ends - sizes, sizes)
    return counted
