"""Sums over the tokens of rows (`ops/row_sums.py`): one program for a row and a block of columns."""

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.kernels.launcher import cdiv, launched

BLOCK = 128  # columns of a program


@launched
@triton.jit
def _add_rows(
    hidden,  # [T, SIZE]
    sums,  # [S, SIZE] float64
    rows,  # [4, R] int64: first token, token count, slot, whether the sum starts here
    number,
    hidden_stride,
    size,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    first, count = tl.load(rows + row), tl.load(rows + number + row).to(tl.int32)
    slot, begins = tl.load(rows + 2 * number + row), tl.load(rows + 3 * number + row)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    total = tl.load(sums + slot * size + column, mask=inside, other=0.0)
    total = tl.where(begins == 0, total, 0.0)
    for token in range(count):
        total += tl.load(hidden + (first + token) * hidden_stride + column, mask=inside, other=0.0).to(tl.float64)
    tl.store(sums + slot * size + column, total, mask=inside)


def add_rows(
    hidden: Tensor,
    first: npt.NDArray[np.int64],
    count: npt.NDArray[np.int64],
    slot: npt.NDArray[np.int64],
    begins: npt.NDArray[np.int64],
    sums: Tensor,
) -> None:
    """See `ops/row_sums.py`."""
    rows = torch.from_numpy(np.stack([first, count, slot, begins]))
    rows = rows.pin_memory().to(hidden.device, non_blocking=True) if hidden.is_cuda else rows
    size = hidden.shape[1]
    _add_rows[(len(first), cdiv(size, BLOCK))](
        hidden, sums, rows, len(first), hidden.stride(0), size, BLOCK=BLOCK, num_warps=2
    )  # fmt: skip
