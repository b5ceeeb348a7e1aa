"""The order in which a device adds the products of a GEMM.

By default each kernel of a GPU adds them in the order that is fastest for its number of rows, so the last bits of a token
depend on the other tokens of the step. In the fixed order they do not: every kernel adds the products in the order of the
columns, in tensor cores, and nothing that changes a rounding depends on the number of rows. A CPU runs attention in Quire's
kernel only. The setting belongs to the process: every further engine uses the fixed order, too.
"""

import torch

_fixed = False


def fix_order() -> None:
    """Use the fixed order in this process from now on, in our kernels and in cuBLAS."""
    global _fixed
    _fixed = True
    if not torch.cuda.is_available():
        return
    matmul = torch.backends.cuda.matmul
    # neither 16-bit partial sums nor split-K
    matmul.allow_bf16_reduced_precision_reduction = (False, False)
    matmul.allow_fp16_reduced_precision_reduction = (False, False)
    torch.backends.cuda.preferred_blas_library("cublaslt")  # cuBLAS itself ignores the second value


def order_is_fixed() -> bool:
    return _fixed
