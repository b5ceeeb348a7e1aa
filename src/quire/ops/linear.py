"""A matrix times rows. On a GPU the matrix is streamed past a few rows by a kernel of ours; what is larger goes to torch."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from quire.ops.activation import gated

SHORT = (torch.bfloat16, torch.float16)
MOST_READ = 1 << 24  # numbers of the matrix, read once for each row: beyond, torch's products are faster (measured on an H200)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., inner], weight [outputs, inner], bias [outputs] -> [..., outputs]."""
    if has_torch_function_unary(x):
        return handle_torch_function(linear, (x,), x, weight, bias)
    if streams(x, weight):
        from quire.ops.kernels import linear as kernels

        return kernels.linear(x, weight, bias)
    return F.linear(x, weight, bias)


def gated_linear(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """x [..., inner], weight [2n, inner] = gate above up -> activation(gate) * up [..., n]."""
    if has_torch_function_unary(x):
        return gated(linear(x, weight, bias), activation)
    if streams(x, weight):
        from quire.ops.kernels import linear as kernels

        return kernels.linear(x, weight, bias, activation)
    return gated(F.linear(x, weight, bias), activation)


def streams(x: Tensor, weight: Tensor) -> bool:
    """One row always does: it is bound by reading the matrix."""
    if not x.is_cuda or x.dtype not in SHORT or not x.numel() or not weight.is_contiguous():
        return False
    rows = x.numel() // x.shape[-1]
    return rows == 1 or rows * weight.numel() <= MOST_READ
