"""Rows rounded to 8 bits for products in 8 bits, and what such products give brought back to scale.

The rounded rows lie as words of a packed matrix do (`packed.py`): of two columns that are APART, one beside the other.
"""

import triton
import triton.language as tl
from torch import Tensor, dtype, float32

from quire.ops.kernels.activation import KINDS, activate
from quire.ops.kernels.launcher import launched
from quire.ops.kernels.math import cdiv
from quire.ops.kernels.overlap import let_next_start, overlapping, wait_for_previous


@launched
@triton.jit
def _round_rows(
    x,  # [rows, inner]
    given,  # [1] float32: the scale, where it is known
    out,  # [rows, columns] of 8 bits
    scales,  # [rows] float32
    inner,
    columns,
    APART: tl.constexpr,
    GIVEN: tl.constexpr,
    LARGEST: tl.constexpr,  # of the numbers of 8 bits
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    let_next_start(EARLY)
    wait_for_previous(EARLY)
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    column = at // (2 * APART) * (2 * APART) + at % 2 * APART + at % (2 * APART) // 2
    value = tl.load(x + row * inner + column, mask=column < inner, other=0.0).to(tl.float32)
    scale = tl.load(given) if GIVEN else tl.maximum(tl.max(tl.abs(value), 0), 1e-10) / LARGEST
    number = tl.minimum(tl.maximum(value / scale, -LARGEST), LARGEST)
    if out.dtype.element_ty == tl.int8:
        number = tl.floor(tl.abs(number) + 0.5) * tl.where(number < 0, -1.0, 1.0)
    tl.store(out + row * columns + at, number.to(out.dtype.element_ty), mask=at < columns)
    tl.store(scales + row, scale)


def round_rows(x: Tensor, columns: int, apart: int, kind: dtype, largest: float, given: Tensor | None) -> tuple[Tensor, Tensor]:
    """x [rows, inputs] -> numbers [rows, columns] of 8 bits, scales [rows] float32."""
    x = x.contiguous()
    rows, inner = x.shape
    out, scales = x.new_empty(rows, columns, dtype=kind), x.new_empty(rows, dtype=float32)
    block = triton.next_power_of_2(columns)
    _round_rows[(rows,)](
        x, scales if given is None else given, out, scales, inner, columns, APART=apart, GIVEN=given is not None,
        LARGEST=largest, BLOCK=block, num_warps=min(16, max(1, block // 512)), **overlapping(),
    )  # fmt: skip
    return out, scales


@launched
@triton.jit
def _rescale(
    x,  # [rows, outputs]; gated: [rows, 2 * outputs]
    rows_scale,  # [rows] float32
    scale,  # as many as x has columns, float32
    bias,  # the same
    out,  # [rows, outputs]
    outputs,
    BIAS: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    let_next_start(EARLY)
    wait_for_previous(EARLY)
    kind: tl.constexpr = out.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < outputs
    factor = tl.load(rows_scale + row)
    width = outputs if KIND == "" else 2 * outputs
    value = tl.load(x + row * width + at, mask=inside, other=0.0).to(tl.float32) * (
        factor * tl.load(scale + at, mask=inside, other=0.0)
    )
    if BIAS:
        value += tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
    if KIND != "":
        right = at + outputs
        up = tl.load(x + row * width + right, mask=inside, other=0.0).to(tl.float32)
        up *= factor * tl.load(scale + right, mask=inside, other=0.0)
        if BIAS:
            up += tl.load(bias + right, mask=inside, other=0.0).to(tl.float32)
        value = activate(value.to(kind).to(tl.float32), KIND).to(kind).to(tl.float32) * up.to(kind).to(tl.float32)
    tl.store(out + row * outputs + at, value.to(kind), mask=inside)


def rescale(x: Tensor, rows_scale: Tensor, scale: Tensor, bias: Tensor | None, activation: str, kind: dtype) -> Tensor:
    """x [rows, outputs] times the scale of its row and its column, plus the bias; with an activation gated."""
    rows, outputs = x.shape[0], x.shape[1] // 2 if activation else x.shape[1]
    out = x.new_empty(rows, outputs, dtype=kind)
    block = 1024
    _rescale[(rows, cdiv(outputs, block))](
        x, rows_scale, scale, scale if bias is None else bias, out, outputs, BIAS=bias is not None,
        KIND=KINDS[activation] if activation else "", BLOCK=block, num_warps=4, **overlapping(),
    )  # fmt: skip
    return out
