"""GEMM with quantized weights: the reference dequantizes, a GPU uses packed weights (`packed.py`) or a 16-bit copy."""

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.ops.activation import gated, reference_gated
from quire.ops.arguments import ExpertBiases, Gated
from quire.ops.linear import SHORT, linear_float
from quire.ops.moe import experts_forward, sum_experts
from quire.ops.packed import NEAR, PackedMatrix, pack, packed_experts_forward
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


# form: rows from which on a copy is faster, of matrices of at most NEAR numbers, of at most twice as many, and of larger ones
COPIED = {
    "int4": (65, 65, 65),
    "int4 in small groups": (33, 65, 65),  # GGUF's, whose scales are of 32 columns
    "int8": (33, 65, 65),
    "float8": (33, 65, 65),
    "float4": (33, 65, 65),
    "float4, scales of 8 bits": (33, 17, 65),  # nvfp4
    "int6": (1, 1, 65),
}
SMALL_GROUP = 32  # columns


def can_be_copied(matrix: Any) -> bool:
    """Not where rows are rounded, for the product in 8 bits is faster; nor of experts, of which there are too many."""
    if not isinstance(matrix, PackedMatrix) or matrix.activation is not Activation.NONE:
        return False
    words: torch.Tensor = matrix.packed.words
    return words.dim() == 2


def copied(matrix: PackedMatrix, dtype: torch.dtype) -> PackedMatrix:
    """The matrix with a copy."""
    assert dtype in SHORT
    like = torch.empty(matrix.inputs, dtype=dtype, device=matrix.packed.words.device)
    return replace(matrix, copy=matrix.dequantize(like), copied_from=rows_from(matrix))


def rows_from(matrix: PackedMatrix) -> int:
    packed, numbers = matrix.packed, matrix.outputs * matrix.inputs
    kind = packed.form
    if kind == "int4" and packed.group <= SMALL_GROUP:
        kind = "int4 in small groups"
    elif kind == "float4" and packed.scaled == "e4m3":
        kind = "float4, scales of 8 bits"
    return COPIED[kind][0 if numbers <= NEAR else 1 if numbers <= 2 * NEAR else 2]
