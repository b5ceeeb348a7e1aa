"""RMSNorm of rows, optionally after adding the residual, in one pass over memory; one program per row."""

import triton
import triton.language as tl
from torch import Tensor, empty_like

from quire.ops.kernels.launcher import launched, let_next_start, overlapping, power_of_two, wait_for_previous
from quire.ops.kernels.rounding import constants_of, write_rounded
from quire.ops.quantized_layouts import RoundedRows, Rounding


@triton.jit
def _norm(
    x,  # [rows, SIZE]
    residual,  # [rows, SIZE]
    weight,  # [SIZE]
    total,  # [rows, SIZE] output: x + residual
    eps,
    offset,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    EARLY: tl.constexpr,
):
    let_next_start(EARLY)
    at = tl.arange(0, BLOCK)
    inside = at < SIZE
    scale = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32) + offset
    wait_for_previous(EARLY)
    place = tl.program_id(0).to(tl.int64) * SIZE + at
    value = tl.load(x + place, mask=inside, other=0.0)
    if ADD:
        other = tl.load(residual + place, mask=inside, other=0.0)
        value = (value.to(tl.float32) + other.to(tl.float32)).to(value.dtype)
        tl.store(total + place, value, mask=inside)
    wide = value.to(tl.float32)
    wide *= tl.rsqrt(tl.sum(wide * wide) / SIZE + eps)
    return (wide * scale).to(value.dtype)


@launched
@triton.jit
def _rms_norm(
    x,  # [rows, SIZE]
    residual,  # [rows, SIZE]
    weight,  # [SIZE]
    out,  # [rows, SIZE]
    total,  # [rows, SIZE] x + residual
    eps,
    offset,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    EARLY: tl.constexpr,
):
    normed = _norm(x, residual, weight, total, eps, offset, SIZE, BLOCK, ADD, EARLY)
    at = tl.arange(0, BLOCK)
    tl.store(out + tl.program_id(0).to(tl.int64) * SIZE + at, normed, mask=at < SIZE)


@launched
@triton.jit
def _rounded_norm(
    x,  # [rows, SIZE]
    residual,  # [rows, SIZE]
    weight,  # [SIZE]
    total,  # [rows, SIZE] x + residual
    out,  # see `write_rounded`
    scales,
    given,
    eps,
    offset,
    columns,
    height,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    VALUE_STRIDE: tl.constexpr,
    GROUP: tl.constexpr,
    GIVEN: tl.constexpr,
    LARGEST: tl.constexpr,
    EARLY: tl.constexpr,
):
    normed = _norm(x, residual, weight, total, eps, offset, SIZE, BLOCK, ADD, EARLY).to(tl.float32)
    row = tl.program_id(0).to(tl.int64)
    write_rounded(normed, out, scales, given, row, 0, columns, height, VALUE_STRIDE, GROUP, GIVEN, LARGEST, BLOCK)


def _launch(x: Tensor, residual: Tensor, weight: Tensor, total: Tensor, eps: float, offset: float, add: bool) -> Tensor:
    size = x.shape[-1]
    block = power_of_two(size)
    out = empty_like(x)
    rows = x.numel() // size
    if rows:
        _rms_norm[(rows,)](
            x, residual, weight, out, total, eps, offset, SIZE=size, BLOCK=block, ADD=add, num_warps=warps_of(block),
            **overlapping(),
        )  # fmt: skip
    return out


def warps_of(block: int) -> int:
    """Return the number of warps; the order of sums depends on it."""
    return min(max(block // 512, 1), 8)


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    x = x.contiguous()
    return _launch(x, x, weight, x, eps, offset, add=False)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    x, residual = x.contiguous(), residual.contiguous()
    total = empty_like(x)
    return _launch(x, residual, weight, total, eps, offset, add=True), total


def rounded_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, offset: float, rounding: Rounding
) -> tuple[RoundedRows, Tensor]:
    """Return the same as `add_rms_norm`, quantized. x [rows, n] has at least 2 * VALUE_STRIDE columns; residual None: x is
    the sum."""
    x = x.contiguous()
    added = x if residual is None else residual.contiguous()
    total = x if residual is None else empty_like(x)
    rows, size = x.shape
    block, rounded = power_of_two(size), rounding.allocate(rows, x, x.dtype)
    if rows:
        _rounded_norm[(rows,)](
            x, added, weight, total, rounded.numbers, rounded.scales,
            rounded.scales if rounding.given is None else rounding.given, eps, offset, rounding.columns,
            len(rounded.numbers) if rounding.group else 0, SIZE=size, BLOCK=block, ADD=residual is not None,
            **constants_of(rounding), num_warps=warps_of(block), **overlapping(),
        )  # fmt: skip
    return rounded, total
