"""A matrix times rows. On a GPU the matrix is streamed past one or a few rows, and a gated one past some dozens, by kernels of
ours; the rest goes to the libraries behind torch. What goes where was measured on an H200, in chains of layers."""

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from quire.ops.activation import gated

SHORT = (torch.bfloat16, torch.float16)
MOST_READ = 1 << 24  # numbers of the matrix, read once for each row: beyond, torch's products are faster
FEW_ROWS = range(2, 17)
FEW_COLUMNS = 256  # of a share, at least
FEW_FILLED = 0.7
GATED_ROWS = range(16, 129)
FILLED = 0.75  # of the places for programs, in the rounds it takes to run all: with less the last round idles too long
DEEP_ROWS = range(17, 256)
DEEP = 1 << 24  # numbers of a matrix


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., inner], weight [outputs, inner], bias [outputs] -> [..., outputs]."""
    if has_torch_function_unary(x):
        return handle_torch_function(linear, (x,), x, weight, bias)
    if (way := few_way(x, weight)) is not None:
        from quire.ops.kernels.linear import few_rows_linear

        return few_rows_linear(x, weight, bias, way)
    if streams(x, weight):
        from quire.ops.kernels import linear as kernels

        return kernels.linear(x, weight, bias)
    if bias is None and is_deep(x, weight):
        bias = _zeros(len(weight), x.dtype, x.device)
    return F.linear(x, weight, bias)


def linear_float(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """As `linear`, x [rows, inner], -> [rows, outputs] float32. On a GPU what was summed is not rounded on the way."""
    if (way := few_way(x, weight)) is not None:
        from quire.ops.kernels.linear import few_rows_linear

        return few_rows_linear(x, weight, bias, way, kind=torch.float32)
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
    if (way := few_way(x, weight)) is not None:
        from quire.ops.kernels.linear import few_rows_linear

        return few_rows_linear(x, weight, bias, way, activation)
    if streams(x, weight):
        from quire.ops.kernels import linear as kernels

        return kernels.linear(x, weight, bias, activation)
    if gates_rows(x, weight):
        from quire.ops.kernels import linear as kernels

        return kernels.gated_linear(x, weight, bias, activation)
    return gated(F.linear(x, weight, bias), activation)


def few_way(x: Tensor, weight: Tensor) -> Any:
    """How matrix units multiply a few rows (`kernels.linear_few.Way`), the same for any number of them; None = they do not."""
    if not x.is_cuda or x.dtype not in SHORT or not x.numel() or not weight.is_contiguous():
        return None
    outputs, inner = weight.shape
    if x.numel() // inner not in FEW_ROWS or inner % 16 or (x.data_ptr() | weight.data_ptr()) % 16:
        return None
    return _few_way_on(outputs, inner, x.device)


@cache
def _few_way_on(outputs: int, inner: int, device: torch.device) -> Any:
    there = torch.cuda.get_device_properties(device)
    return choose_few(outputs, inner, there.multi_processor_count) if there.major == 9 else None


def choose_few(outputs: int, inner: int, processors: int) -> Any:
    """One program to a processor, which reads far ahead, or two where there are more; None = too many idle."""
    from quire.ops.kernels.linear import HIGH, Way

    tiles = -(-outputs // HIGH)
    if tiles > processors:
        return Way(128, 4, 1) if filled(tiles, 2 * processors) >= FEW_FILLED else None
    shares = next(n for n in (8, 4, 2, 1) if n == 1 or (n * tiles <= processors and inner >= n * FEW_COLUMNS))
    if filled(shares * tiles, processors) < FEW_FILLED:
        return None
    return Way(256, 3, 1) if shares == 1 and inner >= 4096 else Way(128, 6, shares)


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
    from quire.ops.kernels.linear import AT_ONCE, OUTPUTS

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
