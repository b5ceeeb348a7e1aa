"""GEMM with quantized weights: the reference dequantizes, a GPU uses packed weights (`packed.py`) or a 16-bit copy."""

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.ops.activation import gated, reference_gated
from quire.ops.arguments import ExpertBiases, Gated
from quire.ops.linear import SHORT, linear, linear_float
from quire.ops.moe import experts_forward, sum_experts
from quire.ops.packed import CACHED_VALUES, PackedMatrix, pack, packed_experts_forward
from quire.ops.quantized_layouts import FLOAT8_MAX, Activation, Activations, Float8, Int8, PackedInts, Rounding, in_groups

GROUP = 128  # values of a row that share a scale


def quantized_linear(x: Activations, matrix: Any, bias: Tensor | None = None) -> Tensor:
    """Return x [..., inner] times a quantized matrix [outputs, inner]. x may be quantized as `rounding_for` returns."""
    if isinstance(matrix, PackedMatrix):
        return matrix.multiply(x, bias)
    assert isinstance(x, Tensor)
    return linear(rounded(x, matrix), dequantized(matrix, x.dtype), bias)


def quantized_linear_float(x: Tensor, matrix: Any, bias: Tensor | None = None) -> Tensor:
    """Return the same as `quantized_linear` for x [rows, inner] in float32."""
    if isinstance(matrix, PackedMatrix):
        return matrix.multiply(x, bias).float()
    return linear_float(rounded(x, matrix), dequantized(matrix, x.dtype), bias)


def quantized_gated_linear(
    x: Activations, matrix: Any, bias: Tensor | None, activation: str, rounding: Rounding | None = None
) -> Activations:
    """Return activation(gate) * up [..., n] for a matrix [2n, inner], gate rows first. `rounding`: activation quantization of
    the only reader, which may be fused.
    """
    if isinstance(matrix, PackedMatrix):
        return matrix.multiply(x, bias, activation, rounding)
    return gated(quantized_linear(x, matrix, bias), activation)


def quantized_experts_forward(
    x: Tensor, weights: Tensor, experts: Tensor, up: Any, down: Any, activation: Gated, biases: ExpertBiases | None = None
) -> Tensor:
    """Return the output [T, H] of quantized experts for x [T, H].

    weights, experts: [T, top_k]
    up, down: [E, 2I, H], gate rows first, and [E, H, I]
    A token's contributions are added in an order that does not depend on the other tokens.
    """
    if isinstance(up, PackedMatrix) and isinstance(down, PackedMatrix):
        return packed_experts_forward(x, weights, experts, up, down, activation, biases)
    if x.is_cuda:
        return experts_forward(
            rounded(x, up), weights, experts, dequantized(up, x.dtype), dequantized(down, x.dtype), activation, biases
        )

    def run(rows: Tensor, expert: int, before: Tensor | None, after: Tensor | None) -> Tensor:
        inner = reference_gated(quantized_linear(rows, up.cut(expert), before), activation)
        return quantized_linear(inner, down.cut(expert), after)

    return sum_experts(x, weights, experts, len(up.numbers), run, biases)


def rounding_for(matrix: Any, x: Activations) -> Rounding | None:
    """Return the activation quantization for inputs shaped like x, if the producer of x can fuse it."""
    if not isinstance(matrix, PackedMatrix) or matrix.order is not None or matrix.inputs < 2 * matrix.packed.value_stride:
        return None
    return matrix.rounding(x)


def device_layout(matrix: Any) -> Any | None:
    """Return the matrix as its device multiplies by it; None: it should be dequantized."""
    return pack(matrix) if matrix.numbers.is_cuda else matrix


def dequantized(matrix: Any, dtype: torch.dtype) -> Tensor:
    """Return the matrix [..., N, K] dequantized, with the inputs in order."""
    values: Tensor = matrix.dequantize()
    return values.to(dtype)


def ordered(x: Tensor, matrix: PackedInts) -> Tensor:
    """Return inputs in the order of the matrix's columns."""
    return x if matrix.order is None else x.index_select(-1, matrix.order)


def rounded(x: Tensor, matrix: Any) -> Tensor:
    """Return x as an 8-bit GEMM sees it, in x's dtype."""
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
    """Quantize x [..., K] to int8 [..., K] with scales [..., 1] float32."""
    scale = x.float().abs().amax(-1, keepdim=True).clamp(min=1e-10) / 127
    return (x.float() / scale).round().to(torch.int8), scale


def round_float8(x: Tensor, activation: Activation, given: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Quantize x [..., K] to float8_e4m3fn; scales are float32 [..., 1], [..., K / 128, rounded up], or the given one."""
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
    """Quantize weight [..., N, K] with a scale per output, for activations with a scale per token."""
    scale = weight.float().abs().amax(-1, keepdim=True).clamp(min=1e-10) / FLOAT8_MAX
    numbers = (weight.float() / scale).to(torch.float8_e4m3fn)
    return Float8(1, weight.shape[-1], numbers, scale, Activation.TOKEN)


# layout: rows from which on a copy is faster, for matrices of at most CACHED_VALUES values, of at most twice as many,
# and larger
COPIED = {
    "int4": (65, 65, 65),
    "int4 in small groups": (33, 65, 65),  # GGUF's, with 32 columns per scale
    "int8": (33, 65, 65),
    "float8": (33, 65, 65),
    "float4": (33, 65, 65),
    "float4, scales of 8 bits": (33, 17, 65),  # nvfp4
    "int6": (1, 1, 65),
}
SMALL_GROUP = 32  # columns


def can_be_copied(matrix: Any) -> bool:
    """Return whether a copy helps: not if activations are quantized, since an 8-bit GEMM is faster; nor for experts, which are
    too many.
    """
    if not isinstance(matrix, PackedMatrix) or matrix.activation is not Activation.NONE:
        return False
    words: torch.Tensor = matrix.packed.words
    return words.dim() == 2


def copied(matrix: PackedMatrix, dtype: torch.dtype) -> PackedMatrix:
    """Return the matrix with a copy in `dtype`."""
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
    return COPIED[kind][0 if numbers <= CACHED_VALUES else 1 if numbers <= 2 * CACHED_VALUES else 2]
