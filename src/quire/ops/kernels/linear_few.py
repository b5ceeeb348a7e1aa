"""A matrix times a few rows, as fast as the matrix can be read: it streams past all of them at once, and matrix units multiply.

A program takes some rows of the matrix, in a share of the columns; of a gated matrix half of them are gates, and the others are
what they gate. However few rows there are, there is room for ROWS, so that a row's result does not depend on the others. The
first lines of the matrix are asked for before the kernel that makes x has ended. When this is faster than a library is not
known here: `ops/linear.py` knows.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.kernels.activation import constants_of
from quire.ops.kernels.launcher import ask_for, cdiv, launched, let_next_start, overlapping, wait_for_previous
from quire.ops.kernels.tiles import add_shares, put_outputs, turns_of

ROWS = 16  # at most
HIGH = 64  # rows of the matrix that a program takes
WARPS = 4
LINE = 64  # numbers that are asked for at once
AHEAD = 2  # lines; more of them get in the way of what the kernel before still reads


@launched
@triton.jit(do_not_specialize=["rows"])
def _few(
    x,  # [rows, inner]
    matrix,  # [outputs, inner]; gated: [2 * outputs, inner]
    bias,  # as many as the matrix has rows
    out,  # [rows, outputs]
    sums,  # float32: of each share of each program's tile
    turns,  # [tiles] zeros: how many shares are there
    rows,
    outputs,
    inner,
    PADDED: tl.constexpr,  # the last block has more columns than there are
    BIAS: tl.constexpr,
    KIND: tl.constexpr,  # an activation: the matrix is gated. "": it is plain
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    SHARES: tl.constexpr,
    LINE: tl.constexpr,
    AHEAD: tl.constexpr,  # lines of each row that are asked for before x is there
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EARLY: tl.constexpr,
):
    let_next_start(EARLY)
    GATED: tl.constexpr = KIND != ""
    OUTPUTS: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    tile = tl.program_id(0)
    begins = tile * OUTPUTS
    at = tl.arange(0, BLOCK_N)
    read = tl.minimum(begins + at % OUTPUTS, outputs - 1) + at // OUTPUTS * outputs
    each = tl.cdiv(tl.cdiv(inner, BLOCK_K), SHARES) * BLOCK_K
    begin = tl.program_id(1) * each
    end = tl.minimum(begin + each, inner)
    matrix += read.to(tl.int64)[:, None] * inner
    if EARLY:
        ask_for(matrix, begin // LINE, tl.maximum(end // LINE, 1), LINE, AHEAD)
        wait_for_previous(EARLY)
    k = tl.arange(0, BLOCK_K)
    r = tl.arange(0, ROWS)
    there = r < rows
    columns = x + r[:, None] * inner + k[None, :]
    numbers = matrix + k[None, :]
    acc = tl.zeros((BLOCK_N, ROWS), tl.float32)
    for from_here in tl.range(begin, end, BLOCK_K):
        if PADDED:
            inside = (k < inner - from_here)[None, :]
            block = tl.load(numbers + from_here, mask=inside, other=0.0)
            part = tl.load(columns + from_here, mask=there[:, None] & inside, other=0.0)
        else:
            block = tl.load(numbers + from_here)
            part = tl.load(columns + from_here, mask=there[:, None], other=0.0)
        acc = tl.dot(block, tl.trans(part), acc, input_precision="ieee")
    if SHARES > 1:
        acc, last = add_shares(acc, sums, turns, tile, SHARES)
        if not last:
            return
    put_outputs(acc, bias, out, read, begins, r, there, outputs, BIAS, KIND, ALPHA, LIMIT)


class Way(NamedTuple):
    """How a matrix is read."""

    columns: int  # at a time
    stages: int
    shares: int  # of the columns


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, way: Way, activation: str = "", kind: torch.dtype | None = None
) -> Tensor:
    """x [..., inner], at most ROWS of them, weight [outputs, inner] -> [..., outputs] of x's type or `kind`; with an
    activation: of [2 * outputs, inner], gated."""
    x = x.contiguous()
    inner = x.shape[-1]
    outputs = len(weight) // 2 if activation else len(weight)
    out = x.new_empty(*x.shape[:-1], outputs, dtype=kind)
    tiles = cdiv(outputs, HIGH // 2 if activation else HIGH)
    size = tiles * way.shares * ROWS * HIGH if way.shares > 1 else 1
    _few[(tiles, way.shares)](
        x, weight, weight if bias is None else bias, out, x.new_empty(size, dtype=torch.float32), turns_of(x.device),
        x.numel() // inner, outputs, inner, PADDED=inner % way.columns > 0, BIAS=bias is not None, **constants_of(activation),
        SHARES=way.shares, LINE=LINE, AHEAD=AHEAD, ROWS=ROWS, BLOCK_N=HIGH, BLOCK_K=way.columns,
        num_warps=WARPS, num_stages=way.stages, **overlapping(),
    )  # fmt: skip
    return out
