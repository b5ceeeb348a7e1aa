"""An adapter's numbers, looked at and moved by all programs at once: `ops/adapter_pack.py` says what for."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.adapter_moves import COLUMNS, ROWS, SPAN, Moves
from quire.ops.kernels.launcher import launched


@launched
@triton.jit
def _find_largest(
    raw,
    looked,  # [n, 3] int64 span, first number, count
    out,  # [S] int32, the bits of float32 numbers from 0 up: they are ordered as the numbers are
    SPAN: tl.constexpr,
):
    entry = looked + tl.program_id(0) * 3
    span, first, count = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    lane = tl.arange(0, SPAN)
    numbers = tl.abs(tl.load(raw + first + lane, mask=lane < count, other=0.0).to(tl.float32))
    numbers = tl.where(numbers == numbers, numbers, float("inf"))
    tl.atomic_max(out + span, tl.max(numbers, 0).to(tl.int32, bitcast=True))


@launched
@triton.jit
def _pack(
    raw,
    flat,
    table,  # [C, 6] int64 to, rows, columns, first, down, across
    moved,  # [n, 3] int64 copy, first row, first column
    scales,  # [C] float32
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    entry = moved + tl.program_id(0) * 3
    copy = tl.load(entry)
    row = tl.load(entry + 1) + tl.arange(0, ROWS)[:, None]
    column = tl.load(entry + 2) + tl.arange(0, COLUMNS)[None, :]
    own = table + copy * 6
    to, rows, columns = tl.load(own), tl.load(own + 1), tl.load(own + 2)
    first, down, across = tl.load(own + 3), tl.load(own + 4), tl.load(own + 5)
    there = (row < rows) & (column < columns)
    numbers = tl.load(raw + first + row * down + column * across, mask=there, other=0.0).to(tl.float32) * tl.load(scales + copy)
    tl.store(flat + to + row * columns + column, numbers.to(flat.dtype.element_ty), mask=there)


def find_largest(raw: Tensor, moves: Moves) -> Tensor:
    found = torch.zeros(len(moves.spans), dtype=torch.int32, device=raw.device)
    _find_largest[(len(moves.looked),)](raw, moves.looked, found, SPAN=SPAN, num_warps=8)
    return found.view(torch.float32)


def pack(raw: Tensor, flat: Tensor, moves: Moves, scales: Tensor) -> None:
    _pack[(len(moves.moved),)](raw, flat, moves.table, moves.moved, scales, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=8)
