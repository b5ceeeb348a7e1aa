"""Copies of quantized matrices in the model's type, for a model whose weights are loaded."""

from collections.abc import Iterator

import torch
from torch import nn

from quire.layers.quant.stored import HeldHead, HeldLinear
from quire.ops.copies import can_be_copied, copied
from quire.ops.linear import SHORT


def count_copied(model: nn.Module, dtype: torch.dtype) -> int:
    """Numbers in matrices that can have a copy."""
    return sum(method.matrix.outputs * method.matrix.inputs for method in _methods(model)) if dtype in SHORT else 0


def make_copies(model: nn.Module, dtype: torch.dtype) -> None:
    for method in _methods(model):
        method.matrix = copied(method.matrix, dtype)


def _methods(model: nn.Module) -> Iterator[HeldLinear | HeldHead]:
    for module in model.modules():
        method = getattr(module, "method", None)
        if isinstance(method, HeldLinear | HeldHead) and can_be_copied(method.matrix):
            yield method
