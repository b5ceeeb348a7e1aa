"""Normalization. `add` folds the residual connection before the norm into it."""

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.files.reading import shown
from quire.layers.parameter import parameter
from quire.ops.norm import add_rms_norm, rms_norm, rounded_norm
from quire.ops.quantized_layouts import RoundedRows, Rounding
from quire.types.errors import ModelError


class Norm(Protocol):
    def __call__(self, x: Tensor) -> Tensor: ...

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """The norm of x + residual, and that sum. No residual = x begins the stream."""
        ...


def check_epsilon(value: float) -> float:
    """As a configuration has it."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise ModelError(f"the epsilon of its norms must be a small number, got {shown(value)}")
    return float(value)


class RMSNorm(nn.Module):
    """`offset` is added to the stored weight."""

    def __init__(self, size: int, eps: float, offset: float = 0.0) -> None:
        super().__init__()
        self.eps, self.offset = check_epsilon(eps), offset
        self.weight = parameter(size)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps, self.offset)

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        if residual is None:
            return self(x), x
        return add_rms_norm(x, residual, self.weight, self.eps, self.offset)

    def add_rounded(self, x: Tensor, residual: Tensor | None, rounding: Rounding) -> tuple[RoundedRows, Tensor]:
        """As `add`, rounded as who reads it would."""
        return rounded_norm(x, residual, self.weight, self.eps, self.offset, rounding)


class LayerNorm(nn.Module):
    """`offset` is added to the stored weight when it is loaded."""

    def __init__(self, size: int, eps: float, bias: bool = True, weight: bool = True, offset: float = 0.0) -> None:
        super().__init__()
        self.size, self.eps, self.offset = size, check_epsilon(eps), offset
        self.weight = parameter(size) if weight else None
        self.bias = parameter(size) if bias else None

    def finish(self, device: torch.device) -> None:  # noqa: ARG002
        if self.weight is not None and self.offset:
            self.weight.data += self.offset

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (self.size,), self.weight, self.bias, self.eps)

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        total = x if residual is None else x + residual
        return self(total), total


class NoNorm(nn.Module):
    """Where a model has no norm, the residual connection is still made."""

    def forward(self, x: Tensor) -> Tensor:
        return x

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        total = x if residual is None else x + residual
        return total, total
