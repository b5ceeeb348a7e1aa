"""Mixture of experts: a router and a stack of gated feed-forward layers."""

from torch import Tensor, nn

from quire.layers.linear import Linear
from quire.layers.parameter import parameter
from quire.ops.activation import check_activation
from quire.ops.moe import experts_forward, route


class Experts(nn.Module):
    """At `path` it takes `path.<e>.gate_proj.weight`, `path.<e>.up_proj.weight` and `path.<e>.down_proj.weight`."""

    def __init__(self, count: int, hidden_size: int, inner_size: int, activation: str) -> None:
        super().__init__()
        self.activation = check_activation(activation)
        self.inner_size = inner_size
        self.up = parameter(count, 2 * inner_size, hidden_size)  # gate above up
        self.down = parameter(count, hidden_size, inner_size)

    def claims(self, path: str) -> dict[str, Tensor | None]:
        taken: dict[str, Tensor | None] = {}
        for expert in range(self.up.shape[0]):
            taken[f"{path}.{expert}.gate_proj.weight"] = self.up.data[expert, : self.inner_size]
            taken[f"{path}.{expert}.up_proj.weight"] = self.up.data[expert, self.inner_size :]
            taken[f"{path}.{expert}.down_proj.weight"] = self.down.data[expert]
        return taken

    def forward(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """x [T, H], weights and experts [T, top_k] -> [T, H]."""
        return experts_forward(x, weights, experts, self.up, self.down, self.activation)


class MoE(nn.Module):
    """Each token goes to its `top_k` experts. `renormalize`: their weights are made to add up to one."""

    def __init__(
        self, hidden_size: int, inner_size: int, activation: str, *, experts: int, top_k: int, renormalize: bool
    ) -> None:
        super().__init__()
        self.top_k, self.renormalize = top_k, renormalize
        self.gate = Linear(hidden_size, experts)
        self.experts = Experts(experts, hidden_size, inner_size, activation)

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = route(self.gate(x), self.top_k, self.renormalize)
        out: Tensor = self.experts(x, weights, chosen)
        return out
