"""A root-mean-square norm beside a gate, in float32."""

import torch.nn.functional as F
from torch import Tensor


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, groups: int, norm_first: bool, act: str = "silu") -> Tensor:
    """x, gate [T, n], weight [n] or, for all of the `groups` equal parts that are normed by themselves, [n / groups]
    -> [T, n] of the gate's type. norm_first: the gate comes behind the norm. act: of the gate, silu or sigmoid."""
    if x.is_cuda:
        from quire.ops.kernels import gated_norm as kernel

        return kernel.gated_norm(x, gate, weight, eps, groups, norm_first, act)
    return reference_gated_norm(x, gate, weight, eps, groups, norm_first, act)


def reference_gated_norm(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, groups: int, norm_first: bool, act: str = "silu"
) -> Tensor:
    opened = gate.float().sigmoid() if act == "sigmoid" else F.silu(gate.float())
    values = x.float() if norm_first else x.float() * opened
    parts = values.view(len(x), groups, -1)
    parts = parts * (parts.square().mean(-1, keepdim=True) + eps).rsqrt()
    values = (parts * weight.float().view(-1, parts.shape[-1])).view_as(values)
    return (values * opened if norm_first else values).to(gate.dtype)
