"""An adapter's numbers as its file has them, made into what layers read, on the device: matrices turned, multiplied and placed,
and the largest number of each found. On a GPU a launch does it for all of them; elsewhere, and as what that is compared with,
torch goes from matrix to matrix.

    file    [ A, rank x inputs | B, outputs x rank | A ... ]  ──►  flat    [ A | B', rank x outputs, multiplied | ... ]
"""

import math
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


def find_largest(raw: Tensor, moves: Moves) -> Tensor:
    """[S] float32, of raw [n]: how far from 0 numbers of each span get; infinitely if one of them is no number."""
    if raw.is_cuda:
        from quire.ops.kernels import adapter_pack

        return adapter_pack.find_largest(raw, moves)
    found = [raw[first : first + count].float().abs().max() for first, count in moves.spans.tolist()]
    return torch.stack(found).nan_to_num(nan=math.inf, posinf=math.inf)


def pack(raw: Tensor, flat: Tensor, moves: Moves, scales: Tensor) -> None:
    """Of raw [n] into flat [m]; scales [C] float32: what each copy is multiplied by."""
    if raw.is_cuda:
        from quire.ops.kernels import adapter_pack

        adapter_pack.pack(raw, flat, moves, scales)
        return
    for (to, rows, columns, first, down, across), scale in zip(moves.copies.tolist(), scales.tolist(), strict=True):
        source = torch.as_strided(raw, (rows, columns), (down, across), first)
        torch.mul(source.float(), scale, out=flat[to : to + rows * columns].view(rows, columns))


def _counted(sizes: Integers) -> Integers:
    """0, 1, ... for each of the sizes anew."""
    ends = np.cumsum(sizes)
    counted: Integers = np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(ends - sizes, sizes)
    return counted
