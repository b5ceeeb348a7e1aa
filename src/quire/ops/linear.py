"""GEMM with unquantized weights. On a GPU, one token, a few tokens and gated layers with some dozens run in kernels of ours,
the rest in the libraries behind torch. The thresholds were measured on an H200, in chains of layers.

In the fixed order (`order.py`) our kernels run few rows, where libraries use split-K, and any number of rows if a size is not a
multiple of 16, because libraries then choose tensor core instructions by alignment.
"""

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from quire.ops.activation import gated
from quire.ops.order import order_is_fixed

SHORT = (torch.bfloat16, torch.float16)
MAX_READ_VALUES = 1 << 24  # of the matrix, read once per row; beyond, torch's GEMM is faster
FEW_ROWS = range(2, 17)
MIN_SHARE_COLUMNS = 256
FEW_ROWS_MIN_FILLED = 0.7  # as GATED_MIN_FILLED
GATED_ROWS = range(16, 129)
GATED_MIN_FILLED = 0.75  # share of occupied program slots over all rounds of a launch; below, the last round idles too long
DEEP_ROWS = range(17, 256)
MIN_DEEP_VALUES = 1 << 24  # of a matrix
# In the fixed order, libraries run this many rows or more; more are required with up to MAX_NARROW_OUTPUTS outputs.
ORDERED_MIN_LIBRARY_ROWS, ORDERED_MIN_LIBRARY_ROWS_NARROW, MAX_NARROW_OUTPUTS = 32, 128, 2048
ORDERED_PROGRAM_ROWS = (16, 32, 64, 128)  # rows per program, ascending
ORDERED_BLOCK_COLUMNS = 128  # columns per iteration


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x [..., inner] times weight [outputs, inner] plus bias [outputs]."""
    if has_torch_function_unary(x):
        return handle_torch_function(linear, (x,), x, weight, bias)
    if (config := few_rows_config(x, weight)) is not None:
        from quire.ops.kernels.linear import few_rows_linear

        return few_rows_linear(x, weight, bias, config)
    if streams(x, weight):
        from quire.ops.kernels import linear as kernels

        return kernels.linear(x, weight, bias)
    if bias is None and not order_is_fixed() and is_deep(x, weight):
        bias = _zeros(len(weight), x.dtype, x.device)
    return F.linear(x, weight, bias)


def linear_float(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return the same as `linear` for x [rows, inner] in float32. On a GPU sums are not rounded in between."""
    if (config := few_rows_config(x, weight)) is not None:
        from quire.ops.kernels.linear import few_rows_linear

        return few_rows_linear(x, weight, bias, config, kind=torch.float32)
    if streams(x, weight):
        from quire.ops.kernels import linear as kernels

        return kernels.linear(x, weight, bias, kind=torch.float32)
    if x.is_cuda and x.dtype in SHORT:
        out = torch.mm(x, weight.t(), out_dtype=torch.float32)
        return out if bias is None else out.add_(bias)
    return F.linear(x, weight, bias).float()


def gated_linear(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """Return activation(gate) * up [..., n] for x [..., inner] and weight [2n, inner], gate rows first."""
    if has_torch_function_unary(x):
        return gated(linear(x, weight, bias), activation)
    if (config := few_rows_config(x, weight)) is not None and (config.rows <= GATED_ROWS.start or not gates_rows(x, weight)):
        from quire.ops.kernels.linear import few_rows_linear

        return few_rows_linear(x, weight, bias, config, activation)
    if streams(x, weight):
        from quire.ops.kernels import linear as kernels

        return kernels.linear(x, weight, bias, activation)
    if gates_rows(x, weight):
        from quire.ops.kernels import linear as kernels

        return kernels.gated_linear(x, weight, bias, activation)
    return gated(F.linear(x, weight, bias), activation)


def few_rows_config(x: Tensor, weight: Tensor) -> Any:
    """Return the launch configuration for a few rows (`kernels.linear.FewRowsConfig`), the same for any row count; None:
    another kernel is faster. In the fixed order: None only where libraries add in the same order.
    """
    if not x.is_cuda or x.dtype not in SHORT or not x.numel() or not weight.is_contiguous():
        return None
    outputs, inner = weight.shape
    if order_is_fixed():
        return ordered_config(x.numel() // inner, outputs, inner, x.device)
    if x.numel() // inner not in FEW_ROWS or inner % 16 or (x.data_ptr() | weight.data_ptr()) % 16:
        return None
    return _few_rows_config_on(outputs, inner, x.device)


def ordered_config(rows: int, outputs: int, inner: int, device: torch.device) -> Any:
    """Return the launch configuration for the fixed order; None: libraries add in the same order."""
    min_rows = ORDERED_MIN_LIBRARY_ROWS_NARROW if outputs <= MAX_NARROW_OUTPUTS else ORDERED_MIN_LIBRARY_ROWS
    if rows >= min_rows and inner % 16 == 0 and outputs % 16 == 0:
        return None
    return ordered_few_config(next((size for size in ORDERED_PROGRAM_ROWS if rows <= size), ORDERED_PROGRAM_ROWS[-1]), device)


@cache
def ordered_few_config(program_rows: int, device: torch.device) -> Any:
    """Return the configuration for `program_rows` rows per program, with as many stages as fit in shared memory."""
    from quire.ops.kernels.linear import FEW_OUTPUTS, FewRowsConfig

    stage_bytes = 2 * ORDERED_BLOCK_COLUMNS * (FEW_OUTPUTS + program_rows)
    properties: Any = torch.cuda.get_device_properties(device)
    stages = min(8 if program_rows == 16 else 5, properties.shared_memory_per_block_optin // stage_bytes)
    return FewRowsConfig(ORDERED_BLOCK_COLUMNS, stages, 1, program_rows)


@cache
def _few_rows_config_on(outputs: int, inner: int, device: torch.device) -> Any:
    properties = torch.cuda.get_device_properties(device)
    return choose_few_rows_config(outputs, inner, properties.multi_processor_count) if properties.major == 9 else None


def choose_few_rows_config(outputs: int, inner: int, processors: int) -> Any:
    """Return a configuration with one program per processor that reads far ahead, or two; None: too many would idle."""
    from quire.ops.kernels.linear import FEW_OUTPUTS, FewRowsConfig

    tiles = -(-outputs // FEW_OUTPUTS)
    if tiles > processors:
        return FewRowsConfig(128, 4, 1) if filled(tiles, 2 * processors) >= FEW_ROWS_MIN_FILLED else None
    shares = next(n for n in (8, 4, 2, 1) if n == 1 or (n * tiles <= processors and inner >= n * MIN_SHARE_COLUMNS))
    if filled(shares * tiles, processors) < FEW_ROWS_MIN_FILLED:
        return None
    return FewRowsConfig(256, 3, 1) if shares == 1 and inner >= 4096 else FewRowsConfig(128, 6, shares)


def streams(x: Tensor, weight: Tensor) -> bool:
    """Return whether rows are multiplied one by one. One row always is: it is bound by reading the matrix."""
    if order_is_fixed() or not x.is_cuda or x.dtype not in SHORT or not x.numel() or not weight.is_contiguous():
        return False
    rows = x.numel() // x.shape[-1]
    return rows == 1 or rows * weight.numel() <= MAX_READ_VALUES


def gates_rows(x: Tensor, weight: Tensor) -> bool:
    """Return whether one launch of a gated layer with some dozens of rows is faster than two."""
    if not x.is_cuda or x.dtype not in SHORT or x.dim() != 2 or x.shape[0] not in GATED_ROWS or not weight.is_contiguous():
        return False
    copied = x.shape[1] % 8 == 0 and x.data_ptr() % 16 == 0 and weight.data_ptr() % 16 == 0  # requirements of the copy engine
    return copied and _fills(len(weight) // 2, x.device)


def is_deep(x: Tensor, weight: Tensor) -> bool:
    """Return whether a bias should be added, so that torch calls cuBLASLt: for a large matrix with no more outputs than inputs
    it divides the inputs among processors better than cuBLAS.
    """
    if x.dim() != 2 or x.shape[0] not in DEEP_ROWS or not x.is_cuda or x.dtype not in SHORT:
        return False
    outputs, inner = weight.shape
    return outputs <= inner and outputs * inner >= MIN_DEEP_VALUES


@cache
def _fills(outputs: int, device: torch.device) -> bool:
    from quire.ops.kernels.linear import GATED_OUTPUTS, GATED_PROGRAMS_PER_SM

    properties = torch.cuda.get_device_properties(device)
    if properties.major < 9:  # no copy engine
        return False
    programs, slots = -(-outputs // GATED_OUTPUTS), GATED_PROGRAMS_PER_SM * properties.multi_processor_count
    return filled(programs, slots) >= GATED_MIN_FILLED


def filled(programs: int, slots: int) -> float:
    """Return the share of program slots that are occupied, over the rounds it takes to run all programs."""
    return programs / (-(-programs // slots) * slots)


@cache
def _zeros(outputs: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros(outputs, dtype=dtype, device=device)
