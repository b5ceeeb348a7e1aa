"""Matrices of 4 and 8 bits that a checkpoint brought: they are multiplied by as those of GGUF files are, in groups of 32."""

import logging
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from quire.layers.embedding import Head, PlainHead
from quire.layers.linear import Linear, Plain
from quire.layers.quant.gguf import GGUFHead, GGUFMethod
from quire.layers.quant.stored import StoredHead, StoredLinear
from quire.ops.blocks import GROUP, IntegerMatrix
from quire.ops.quantized_layouts import Int8, PackedInts

logger = logging.getLogger(__name__)


def adopt_forms(model: nn.Module) -> None:
    """Layers whose form has no such groups hold floats from now on."""
    dequantized = 0
    for layer in model.modules():
        if isinstance(layer, Linear) and isinstance(layer.method, StoredLinear):
            found = as_blocks(layer.method.matrix)
            layer.hold(Plain(), weight=found) if isinstance(found, Tensor) else layer.hold(GGUFMethod([found]))
        elif isinstance(layer, Head) and isinstance(layer.method, StoredHead):
            found = as_blocks(layer.method.matrix)
            layer.hold(PlainHead(), weight=found) if isinstance(found, Tensor) else layer.hold(GGUFHead(found))
        else:
            continue
        dequantized += isinstance(found, Tensor)
    if dequantized:
        logger.info(
            "quantized matrices that are held as float32: %d, whose groups are not of %d neighbours", dequantized, GROUP
        )


def as_blocks(matrix: Any) -> IntegerMatrix | Tensor:
    """As floats where there is no other way."""
    if isinstance(matrix, Int8):  # one to a byte, 0 is 128
        matrix = PackedInts(8, matrix.inputs, matrix.numbers.view(torch.uint8) ^ 128, matrix.scale, None, None)
    if isinstance(matrix, PackedInts) and matrix.order is None and matrix.group % GROUP == 0:
        return IntegerMatrix(matrix)
    values: Tensor = matrix.dequantize()
    return values


def let_go(methods: Iterable[GGUFMethod]) -> None:
    """Of matrices in memory that were copied, and that the decoder itself will not be asked for any more."""
    for method in methods:
        if any(isinstance(part, IntegerMatrix) for part in method.parts):
            method.parts = ()
