"""Linear layers, alone or several over one input merged into one matrix.

How the numbers are stored and multiplied is a *method*: it names the parameters, says where a checkpoint tensor belongs in
them, may repack them when all are loaded, and multiplies.
"""

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

from quire.layers.parameter import MethodLayer, parameter
from quire.ops.linear import gated_linear, linear


class LinearMethod(Protocol):
    @property
    def dtype(self) -> torch.dtype | None:
        """Of the stored parameters; None = the model's."""
        ...

    def shapes(self, inputs: int, outputs: int) -> Mapping[str, tuple[int, ...]]:
        """The parameters by the name the checkpoint gives them after the layer's path."""
        ...

    def load(self, name: str, stored: nn.Parameter, start: int, size: int, inputs: int) -> Tensor:
        """The view of parameter `name` that takes the checkpoint tensor of outputs start ... start + size."""
        ...

    def finish(self, layer: "Linear") -> None: ...

    def apply(self, layer: "Linear", x: Tensor) -> Tensor: ...

    def apply_gated(self, layer: "Linear", x: Tensor, activation: str) -> Tensor:
        """The first half of the outputs is a gate of the second: activation(gate) * up [..., outputs / 2]."""
        ...


class Plain:
    """One matrix [outputs, inputs] of the model's type."""

    dtype = None

    def shapes(self, inputs: int, outputs: int) -> Mapping[str, tuple[int, ...]]:
        return {"weight": (outputs, inputs)}

    def load(self, name: str, stored: nn.Parameter, start: int, size: int, inputs: int) -> Tensor:  # noqa: ARG002
        return stored.data[start : start + size]

    def finish(self, layer: "Linear") -> None:
        pass

    def apply(self, layer: "Linear", x: Tensor) -> Tensor:
        return linear(x, layer.weight, layer.bias)

    def apply_gated(self, layer: "Linear", x: Tensor, activation: str) -> Tensor:
        return gated_linear(x, layer.weight, layer.bias, activation)


class Linear(MethodLayer):
    """`transposed`: the checkpoint stores [inputs, outputs], as GPT-2's does."""

    weight: nn.Parameter

    def __init__(
        self, inputs: int, outputs: int, *, bias: bool = False, transposed: bool = False, method: LinearMethod | None = None
    ) -> None:
        super().__init__()
        self.inputs, self.outputs = inputs, outputs
        self.transposed = transposed
        self.use(method or Plain())
        self.bias = parameter(outputs) if bias else None

    def use(self, method: LinearMethod) -> None:
        self.method = method
        self.declare(method.shapes(self.inputs, self.outputs), method.dtype)

    def parts(self, path: str) -> Mapping[str, int]:
        """Path in the checkpoint -> number of outputs, from the top of the matrix down."""
        return {path: self.outputs}

    def claims(self, path: str) -> dict[str, Tensor | None]:
        taken: dict[str, Tensor | None] = {}
        start = 0
        for part, size in self.parts(path).items():
            for name in self.stored:
                view = self.method.load(name, self.get_parameter(name), start, size, self.inputs)
                taken[f"{part}.{name}"] = view.t() if self.transposed else view
            if self.bias is not None:
                taken[f"{part}.bias"] = self.bias.data[start : start + size]
            start += size
        return taken

    def finish(self, device: torch.device) -> None:  # noqa: ARG002
        self.method.finish(self)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., inputs] -> [..., outputs]."""
        return self.method.apply(self, x)

    def gated(self, x: Tensor, activation: str) -> Tensor:
        """As `LinearMethod.apply_gated`: in one launch where the method can."""
        return self.method.apply_gated(self, x, activation)


class MergedLinear(Linear):
    """Siblings in the checkpoint, one matrix here: at `a.qkv` with parts q_proj, ... it takes `a.q_proj.weight`, ..."""

    def __init__(
        self, inputs: int, parts: Mapping[str, int], *, bias: bool = False, method: LinearMethod | None = None
    ) -> None:
        super().__init__(inputs, sum(parts.values()), bias=bias, method=method)
        self.sizes = dict(parts)

    def parts(self, path: str) -> Mapping[str, int]:
        above = path.rpartition(".")[0]
        return {f"{above}.{name}" if above else name: size for name, size in self.sizes.items()}
