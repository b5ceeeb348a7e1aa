"""Copies of matrices of few bits in the model's type, beside the packed ones, where a GPU has memory to spare: few rows read
the packed matrix, and many are multiplied by the copy, as in a model of floats.

Unpacking in registers is not as fast as a library's product in 16 bits, and to dequantize each time costs a writing and a
reading. From how many rows on the copy is faster was measured on an H200.
"""

from dataclasses import replace
from typing import Any

import torch

from quire.ops.linear import SHORT
from quire.ops.packed import NEAR, PackedMatrix
from quire.ops.quantized_layouts import Activation

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
