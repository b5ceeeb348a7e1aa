"""The order in which a device adds the products of a GEMM.

In the usual order, each kernel of a GPU adds them in the way that is fastest for its number of rows, so the last bits of a
token depend on the other tokens of the step. In the fixed order they do not: every kernel adds the products in the order of the
columns, in tensor cores, and nothing that changes a rounding depends on the number of rows. On a CPU, only Quire's kernel runs
attention in the fixed order.

The order applies to all launches of this process, so a runner sets its own order before it launches anything.
"""

from typing import Any

import torch

NO_SPLIT_K = (False, False)  # neither sums in 16 bits nor split-K

_fixed = False
_usual: tuple[Any, Any, Any] | None = None  # settings of torch in the usual order, once the fixed order was used


def use_order(fixed: bool) -> None:
    """Add in the fixed order in the next launches, in our kernels and in cuBLAS, or in the usual order."""
    global _fixed, _usual
    if fixed == _fixed:
        return
    _fixed = fixed
    if not torch.cuda.is_available():
        return
    matmul, library = torch.backends.cuda.matmul, torch.backends.cuda.preferred_blas_library
    if _usual is None:
        _usual = matmul.allow_bf16_reduced_precision_reduction, matmul.allow_fp16_reduced_precision_reduction, library()
    # cuBLAS itself would ignore that split-K is not allowed
    bf16, fp16, preferred = (NO_SPLIT_K, NO_SPLIT_K, "cublaslt") if fixed else _usual
    matmul.allow_bf16_reduced_precision_reduction = bf16
    matmul.allow_fp16_reduced_precision_reduction = fp16
    library(preferred)


def order_is_fixed() -> bool:
    return _fixed
