"""RMSNorm fused with the activation quantization of the only layer that reads its output."""

from collections.abc import Mapping
from types import MappingProxyType

from torch import Tensor, nn

from quire.layers.attention import SelfAttention
from quire.layers.linear import Linear
from quire.layers.mlp import GatedMLP
from quire.layers.norm import Norm, RMSNorm
from quire.ops.quantized_layouts import Rows

# layers whose input is read by one linear layer alone, and its name; not their subclasses, which may read it twice
FIRST: Mapping[type[nn.Module], str] = MappingProxyType({SelfAttention: "qkv", GatedMLP: "gate_up"})


def fused_norm(reader: nn.Module, norm: Norm, x: Tensor, residual: Tensor | None) -> tuple[Rows, Tensor]:
    """Return norm.add(x [T, H], residual), quantized if the first linear layer of `reader`, the only reader, would do it."""
    first = FIRST.get(type(reader))
    if first is not None and type(norm) is RMSNorm:
        linear = getattr(reader, first)
        assert isinstance(linear, Linear)
        rounding = linear.rounding(x)
        if rounding is not None:
            return norm.add_rounded(x, residual, rounding)
    return norm.add(x, residual)
