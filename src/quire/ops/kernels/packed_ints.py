"""Rows of 8-bit whole numbers times a matrix of such, both with a scale to a row: multiplied by matrix units, summed exactly in
32 bits, and brought to scale, with bias and gate, in the same launch.

    a program   ROWS rows x BLOCK_N rows of the matrix, in a share of the columns; of a gated one half of them are gates, and
                the others what they gate, so that both of a pair are in the same thread

The tensor copy engine brings both, and leaves what is beyond them 0. The compiler waits for matrix units after each block of
columns where sums are whole numbers, so two programs should fit on a processor. When this is faster than a library is not
known here: `ops/packed.py` knows.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from quire.ops.kernels.activation import constants_of, gate_by
from quire.ops.kernels.launcher import ask_for, cdiv, launched, let_next_start, overlapping, wait_for_previous
from quire.ops.kernels.tiles import add_shares, turns_of

LINE = 128  # bytes that are read together
AHEAD = 2  # lines of a row
TOGETHER = 8  # tiles of rows that run by the same outputs at about the same time


@launched
@triton.jit(do_not_specialize=["rows"])
def _ints(
    words,  # [outputs, columns] int8: the matrix
    rows_scale,  # [rows] float32
    scales,  # as many as the matrix has rows, float32
    bias,  # the same
    out,  # [rows, outputs]
    sums,  # int32: of each share of each program's tile
    turns,  # [tiles] zeros: how many shares are there
    rows,
    outputs,
    columns,
    x,  # descriptor of [rows, columns] int8, ROWS at a time
    matrix,  # descriptor of it as [1, outputs, columns], BLOCK_N at a time; gated: [2, outputs, columns], half as many of both
    BIAS: tl.constexpr,
    KIND: tl.constexpr,  # an activation: the matrix is gated. "": it is plain
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    SHARES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TOGETHER: tl.constexpr,
    LINE: tl.constexpr,
    AHEAD: tl.constexpr,  # lines that are asked for before x is there
    EARLY: tl.constexpr,
):
    let_next_start(EARLY)
    GATED: tl.constexpr = KIND != ""
    OUTPUTS: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    tile = tl.program_id(0)
    row_tiles, column_tiles = tl.cdiv(rows, ROWS), tl.cdiv(outputs, OUTPUTS)
    band = tile // (TOGETHER * column_tiles)
    height = tl.minimum(row_tiles - band * TOGETHER, TOGETHER)
    within = tile % (TOGETHER * column_tiles)
    top = (band * TOGETHER + within % height) * ROWS
    left = within // height * OUTPUTS
    each = tl.cdiv(tl.cdiv(columns, BLOCK_K), SHARES) * BLOCK_K
    begin = tl.program_id(1) * each
    end = tl.minimum(begin + each, columns)
    at = tl.arange(0, BLOCK_N)
    read = tl.minimum(left + at % OUTPUTS, outputs - 1) + at // OUTPUTS * outputs
    if EARLY:
        ask_for(words + (read.to(tl.int64) * columns)[:, None], begin // LINE, end // LINE, LINE, AHEAD)
        wait_for_previous(EARLY)
    acc = tl.zeros((ROWS, BLOCK_N), tl.int32)
    for k in tl.range(begin, end, BLOCK_K):
        block = tl.reshape(matrix.load([0, left, k]), (BLOCK_N, BLOCK_K))
        acc = tl.dot(x.load([top, k]), tl.trans(block), acc, out_dtype=tl.int32)
    if SHARES > 1:
        acc, last = add_shares(acc, sums, turns, tile, SHARES)
        if not last:
            return
    kind: tl.constexpr = out.dtype.element_ty
    r, n = top + tl.arange(0, ROWS), left + tl.arange(0, OUTPUTS)
    factor = tl.load(rows_scale + r, mask=r < rows, other=0.0)
    value = acc.to(tl.float32) * (factor[:, None] * tl.load(scales + read)[None, :])
    if BIAS:
        value += tl.load(bias + read).to(tl.float32)[None, :]
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(value, (ROWS, 2, OUTPUTS)), (0, 2, 1)))
        value = gate_by(gate, up, KIND, ALPHA, LIMIT, kind)
    place = out + r.to(tl.int64)[:, None] * outputs + n[None, :]
    tl.store(place, value.to(kind), mask=(r < rows)[:, None] & (n < outputs)[None, :])


class IntTile(NamedTuple):
    rows: int
    high: int  # rows of the matrix
    warps: int
    stages: int
    shares: int = 1  # of the columns
    columns: int = 128  # at a time


def product(
    numbers: Tensor,
    rows_scale: Tensor,
    matrix: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    activation: str,
    tile: IntTile,
    kind: torch.dtype,
) -> Tensor:
    """numbers [rows, columns] and matrix [outputs, columns] int8, with scales [rows] and [outputs] float32 -> [rows, outputs]
    of that type; with an activation: of gates above ups [rows, outputs / 2]."""
    rows, columns = numbers.shape
    parts = 2 if activation else 1
    outputs, wide = len(matrix) // parts, tile.high // parts
    out = numbers.new_empty(rows, outputs, dtype=kind)
    tiles = cdiv(rows, tile.rows) * cdiv(outputs, wide)
    size = tiles * tile.shares * tile.rows * tile.high if tile.shares > 1 else 1
    _ints[(tiles, tile.shares)](
        matrix, rows_scale, scales, scales if bias is None else bias, out, numbers.new_empty(size, dtype=torch.int32),
        turns_of(numbers.device), rows, outputs, columns,
        TensorDescriptor.from_tensor(numbers, [tile.rows, tile.columns]),
        TensorDescriptor.from_tensor(matrix.view(parts, outputs, columns), [parts, wide, tile.columns]),
        BIAS=bias is not None, **constants_of(activation), SHARES=tile.shares, ROWS=tile.rows, BLOCK_N=tile.high,
        BLOCK_K=tile.columns, TOGETHER=TOGETHER, LINE=LINE, AHEAD=AHEAD,
        num_warps=tile.warps, num_stages=tile.stages, **overlapping(),
    )  # fmt: skip
    return out
