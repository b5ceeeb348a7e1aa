"""Activation functions by the names Hugging Face configurations use, plain and gated."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.ops.arguments import ClampedSwiglu, Inner, Ungated
from quire.types.errors import ModelError


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _relu_squared(x: Tensor) -> Tensor:
    return F.relu(x).square_()


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "gelu_new": _gelu_tanh,
    "gelu_fast": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "gelu_tanh": _gelu_tanh,
    "relu": F.relu,
    "relu2": _relu_squared,
}


def activate(x: Tensor, name: str) -> Tensor:
    return ACTIVATIONS[name](x)


def gated(x: Tensor, name: str) -> Tensor:
    """Return activation(gate) * up [..., n] for x [..., 2n] = gate, up."""
    if x.is_cuda:
        from quire.ops.kernels import activation

        return activation.gated(x, name)
    return reference_gated(x, name)


def reference_gated(x: Tensor, name: Inner) -> Tensor:
    if isinstance(name, Ungated):
        return activate(x, name.name)
    gate, up = x.chunk(2, dim=-1)
    if isinstance(name, ClampedSwiglu):
        gate, up = gate.clamp(max=name.limit), up.clamp(-name.limit, name.limit)
        return (up + 1).mul_(gate * torch.sigmoid(gate * name.alpha))
    return ACTIVATIONS[name](gate).mul_(up)


def check_activation(name: str) -> str:
    if name not in ACTIVATIONS:
        raise ModelError(f"activation function must be one of {', '.join(sorted(ACTIVATIONS))}; got {name!r}")
    return name
