"""A norm before a layer that alone reads what it gives: rounded in the same launch, where that layer would round it."""

from collections.abc import Mapping
from types import MappingProxyType

from torch import Tensor, nn

from quire.layers.attention import SelfAttention
from quire.layers.linear import Linear
from quire.layers.mlp import GatedMLP
from quire.layers.norm import Norm, RMSNorm
from quire.ops.forms import Rows

# layers whose first product, at this name, is all that reads the rows they are given; not those made of them, which may do more
FIRST: Mapping[type[nn.Module], str] = MappingProxyType({SelfAttention: "qkv", GatedMLP: "gate_up"})


def norm_for(reader: nn.Module, norm: Norm, x: Tensor, residual: Tensor | None) -> tuple[Rows, Tensor]:
    """norm.add(x [T, H], residual) for `reader` and nobody else."""
    first = FIRST.get(type(reader))
    if first is not None and type(norm) is RMSNorm:
        linear = getattr(reader, first)
        assert isinstance(linear, Linear)
        rounding = linear.rounding(x)
        if rounding is not None:
            return norm.add_rounded(x, residual, rounding)
    return norm.add(x, residual)
