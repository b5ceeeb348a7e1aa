"""Root-mean-square normalization, computed in float32 whatever the input's type."""

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """x [..., n], weight [n]. `offset` is added to the weight: 1.0 for checkpoints that store it around zero."""
    if x.is_cuda:
        from quire.ops.kernels import norm

        return norm.rms_norm(x, weight, eps, offset)
    return reference_rms_norm(x, weight, eps, offset)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> tuple[Tensor, Tensor]:
    """The norm of x + residual, and that sum: the residual stream from here on."""
    if x.is_cuda:
        from quire.ops.kernels import norm

        return norm.add_rms_norm(x, residual, weight, eps, offset)
    total = x + residual
    return reference_rms_norm(total, weight, eps, offset), total


def reference_rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    wide = x.float()
    scale = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    wide = torch.mul(wide, scale).mul_(weight.float() + offset if offset else weight.float())
    return wide.to(x.dtype)
