"""A root-mean-square norm beside a gate: one program for a token and a group."""

import triton
import triton.language as tl
from torch import Tensor, empty

from quire.ops.kernels.launcher import launched
from quire.ops.kernels.math import power_of_two


@launched
@triton.jit
def _gated_norm(
    x,  # [T, groups * SIZE] float32
    gate,  # [T, groups * SIZE]
    weight,  # [groups * SIZE], or [SIZE] of all groups
    out,  # [T, groups * SIZE]
    eps,
    gate_stride,
    weight_stride,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    NORM_FIRST: tl.constexpr,
    SIGMOID: tl.constexpr,
):
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, BLOCK)
    inside = at < SIZE
    place = (token * tl.num_programs(1) + group) * SIZE + at
    value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    opened = tl.load(gate + token * gate_stride + group * SIZE + at, mask=inside, other=0.0).to(tl.float32)
    if SIGMOID:
        opened = tl.sigmoid(opened)
    else:
        opened *= tl.sigmoid(opened)
    if not NORM_FIRST:
        value *= opened
    value *= tl.rsqrt(tl.sum(value * value) / SIZE + eps)
    value *= tl.load(weight + group * weight_stride + at, mask=inside, other=0.0).to(tl.float32)
    if NORM_FIRST:
        value *= opened
    tl.store(out + place, value.to(out.dtype.element_ty), mask=inside)


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, groups: int, norm_first: bool, act: str = "silu") -> Tensor:
    tokens, size = len(x), x.shape[1] // groups
    out = empty((tokens, x.shape[1]), dtype=gate.dtype, device=x.device)
    block = power_of_two(size)
    if tokens:
        _gated_norm[(tokens, groups)](
            x, gate, weight, out, eps, gate.stride(0), size if len(weight) > size else 0,
            SIZE=size, BLOCK=block, NORM_FIRST=norm_first, SIGMOID=act == "sigmoid", num_warps=min(max(block // 512, 1), 8),
        )  # fmt: skip
    return out
