"""Feed-forward layers that treat every token alike."""

from torch import Tensor, nn

from quire.layers.linear import Linear, MergedLinear, Plain
from quire.ops.activation import activate, check_activation, gated
from quire.ops.linear import gated_linear


class GatedMLP(nn.Module):
    """down(activation(gate(x)) * up(x)). `fused`: the checkpoint stores gate and up as one matrix at `<path>.gate_up`."""

    def __init__(self, hidden_size: int, inner_size: int, activation: str, *, bias: bool = False, fused: bool = False) -> None:
        super().__init__()
        self.activation = check_activation(activation)
        if fused:
            self.gate_up: Linear = Linear(hidden_size, 2 * inner_size, bias=bias)
        else:
            self.gate_up = MergedLinear(hidden_size, {"gate_proj": inner_size, "up_proj": inner_size}, bias=bias)
        self.down_proj = Linear(inner_size, hidden_size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self.gated(x))
        return out

    def gated(self, x: Tensor) -> Tensor:
        """activation(gate(x)) * up(x): in one launch where one plain matrix holds both."""
        layer = self.gate_up
        if isinstance(layer.method, Plain):
            return gated_linear(x, layer.weight, layer.bias, self.activation)
        return gated(layer(x), self.activation)


class MLP(nn.Module):
    """down(activation(up(x)))."""

    def __init__(
        self, hidden_size: int, inner_size: int, activation: str, *, bias: bool = True, transposed: bool = False
    ) -> None:
        super().__init__()
        self.activation = check_activation(activation)
        self.up_proj = Linear(hidden_size, inner_size, bias=bias, transposed=transposed)
        self.down_proj = Linear(inner_size, hidden_size, bias=bias, transposed=transposed)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(activate(self.up_proj(x), self.activation))
        return out
