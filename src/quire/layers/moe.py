"""Mixture of experts: a router and a stack of gated feed-forward layers."""

from collections.abc import Mapping

from torch import Tensor, nn

from quire.layers.linear import Linear
from quire.layers.parameter import parameter
from quire.ops.activation import check_activation
from quire.ops.moe import experts_forward, route


class Experts(nn.Module):
    """At `path` it takes `path.<e>.gate_proj.weight`, `path.<e>.up_proj.weight` and `path.<e>.down_proj.weight`, or all experts
    at once: `path.gate_up_proj` [E, 2 * inner, hidden] and `path.down_proj` [E, hidden, inner], or both the other way round."""

    def __init__(self, count: int, hidden_size: int, inner_size: int, activation: str) -> None:
        super().__init__()
        self.activation = check_activation(activation)
        self.inner_size = inner_size
        self.fused = self.transposed = False  # how the checkpoint has them
        self.up = parameter(count, 2 * inner_size, hidden_size)  # gate above up
        self.down = parameter(count, hidden_size, inner_size)

    def adapt(self, path: str, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.fused = f"{path}.gate_up_proj" in shapes
        self.transposed = self.fused and shapes.get(f"{path}.down_proj") == (len(self.down), *self.down.shape[:0:-1])

    def claims(self, path: str) -> dict[str, Tensor | None]:
        if self.fused:
            whole = {f"{path}.gate_up_proj": self.up.data, f"{path}.down_proj": self.down.data}
            return {name: data.transpose(1, 2) if self.transposed else data for name, data in whole.items()}
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
