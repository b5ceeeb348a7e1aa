"""A matrix times rows. On a GPU the matrix is streamed past one or a few rows, and a gated one past some dozens, by kernels of
ours; the rest goes to the libraries behind torch. What goes where was measured on an H200, in chains of layers."""

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from quire.ops.activation import gated

SHORT = (torch.bfloat16, torch.float16)
MOST_READ = 1 << 24  # numbers of the matrix, read once for each row: beyond, torch's products are faster
GATED_ROWS = range(16, 129)
FILLED = 0.75  # of the places for programs, in the rounds it takes to run all: with less the last round idles too long
DEEP_ROWS = range(17, 256)
DEEP = 1 << 24  # numbers of a matrix


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., inner], weight [outputs, inner], bias [outputs] -> [..., outputs]."""
    if has_torch_function_unary(x):
        return handle_torch_function(linear, (x,), x, weight, bias)
    if streams(x, weight):
        from quire.ops.kernels import linear as kernels

        return kernels.linear(x, weight, bias)
    if bias is None and is_deep(x, weight):
        bias = _zeros(len(weight), x.dtype, x.device)
    return F.linear(x, weight, bias)


def linear_float(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """As `linear`, x [rows, inner], -> [rows, outputs] float32. On a GPU what was summed is not rounded on the way."""
    if streams(x, weight):
        from quire.ops.kernels import linear as kernels

        return kernels.linear(x, weight, bias, kind=torch.float32)
    if x.is_cuda and x.dtype in SHORT:
        out = torch.mm(x, weight.t(), out_dtype=torch.float32)
        return out if bias is None else out.add_(bias)
    return F.linear(x, weight, bias).float()


def gated_linear(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """x [..., inner], weight [2n, inner] = gate above up -> activation(gate) * up [..., n]."""
    if has_torch_function_unary(x):
        return gated(linear(x, weight, bias), activation)
    if streams(x, weight):
        from quire.ops.kernels import linear as kernels

        return kernels.linear(x, weight, bias, activation)
    if gates_rows(x, weight):
        from quire.ops.kernels import linear_rows

        return linear_rows.gated_linear(x, weight, bias, activation)
    return gated(F.linear(x, weight, bias), activation)


def streams(x: Tensor, weight: Tensor) -> bool:
    """One row always does: it is bound by reading the matrix."""
    if not x.is_cuda or x.dtype not in SHORT or not x.numel() or not weight.is_contiguous():
        return False
    rows = x.numel() // x.shape[-1]
    return rows == 1 or rows * weight.numel() <= MOST_READ


def gates_rows(x: Tensor, weight: Tensor) -> bool:
    """Whether one launch for a gated product of some dozens of rows is faster than two."""
    if not x.is_cuda or x.dtype not in SHORT or x.dim() != 2 or x.shape[0] not in GATED_ROWS or not weight.is_contiguous():
        return False
    copied = x.shape[1] % 8 == 0 and x.data_ptr() % 16 == 0 and weight.data_ptr() % 16 == 0  # the copy engine's terms
    return copied and _fills(len(weight) // 2, x.device)


def is_deep(x: Tensor, weight: Tensor) -> bool:
    """For a large matrix with no more outputs than inputs cuBLASLt finds better ways than cuBLAS to share the inputs among
    processors; torch asks it where there is a bias."""
    if x.dim() != 2 or x.shape[0] not in DEEP_ROWS or not x.is_cuda or x.dtype not in SHORT:
        return False
    outputs, inner = weight.shape
    return outputs <= inner and outputs * inner >= DEEP


@cache
def _fills(outputs: int, device: torch.device) -> bool:
    from quire.ops.kernels.linear_rows import AT_ONCE, OUTPUTS

    there = torch.cuda.get_device_properties(device)
    if there.major < 9:  # no copy engine
        return False
    programs, places = -(-outputs // OUTPUTS), AT_ONCE * there.multi_processor_count
    return filled(programs, places) >= FILLED


def filled(programs: int, places: int) -> float:
    """The share of places that programs take, over the rounds it takes to run them all."""
    return programs / (-(-programs // places) * places)


@cache
def _zeros(outputs: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros(outputs, dtype=dtype, device=device)
