"""RMSNorm, computed in float32 for any input dtype. Overridable by __torch_function__."""

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from quire.ops.quantized_layouts import RoundedRows, Rounding


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """Return the norm of x [..., n]; weight [n]. `offset` is added to the weight: 1.0 for checkpoints that store it around
    zero."""
    if has_torch_function_unary(x):
        return handle_torch_function(rms_norm, (x,), x, weight, eps, offset)
    if x.is_cuda:
        from quire.ops.kernels import norm

        return norm.rms_norm(x, weight, eps, offset)
    return reference_rms_norm(x, weight, eps, offset)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> tuple[Tensor, Tensor]:
    """Return the norm of x + residual, and that sum."""
    if has_torch_function_unary(x):
        return handle_torch_function(add_rms_norm, (x,), x, residual, weight, eps, offset)
    if x.is_cuda:
        from quire.ops.kernels import norm

        return norm.add_rms_norm(x, residual, weight, eps, offset)
    total = x + residual
    return reference_rms_norm(total, weight, eps, offset), total


def rounded_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, offset: float, rounding: Rounding
) -> tuple[RoundedRows, Tensor]:
    """Return the same as `add_rms_norm`, quantized. GPU only. residual None: x is the sum."""
    from quire.ops.kernels import norm

    return norm.rounded_norm(x, residual, weight, eps, offset, rounding)


def reference_rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    wide = x.float()
    scale = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    wide = torch.mul(wide, scale).mul_(weight.float() + offset if offset else weight.float())
    return wide.to(x.dtype)
