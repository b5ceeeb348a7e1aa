"""A gated matrix times some dozens of rows, the activation in the same launch.

A program makes a few outputs of all rows: its gate rows and its up rows of the matrix stream past x, both by the tensor copy
engine, and both halves of a pair meet in its registers. Nothing is summed across programs. Two programs fit on a processor, so
that one multiplies while the other waits. When this is faster than a library is not known here: `ops/linear.py` knows.

    rows   [ ROWS | MORE ]   tiles are powers of two; two of them keep 96 rows from being multiplied as 128
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from quire.ops.kernels.activation import KINDS, activate
from quire.ops.kernels.launcher import cdiv, launched, let_next_start, overlapping, wait_for_previous

OUTPUTS = 64  # of a program
BLOCK_K = 64  # numbers of a row at a time: 128 bytes, the widest the copy engine takes
AT_ONCE = 2  # programs on a processor
WARPS = 4


class Tile(NamedTuple):
    rows: int
    more: int
    stages: int  # as many as leave shared memory for a second program


TILES = (Tile(32, 0, 5), Tile(64, 0, 4), Tile(64, 32, 3), Tile(128, 0, 3))


@triton.jit
def _put(gate, up, bias, out, n, r, rows, outputs, BIAS: tl.constexpr, KIND: tl.constexpr):
    """gate, up [n, r] float32 -> out [r, n], each step rounded as the separate operators would."""
    kind: tl.constexpr = out.dtype.element_ty
    if BIAS:
        gate += tl.load(bias + n, mask=n < outputs, other=0.0).to(tl.float32)[:, None]
        up += tl.load(bias + outputs + n, mask=n < outputs, other=0.0).to(tl.float32)[:, None]
    active = activate(gate.to(kind).to(tl.float32), KIND).to(kind).to(tl.float32)
    value = (active * up.to(kind).to(tl.float32)).to(kind)
    tl.store(out + r[None, :] * outputs + n[:, None], value, mask=(n < outputs)[:, None] & (r < rows)[None, :])


@launched
@triton.jit(do_not_specialize=["rows"])
def _gated_rows(
    bias,  # [2 * outputs]
    out,  # [rows, outputs]
    rows,
    outputs,
    inner,
    x,  # descriptor of [rows, inner], ROWS at a time
    x_more,  # the same, MORE at a time
    matrix,  # descriptor of [2 * outputs, inner], gate above up
    BIAS: tl.constexpr,
    KIND: tl.constexpr,
    ROWS: tl.constexpr,
    MORE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EARLY: tl.constexpr,
):
    let_next_start(EARLY)
    first = tl.program_id(0) * BLOCK_N
    n = first + tl.arange(0, BLOCK_N)
    wait_for_previous(EARLY)
    gate = tl.zeros((BLOCK_N, ROWS), tl.float32)
    up = tl.zeros((BLOCK_N, ROWS), tl.float32)
    if MORE:
        gate_more = tl.zeros((BLOCK_N, MORE), tl.float32)
        up_more = tl.zeros((BLOCK_N, MORE), tl.float32)
    for k in tl.range(0, inner, BLOCK_K):
        gates = matrix.load([first, k])
        ups = matrix.load([first + outputs, k])
        columns = tl.trans(x.load([0, k]))
        gate = tl.dot(gates, columns, gate, input_precision="ieee")
        up = tl.dot(ups, columns, up, input_precision="ieee")
        if MORE:
            columns = tl.trans(x_more.load([ROWS, k]))
            gate_more = tl.dot(gates, columns, gate_more, input_precision="ieee")
            up_more = tl.dot(ups, columns, up_more, input_precision="ieee")
    _put(gate, up, bias, out, n, tl.arange(0, ROWS), rows, outputs, BIAS, KIND)
    if MORE:
        _put(gate_more, up_more, bias, out, n, ROWS + tl.arange(0, MORE), rows, outputs, BIAS, KIND)


def _blocks(matrix: Tensor, rows: int) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(matrix, [rows, BLOCK_K])


def gated_linear(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """x [rows, inner], weight [2n, inner] = gate above up -> activation(gate) * up [rows, n]. A tile takes all rows."""
    x = x.contiguous()
    rows, inner = x.shape
    outputs = len(weight) // 2
    out = x.new_empty(rows, outputs)
    tile = next(tile for tile in TILES if tile.rows + tile.more >= rows)
    _gated_rows[(cdiv(outputs, OUTPUTS),)](
        weight if bias is None else bias, out, rows, outputs, inner,
        _blocks(x, tile.rows), _blocks(x, tile.more or tile.rows), _blocks(weight, OUTPUTS),
        BIAS=bias is not None, KIND=KINDS[activation], ROWS=tile.rows, MORE=tile.more, BLOCK_N=OUTPUTS, BLOCK_K=BLOCK_K,
        num_warps=WARPS, num_stages=tile.stages, **overlapping(),
    )  # fmt: skip
    return out
