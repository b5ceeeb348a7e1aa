"""GEMM of 8-bit activations and 8-bit weights: fp8 with a scale per 128 x 128 block, and int8 with a scale per row."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from quire.ops.kernels.activation import constants_of, gate_by
from quire.ops.kernels.bit_packing import Packed
from quire.ops.kernels.launcher import cdiv, launched, let_next_start, overlapping, prefetch, wait_for_previous
from quire.ops.kernels.tiles import add_shares, turns_of
from quire.ops.quantized_layouts import RoundedRows

GROUP = 128  # columns per scale


@launched
@triton.jit(do_not_specialize=["rows"])
def _blocks(
    x,  # [rows, columns] of 8 bits
    rows_scale,  # [groups, height]
    matrix,  # [outputs, columns] of 8 bits
    scales,  # [groups, SCALES]
    bias,  # [outputs]
    out,  # [rows, outputs]
    sums,  # float32 partial sums of each program's tile
    turns,  # [tiles] zeros: counters of finished shares
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
    TOGETHER: tl.constexpr,  # row tiles that use the same outputs at about the same time
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
    read, row_read = tl.minimum(n, outputs - 1), tl.minimum(r, rows - 1)
    k = tl.arange(0, GROUP)
    a = x + row_read.to(tl.int64)[:, None] * columns + k[None, :]
    b = matrix + read.to(tl.int64)[None, :] * columns + k[:, None]
    groups = columns // GROUP
    each = tl.cdiv(groups, SHARES)
    begin = tl.program_id(1) * each
    end = tl.minimum(begin + each, groups)
    a += begin * GROUP
    b += begin * GROUP
    ONE: tl.constexpr = HIGH % BLOCK_N == 0  # one scale per block of the matrix
    own = scales + within // high * BLOCK_N // HIGH
    acc = tl.zeros((ROWS, BLOCK_N), tl.float32)
    factor = tl.load(rows_scale + begin * height + row_read)  # prefetched a group ahead
    if ONE:
        factor *= tl.load(own + begin * SCALES)
    for group in tl.range(begin, end):
        following = tl.minimum(group + 1, groups - 1)
        next_factor = tl.load(rows_scale + following * height + row_read)
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


def blocks_product(x: RoundedRows, matrix: Packed, bias: Tensor | None, tile: Tile) -> Tensor:
    """Return x [rows, inputs] times the matrix [rows, outputs]."""
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
    """Return the same by torch, which requires a multiple of some row count; scales: `PackedMatrix.block_scales`. None: torch
    does not support these sizes.
    """
    words = matrix.words.view(torch.float8_e4m3fn)
    try:
        out = torch._scaled_mm(x.numbers, words.t(), x.scales.t(), scales, out_dtype=x.dtype)[: len(x)]
    except RuntimeError:  # raised before anything is launched
        return None
    return out if bias is None else out + bias


LINE = 128  # bytes per cache line
AHEAD = 2  # lines per row
TOGETHER = 8  # row tiles that use the same outputs at about the same time


@launched
@triton.jit(do_not_specialize=["rows"])
def _ints(
    words,  # [outputs, columns] int8: the matrix
    rows_scale,  # [rows] float32
    scales,  # [rows of the matrix] float32
    bias,  # [rows of the matrix]
    out,  # [rows, outputs]
    sums,  # int32 partial sums of each program's tile
    turns,  # [tiles] zeros: counters of finished shares
    rows,
    outputs,
    columns,
    x,  # descriptor of [rows, columns] int8, ROWS at a time
    # descriptor of the matrix as [1, outputs, columns], BLOCK_N at a time; gated: [2, outputs, columns], half as many of both
    matrix,
    BIAS: tl.constexpr,
    KIND: tl.constexpr,  # activation of a gated matrix; "": not gated
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    SHARES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TOGETHER: tl.constexpr,
    LINE: tl.constexpr,
    AHEAD: tl.constexpr,  # lines that are prefetched before x is ready
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
        prefetch(words + (read.to(tl.int64) * columns)[:, None], begin // LINE, end // LINE, LINE, AHEAD)
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
    columns: int = 128  # per iteration


def ints_product(
    numbers: Tensor,
    rows_scale: Tensor,
    matrix: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    activation: str,
    tile: IntTile,
    kind: torch.dtype,
) -> Tensor:
    """Return int8 numbers [rows, columns] times int8 matrix [outputs, columns], scaled by [rows] and [outputs] float32, in
    dtype `kind` [rows, outputs]; with an activation: gate rows first -> [rows, outputs / 2].
    """
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
