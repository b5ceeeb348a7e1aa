"""A matrix times one row, as fast as the matrix can be read: for the steps of a few rows.

A program takes some rows of the matrix, whole, so nothing is left to be summed across programs, and a row's result is the same
however many rows there are. The next tile is on its way while one is multiplied; the first is asked for before the kernel that
makes x has ended.

    gated: the matrix holds gate rows above up rows. A program reads g0 u0 g1 u1 ..., so that both halves of a pair meet in it.
"""

import triton
import triton.language as tl
from torch import Tensor, dtype

from quire.ops.kernels.activation import KINDS, gate_by
from quire.ops.kernels.launcher import cdiv, launched, let_next_start, overlapping, wait_for_previous


@triton.jit
def eighths(tile):
    """[R, K] -> [R, K // 8]: sums of eight neighbours, which one thread has loaded."""
    return tl.sum(tl.reshape(tile, (tile.shape[0], tile.shape[1] // 8, 8)), 2)


@triton.jit
def stream(
    x,  # [INNER]
    matrix,  # [., INNER]
    row,  # [R] rows of the matrix
    inside,  # [R]
    INNER: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EARLY: tl.constexpr,
):
    """-> [R] float32. Waits for the previous kernel between the first load of the matrix and the first of x."""
    places = matrix + row.to(tl.int64)[:, None] * INNER + tl.arange(0, BLOCK_K)[None, :]
    return stream_from(x, places, inside, INNER, BLOCK_K, EARLY)


@triton.jit
def stream_from(x, places, inside, INNER: tl.constexpr, BLOCK_K: tl.constexpr, EARLY: tl.constexpr):
    """places [R, BLOCK_K]: where the rows of the matrix begin."""
    k = tl.arange(0, BLOCK_K)
    tile = tl.load(places, mask=inside[:, None] & (k < INNER)[None, :], other=0.0)
    wait_for_previous(EARLY)
    acc = tl.zeros((places.shape[0], BLOCK_K // 8), tl.float32)
    for begin in tl.range(0, INNER, BLOCK_K):
        following = begin + BLOCK_K
        coming = tl.load(places + following, mask=inside[:, None] & (k < INNER - following)[None, :], other=0.0)
        part = tl.load(x + begin + k, mask=k < INNER - begin, other=0.0).to(tl.float32)
        acc += eighths(tile.to(tl.float32) * part[None, :])
        tile = coming
    return tl.sum(acc, 1)


@triton.jit
def pair_rows(first, outputs, PAIRS: tl.constexpr):
    """Rows of gate and up in turn for outputs first ... first + PAIRS, and which of them there are."""
    at = tl.arange(0, 2 * PAIRS)
    output = first + at // 2
    return (at % 2) * outputs + output, output < outputs


@triton.jit
def pair_values(both, PAIRS: tl.constexpr, KIND: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, DTYPE: tl.constexpr):
    """both [2 * PAIRS] = g0 u0 g1 u1 ... -> activation(gate) * up [PAIRS]."""
    gate, up = tl.split(tl.reshape(both, (PAIRS, 2)))
    return gate_by(gate, up, KIND, ALPHA, LIMIT, DTYPE)


@launched
@triton.jit
def _linear(
    x,  # [rows, INNER]
    matrix,  # [outputs, INNER]; gated: [2 * outputs, INNER]
    bias,  # as many as the matrix has rows
    out,  # [rows, outputs]
    outputs,
    INNER: tl.constexpr,
    BIAS: tl.constexpr,
    KIND: tl.constexpr,  # an activation: the matrix is gated. "": it is plain
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EARLY: tl.constexpr,
):
    let_next_start(EARLY)
    rows = tl.num_programs(0) // tl.cdiv(outputs, BLOCK_N)
    x += tl.program_id(0) % rows * INNER
    out += tl.program_id(0) % rows * outputs
    first = tl.program_id(0) // rows * BLOCK_N
    n = first + tl.arange(0, BLOCK_N)
    if KIND == "":
        row, inside = n, n < outputs
    else:
        row, inside = pair_rows(first, outputs, BLOCK_N)
    value = stream(x, matrix, row, inside, INNER, BLOCK_K, EARLY)
    if BIAS:
        value += tl.load(bias + row, mask=inside, other=0.0).to(tl.float32)
    if KIND != "":
        value = pair_values(value, BLOCK_N, KIND, 0.0, 0.0, out.dtype.element_ty)
    tl.store(out + n, value.to(out.dtype.element_ty), mask=n < outputs)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str = "", kind: dtype | None = None) -> Tensor:
    """x [..., inner], weight [outputs, inner] -> [..., outputs] of x's type or `kind`; with an activation: of
    [2 * outputs, inner], gated."""
    x = x.contiguous()
    inner = x.shape[-1]
    outputs = len(weight) // 2 if activation else len(weight)
    out = x.new_empty(*x.shape[:-1], outputs, dtype=kind)
    # as many loads in flight as a long or a short row of the matrix allows, by measurement
    matrix_rows, warps = (2, 8) if inner >= 2048 else (4, 4)
    block = matrix_rows // 2 if activation else matrix_rows
    # one axis: a vocabulary has more blocks than a second axis may have programs
    _linear[(x.numel() // inner * cdiv(outputs, block),)](
        x, weight, weight if bias is None else bias, out, outputs, INNER=inner, BIAS=bias is not None,
        KIND=KINDS[activation] if activation else "", BLOCK_N=block, BLOCK_K=256 * warps, num_warps=warps, **overlapping(),
    )  # fmt: skip
    return out
