"""Many rows times a matrix of 8-bit floats with a scale to each block of 128 x 128: both in 8 bits, by matrix units.

Rows are rounded by groups of 128 columns. What a group's products add up to is scaled by its two scales and then added in
float32, so a long sum loses nothing.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.kernels.bit_packing import Packed
from quire.ops.kernels.launcher import cdiv, launched, let_next_start, overlapping, wait_for_previous
from quire.ops.kernels.tiles import add_shares, turns_of
from quire.ops.quantized_layouts import RoundedRows

GROUP = 128  # columns


@launched
@triton.jit(do_not_specialize=["rows"])
def _blocks(
    x,  # [rows, columns] of 8 bits
    rows_scale,  # [groups, height]
    matrix,  # [outputs, columns] of 8 bits
    scales,  # [groups, SCALES]
    bias,  # [outputs]
    out,  # [rows, outputs]
    sums,  # float32: of each share of each program's tile
    turns,  # [tiles] zeros
    rows,
    height,
    outputs,
    columns,
    SCALES: tl.constexpr,
    HIGH: tl.constexpr,
    BIAS: tl.constexpr,
    GROUP: tl.constexpr,
    SHARES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TOGETHER: tl.constexpr,  # tiles of rows that run by the same outputs at about the same time
    EARLY: tl.constexpr,
):
    let_next_start(EARLY)
    wait_for_previous(EARLY)
    tile = tl.program_id(0)
    row_tiles, column_tiles = tl.cdiv(rows, ROWS), tl.cdiv(outputs, BLOCK_N)
    band = tile // (TOGETHER * column_tiles)
    high = tl.minimum(row_tiles - band * TOGETHER, TOGETHER)
    within = tile % (TOGETHER * column_tiles)
    r = (band * TOGETHER + within % high) * ROWS + tl.arange(0, ROWS)
    n = within // high * BLOCK_N + tl.arange(0, BLOCK_N)
    read, there = tl.minimum(n, outputs - 1), tl.minimum(r, rows - 1)
    k = tl.arange(0, GROUP)
    a = x + there.to(tl.int64)[:, None] * columns + k[None, :]
    b = matrix + read.to(tl.int64)[None, :] * columns + k[:, None]
    groups = columns // GROUP
    each = tl.cdiv(groups, SHARES)
    begin = tl.program_id(1) * each
    end = tl.minimum(begin + each, groups)
    a += begin * GROUP
    b += begin * GROUP
    ONE: tl.constexpr = HIGH % BLOCK_N == 0  # scale of a block of the matrix
    own = scales + within // high * BLOCK_N // HIGH
    acc = tl.zeros((ROWS, BLOCK_N), tl.float32)
    factor = tl.load(rows_scale + begin * height + there)  # asked for a group ahead
    if ONE:
        factor *= tl.load(own + begin * SCALES)
    for group in tl.range(begin, end):
        following = tl.minimum(group + 1, groups - 1)
        next_factor = tl.load(rows_scale + following * height + there)
        if ONE:
            next_factor *= tl.load(own + following * SCALES)
            acc += tl.dot(tl.load(a), tl.load(b)) * factor[:, None]
        else:
            acc += tl.dot(tl.load(a), tl.load(b)) * factor[:, None] * tl.load(scales + group * SCALES + read // HIGH)[None, :]
        factor = next_factor
        a += GROUP
        b += GROUP
    if SHARES > 1:
        acc, last = add_shares(acc, sums, turns, tile, SHARES)
        if not last:
            return
    if BIAS:
        acc += tl.load(bias + read).to(tl.float32)[None, :]
    place = out + r.to(tl.int64)[:, None] * outputs + n[None, :]
    tl.store(place, acc.to(out.dtype.element_ty), mask=(r < rows)[:, None] & (n < outputs)[None, :])


class Tile(NamedTuple):
    rows: int
    outputs: int
    warps: int
    stages: int
    shares: int = 1


def product(x: RoundedRows, matrix: Packed, bias: Tensor | None, tile: Tile) -> Tensor:
    """x [rows, inputs] -> [rows, outputs]."""
    rows, outputs = len(x), matrix.outputs
    out = x.numbers.new_empty(rows, outputs, dtype=x.dtype)
    words = matrix.words.view(torch.float8_e4m3fn)
    tiles = cdiv(rows, tile.rows) * cdiv(outputs, tile.outputs)
    size = tiles * tile.shares * tile.rows * tile.outputs if tile.shares > 1 else 1
    _blocks[(tiles, tile.shares)](
        x.numbers, x.scales, words, matrix.scales, matrix.scales if bias is None else bias, out,
        out.new_empty(size, dtype=torch.float32), turns_of(x.device), rows, len(x.numbers), outputs, matrix.columns,
        SCALES=matrix.scales.shape[-1], HIGH=outputs // matrix.scales.shape[-1], BIAS=bias is not None, GROUP=GROUP,
        SHARES=tile.shares, ROWS=tile.rows, BLOCK_N=tile.outputs, TOGETHER=8, num_warps=tile.warps,
        num_stages=tile.stages, **overlapping(),
    )  # fmt: skip
    return out


def library_product(x: RoundedRows, matrix: Packed, scales: Tensor, bias: Tensor | None) -> Tensor | None:
    """The same by torch, of multiples of a few rows; scales as `PackedMatrix.block_scales`. None = it is not for such sizes."""
    words = matrix.words.view(torch.float8_e4m3fn)
    try:
        out = torch._scaled_mm(x.numbers, words.t(), x.scales.t(), scales, out_dtype=x.dtype)[: len(x)]
    except RuntimeError:  # it says so before anything is launched
        return None
    return out if bias is None else out + bias
