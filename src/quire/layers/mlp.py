"""Feed-forward layers that treat every token alike."""

from torch import Tensor, nn

from quire.layers.linear import Linear, MergedLinear
from quire.ops.activation import activate, check_activation


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
        out: Tensor = self.down_proj(self.gate_up.gated(x, self.activation))
        return out


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
