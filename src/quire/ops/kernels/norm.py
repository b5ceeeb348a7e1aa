"""Root-mean-square norm of rows, with the residual sum before it: one pass over memory, one program a row."""

import triton
import triton.language as tl
from torch import Tensor, empty_like

from quire.ops.kernels.launcher import launched
from quire.ops.kernels.math import power_of_two
from quire.ops.kernels.overlap import let_next_start, overlapping, wait_for_previous


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
    tl.store(out + place, (wide * scale).to(value.dtype), mask=inside)


def _launch(x: Tensor, residual: Tensor, weight: Tensor, total: Tensor, eps: float, offset: float, add: bool) -> Tensor:
    size = x.shape[-1]
    block = power_of_two(size)
    out = empty_like(x)
    rows = x.numel() // size
    if rows:
        warps = min(max(block // 512, 1), 8)
        _rms_norm[(rows,)](
            x, residual, weight, out, total, eps, offset, SIZE=size, BLOCK=block, ADD=add, num_warps=warps, **overlapping()
        )  # fmt: skip
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    x = x.contiguous()
    return _launch(x, x, weight, x, eps, offset, add=False)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    x, residual = x.contiguous(), residual.contiguous()
    total = empty_like(x)
    return _launch(x, residual, weight, total, eps, offset, add=True), total
