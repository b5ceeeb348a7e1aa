"""Products with matrices of few bits (`forms`): references dequantize and multiply; a GPU has its own form (`packed`).

Where a form rounds the rows of a product to 8 bits, a reference on a GPU does so as well; on a CPU it has them as they are.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.ops.activation import gated, reference_gated
from quire.ops.arguments import ExpertBiases, Gated
from quire.ops.linear import linear_float
from quire.ops.moe import experts_forward, sum_experts
from quire.ops.packed import PackedMatrix, pack, packed_experts_forward
from quire.ops.quantized_layouts import FLOAT8_MAX, Activation, Float8, Int8, PackedInts, Rounding, Rows, in_groups

GROUP = 128  # numbers of a row that are rounded together


def quantized_linear(x: Rows, matrix: Any, bias: Tensor | None = None) -> Tensor:
    """x [..., inner] of the model's type, matrix [outputs, inner] of any form -> [..., outputs]. x may be rounded if
    `rounding_for` says how."""
    if isinstance(matrix, PackedMatrix):
        return matrix.multiply(x, bias)
    assert isinstance(x, Tensor)
    return F.linear(rounded(x, matrix), dequantized(matrix, x.dtype), bias)


def quantized_linear_float(x: Tensor, matrix: Any, bias: Tensor | None = None) -> Tensor:
    """As `quantized_linear`, x [rows, inner], -> [rows, outputs] float32."""
    if isinstance(matrix, PackedMatrix):
        return matrix.multiply(x, bias).float()
    return linear_float(rounded(x, matrix), dequantized(matrix, x.dtype), bias)


def quantized_gated_linear(
    x: Rows, matrix: Any, bias: Tensor | None, activation: str, rounding: Rounding | None = None
) -> Rows:
    """matrix [2n, inner] = gate above up -> activation(gate) * up [..., n]. `rounding`: who reads that alone says how it would
    round it; it may be so already."""
    if isinstance(matrix, PackedMatrix):
        return matrix.multiply(x, bias, activation, rounding)
    return gated(quantized_linear(x, matrix, bias), activation)


def quantized_experts_forward(
    x: Tensor, weights: Tensor, experts: Tensor, up: Any, down: Any, activation: Gated, biases: ExpertBiases | None = None
) -> Tensor:
    """x [T, H], weights and experts [T, top_k], up [E, 2I, H] (gate above up) and down [E, H, I] of any form -> [T, H].

    A token's contributions are added in an order of its own, so the other tokens cannot change its result.
    """
    if isinstance(up, PackedMatrix) and isinstance(down, PackedMatrix):
        return packed_experts_forward(x, weights, experts, up, down, activation, biases)
    if x.is_cuda:
        return experts_forward(
            rounded(x, up), weights, experts, dequantized(up, x.dtype), dequantized(down, x.dtype), activation, biases
        )

    def run(rows: Tensor, expert: int, before: Tensor | None, behind: Tensor | None) -> Tensor:
        inner = reference_gated(quantized_linear(rows, up.cut(expert), before), activation)
        return quantized_linear(inner, down.cut(expert), behind)

    return sum_experts(x, weights, experts, len(up.numbers), run, biases)


def rounding_for(matrix: Any, x: Rows) -> Rounding | None:
    """How a product rounds its rows, if they are as many as x has and of that type, and if who makes them can do it."""
    if not isinstance(matrix, PackedMatrix) or matrix.order is not None or matrix.inputs < 2 * matrix.packed.apart:
        return None
    return matrix.rounding(x)


def settled(matrix: Any) -> Any | None:
    """The form as its device multiplies by it; None = it should rather be dequantized."""
    return pack(matrix) if matrix.numbers.is_cuda else matrix


def dequantized(matrix: Any, dtype: torch.dtype) -> Tensor:
    """[..., N, K], with the inputs in the order of a row."""
    values: Tensor = matrix.dequantize()
    return values.to(dtype)


def ordered(x: Tensor, matrix: PackedInts) -> Tensor:
    """A row's numbers in the order of the matrix's columns, for kernels that read the columns as they lie."""
    return x if matrix.order is None else x.index_select(-1, matrix.order)


def rounded(x: Tensor, matrix: Any) -> Tensor:
    """x as a product in 8 bits sees it, in its own type."""
    if not x.is_cuda or not isinstance(matrix, Float8 | Int8) or matrix.activation is Activation.NONE:
        return x
    if isinstance(matrix, Int8):
        numbers, scale = round_int8(x)
        return (numbers.float() * scale).to(x.dtype)
    numbers, scale = round_float8(x, matrix.activation, matrix.input_scale)
    if matrix.activation is Activation.GROUP:
        scale = scale.repeat_interleave(GROUP, -1)[..., : x.shape[-1]]
    return (numbers.float() * scale).to(x.dtype)


def round_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., K] -> int8 [..., K] and scales [..., 1] float32."""
    scale = x.float().abs().amax(-1, keepdim=True).clamp(min=1e-10) / 127
    return (x.float() / scale).round().to(torch.int8), scale


def round_float8(x: Tensor, activation: Activation, given: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """x [..., K] -> float8_e4m3fn [..., K], and scales: float32 [..., 1], [..., K / 128, rounded up], or the given one."""
    wide = x.float()
    if activation is Activation.TENSOR:
        assert given is not None
        return (wide / given).clamp(-FLOAT8_MAX, FLOAT8_MAX).to(torch.float8_e4m3fn), given
    if activation is Activation.GROUP:
        padded = in_groups(F.pad(wide, (0, -x.shape[-1] % GROUP)), GROUP)
        scale = padded.abs().amax(-1).clamp(min=1e-10) / FLOAT8_MAX
        numbers = (padded / scale.unsqueeze(-1)).to(torch.float8_e4m3fn).flatten(-2)[..., : x.shape[-1]]
        return numbers, scale
    scale = wide.abs().amax(-1, keepdim=True).clamp(min=1e-10) / FLOAT8_MAX
    return (wide / scale).to(torch.float8_e4m3fn), scale


def quantize_float8(weight: Tensor) -> Float8:
    """weight [..., N, K] of floats -> by channel, for rows that are rounded by themselves."""
    scale = weight.float().abs().amax(-1, keepdim=True).clamp(min=1e-10) / FLOAT8_MAX
    numbers = (weight.float() / scale).to(torch.float8_e4m3fn)
    return Float8(1, weight.shape[-1], numbers, scale, Activation.TOKEN)
