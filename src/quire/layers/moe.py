"""Mixture of experts: a router and a stack of gated feed-forward layers."""

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor, nn

from quire.layers.linear import Linear
from quire.layers.parameter import MethodLayer
from quire.ops.activation import check_activation
from quire.ops.moe import experts_forward, route


class ExpertsMethod(Protocol):
    def shapes(self, count: int, hidden_size: int, inner_size: int) -> Mapping[str, tuple[int, ...]]:
        """The parameters by names of the method's own."""
        ...

    def claims(self, layer: "Experts", path: str) -> dict[str, Tensor | None]: ...

    def apply(self, layer: "Experts", x: Tensor, weights: Tensor, experts: Tensor) -> Tensor: ...


class PlainExperts:
    """Two stacks of matrices of the model's type."""

    def shapes(self, count: int, hidden_size: int, inner_size: int) -> Mapping[str, tuple[int, ...]]:
        return {"up": (count, 2 * inner_size, hidden_size), "down": (count, hidden_size, inner_size)}  # gate above up

    def claims(self, layer: "Experts", path: str) -> dict[str, Tensor | None]:
        up, down = layer.up.data, layer.down.data
        if layer.fused:
            whole = {f"{path}.gate_up_proj": up, f"{path}.down_proj": down}
            return {name: data.transpose(1, 2) if layer.transposed else data for name, data in whole.items()}
        taken: dict[str, Tensor | None] = {}
        for expert in range(layer.count):
            taken[f"{path}.{expert}.gate_proj.weight"] = up[expert, : layer.inner_size]
            taken[f"{path}.{expert}.up_proj.weight"] = up[expert, layer.inner_size :]
            taken[f"{path}.{expert}.down_proj.weight"] = down[expert]
        return taken

    def apply(self, layer: "Experts", x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        return experts_forward(x, weights, experts, layer.up, layer.down, layer.activation)


class Experts(MethodLayer):
    """At `path` it takes `path.<e>.gate_proj.weight`, `path.<e>.up_proj.weight` and `path.<e>.down_proj.weight`, or all experts
    at once: `path.gate_up_proj` [E, 2 * inner, hidden] and `path.down_proj` [E, hidden, inner], or both the other way round."""

    up: nn.Parameter
    down: nn.Parameter

    def __init__(self, count: int, hidden_size: int, inner_size: int, activation: str) -> None:
        super().__init__()
        self.activation = check_activation(activation)
        self.count, self.hidden_size, self.inner_size = count, hidden_size, inner_size
        self.fused = self.transposed = False  # how the checkpoint has them
        self.use(PlainExperts())

    def use(self, method: ExpertsMethod) -> None:
        self.method = method
        self.declare(method.shapes(self.count, self.hidden_size, self.inner_size))

    def arrange(self, path: str, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.fused = f"{path}.gate_up_proj" in shapes
        other = (self.count, self.inner_size, self.hidden_size)
        self.transposed = self.fused and shapes.get(f"{path}.down_proj") == other

    def claims(self, path: str) -> dict[str, Tensor | None]:
        return self.method.claims(self, path)

    def forward(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """x [T, H], weights and experts [T, top_k] -> [T, H]."""
        return self.method.apply(self, x, weights, experts)


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
