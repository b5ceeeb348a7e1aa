"""Activation quantization to 8 bits, and scaling of the results of 8-bit GEMMs.

Quantized rows have the column order of packed words (`packed.py`): two columns that are VALUE_STRIDE are next to each other.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor, dtype

from quire.ops.kernels.activation import KINDS, activate
from quire.ops.kernels.launcher import cdiv, launched, let_next_start, overlapping, power_of_two, wait_for_previous
from quire.ops.quantized_layouts import RoundedRows, Rounding


def constants_of(rounding: Rounding) -> dict[str, Any]:
    """Return the constants of kernels that call `write_rounded`."""
    given = rounding.given is not None
    return {"VALUE_STRIDE": rounding.value_stride, "GROUP": rounding.group, "GIVEN": given, "LARGEST": rounding.largest}


@triton.jit
def write_rounded(
    value,  # [BLOCK] float32, from column `first` on: a whole row, unless scales are by GROUP; 0 beyond the row
    out,  # [rows, columns] of 8 bits
    scales,  # [rows] float32; by group [columns / GROUP, height]
    given,  # [1] float32: a static scale
    row,
    first,
    columns,
    height,
    VALUE_STRIDE: tl.constexpr,
    GROUP: tl.constexpr,
    GIVEN: tl.constexpr,
    LARGEST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if GROUP > 0:
        groups = tl.reshape(value, (BLOCK // GROUP, GROUP))
        factor = tl.maximum(tl.max(tl.abs(groups), 1), 1e-10) / LARGEST
        number = tl.reshape(groups / factor[:, None], (BLOCK,))
        group = first // GROUP + tl.arange(0, BLOCK // GROUP)
        tl.store(scales + group.to(tl.int64) * height + row, factor, mask=group * GROUP < columns)
    else:
        factor = tl.load(given) if GIVEN else tl.maximum(tl.max(tl.abs(value), 0), 1e-10) / LARGEST
        number = tl.minimum(tl.maximum(value / factor, -LARGEST), LARGEST)
        if out.dtype.element_ty == tl.int8:
            number = tl.floor(tl.abs(number) + 0.5) * tl.where(number < 0, -1.0, 1.0)
        tl.store(scales + row, factor)
    # Another shape than `value`: Triton loads all tensors of one shape in the layout that suits the narrowest one, and that
    # would change the order of a norm's sum.
    BLOCKS: tl.constexpr = BLOCK // (2 * VALUE_STRIDE)
    separated = tl.reshape(number.to(out.dtype.element_ty), (BLOCKS, 2, VALUE_STRIDE))
    paired = tl.reshape(tl.permute(separated, (0, 2, 1)), (BLOCKS, 2 * VALUE_STRIDE))
    at = first + tl.arange(0, BLOCKS)[:, None] * (2 * VALUE_STRIDE) + tl.arange(0, 2 * VALUE_STRIDE)[None, :]
    tl.store(out + row * columns + at, paired, mask=at < columns)


@launched
@triton.jit
def _round_rows(
    x,  # [rows, inner]
    given,  # [1] float32: a static scale
    out,  # [rows, columns] of 8 bits
    scales,  # [rows] float32
    inner,
    columns,
    VALUE_STRIDE: tl.constexpr,
    GIVEN: tl.constexpr,
    LARGEST: tl.constexpr,  # largest 8-bit value
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    let_next_start(EARLY)
    wait_for_previous(EARLY)
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    column = at // (2 * VALUE_STRIDE) * (2 * VALUE_STRIDE) + at % 2 * VALUE_STRIDE + at % (2 * VALUE_STRIDE) // 2
    value = tl.load(x + row * inner + column, mask=column < inner, other=0.0).to(tl.float32)
    scale = tl.load(given) if GIVEN else tl.maximum(tl.max(tl.abs(value), 0), 1e-10) / LARGEST
    number = tl.minimum(tl.maximum(value / scale, -LARGEST), LARGEST)
    if out.dtype.element_ty == tl.int8:
        number = tl.floor(tl.abs(number) + 0.5) * tl.where(number < 0, -1.0, 1.0)
    tl.store(out + row * columns + at, number.to(out.dtype.element_ty), mask=at < columns)
    tl.store(scales + row, scale)


def round_rows(x: Tensor, rounding: Rounding) -> RoundedRows:
    """Quantize x [rows, inputs] with a scale per row."""
    x = x.contiguous()
    rows, inner = x.shape
    rounded = rounding.allocate(rows, x, x.dtype)
    block, given = power_of_two(rounding.columns), rounding.given
    _round_rows[(rows,)](
        x, rounded.scales if given is None else given, rounded.numbers, rounded.scales, inner, rounding.columns,
        VALUE_STRIDE=rounding.value_stride, GIVEN=given is not None, LARGEST=rounding.largest, BLOCK=block,
        num_warps=min(16, max(1, block // 512)), **overlapping(),
    )  # fmt: skip
    return rounded


@launched
@triton.jit
def _round_groups(
    x,  # [rows, inner]
    out,  # [rows, columns] of 8 bits, in the column order of packed words
    scales,  # [columns / GROUP, height]
    height,
    inner,
    columns,
    GROUP: tl.constexpr,
    LARGEST: tl.constexpr,
    BLOCK: tl.constexpr,  # groups per program
    EARLY: tl.constexpr,
):
    let_next_start(EARLY)
    wait_for_previous(EARLY)
    HALF: tl.constexpr = GROUP // 2
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = tl.arange(0, HALF)
    column = group[:, None] * GROUP + at[None, :]
    low = tl.load(x + row * inner + column, mask=column < inner, other=0.0).to(tl.float32)
    high = tl.load(x + row * inner + column + HALF, mask=column + HALF < inner, other=0.0).to(tl.float32)
    most = tl.maximum(tl.max(tl.abs(low), 1), tl.max(tl.abs(high), 1))
    scale = tl.maximum(most, 1e-10) / LARGEST
    numbers = tl.interleave(low / scale[:, None], high / scale[:, None])
    place = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    tl.store(out + row * columns + place, numbers.to(out.dtype.element_ty), mask=place < columns)
    tl.store(scales + group.to(tl.int64) * height + row, scale, mask=group * GROUP < columns)


def round_groups(x: Tensor, rounding: Rounding) -> RoundedRows:
    """Quantize x [rows, inputs] with a scale per group of columns."""
    x = x.contiguous()
    rows, inner = x.shape
    rounded = rounding.allocate(rows, x, x.dtype)
    block, columns = 16, rounding.columns
    _round_groups[(rows, cdiv(columns // rounding.group, block))](
        x, rounded.numbers, rounded.scales, len(rounded.numbers), inner, columns, GROUP=rounding.group,
        LARGEST=rounding.largest, BLOCK=block, num_warps=4, **overlapping(),
    )  # fmt: skip
    return rounded


def round_all(x: Tensor, rounding: Rounding) -> RoundedRows:
    """Quantize x [rows, inputs]."""
    return round_groups(x, rounding) if rounding.group else round_rows(x, rounding)


@launched
@triton.jit
def _rescale(
    x,  # [rows, outputs]; gated: [rows, 2 * outputs]
    rows_scale,  # [rows] float32
    scale,  # [columns of x] float32
    bias,  # [columns of x]
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
    """Return x [rows, outputs] times the scales of rows and columns, plus the bias; with an activation gated."""
    rows, outputs = x.shape[0], x.shape[1] // 2 if activation else x.shape[1]
    out = x.new_empty(rows, outputs, dtype=kind)
    block = 1024
    _rescale[(rows, cdiv(outputs, block))](
        x, rows_scale, scale, scale if bias is None else bias, out, outputs, BIAS=bias is not None,
        KIND=KINDS[activation] if activation else "", BLOCK=block, num_warps=4, **overlapping(),
    )  # fmt: skip
    return out


@launched
@triton.jit
def _gate_rounded(
    x,  # [rows, 2 * size] gate, up
    out,  # see `write_rounded`
    scales,
    size,
    columns,
    height,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
    VALUE_STRIDE: tl.constexpr,
    GROUP: tl.constexpr,
    GIVEN: tl.constexpr,
    LARGEST: tl.constexpr,
    EARLY: tl.constexpr,
):
    let_next_start(EARLY)
    wait_for_previous(EARLY)
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    at = first + tl.arange(0, BLOCK)
    gate = tl.load(x + row * 2 * size + at, mask=at < size, other=0.0)
    up = tl.load(x + row * 2 * size + size + at, mask=at < size, other=0.0)
    active = activate(gate.to(tl.float32), KIND).to(gate.dtype).to(tl.float32)
    value = (active * up.to(tl.float32)).to(gate.dtype).to(tl.float32)
    write_rounded(value, out, scales, scales, row, first, columns, height, VALUE_STRIDE, GROUP, GIVEN, LARGEST, BLOCK)


def gate_rounded(x: Tensor, activation: str, rounding: Rounding) -> RoundedRows:
    """Return activation(gate) * up of x [rows, 2n] = gate, up, quantized by groups."""
    rows, block = len(x), 1024
    rounded = rounding.allocate(rows, x, x.dtype)
    _gate_rounded[(rows, cdiv(rounding.columns, block))](
        x, rounded.numbers, rounded.scales, x.shape[1] // 2, rounding.columns, len(rounded.numbers),
        KIND=KINDS[activation], BLOCK=block, **constants_of(rounding), num_warps=4, **overlapping(),
    )  # fmt: skip
    return rounded
