"""How layers load and multiply ternary matrices."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from quire.layers.linear import Linear
from quire.layers.parameter import CheckpointTensor, Destination, Method, WeightSlices, rows_of
from quire.layers.quant.scheme import Inventory
from quire.layers.quant.stored import Target
from quire.ops.activation import gated
from quire.types.errors import ModelError


class TernaryLinear(Method):
    """The parameters are the rank's share of the checkpoint's tensors."""

    dtypes = MappingProxyType({"values": torch.int8, "scale": torch.float32})

    def shapes(self, inputs: int, outputs: int) -> Mapping[str, tuple[int, ...]]:
        return {"values": (outputs, inputs), "scale": (outputs,)}

    def weight_slices(self, layer: Linear, path: str) -> WeightSlices:
        slices: WeightSlices = {}
        columns = layer.local_inputs.start, layer.local_inputs.stop
        for name, part in layer.parts(path).items():  # of q, k and v in one layer, each
            places = [(start, rows) for start, rows in part.local]
            values = [
                Destination(layer.values.data[start : start + len(rows)], ((rows.start, rows.stop), columns))
                for start, rows in places
            ]
            slices[f"{name}.values"] = CheckpointTensor((part.outputs, layer.all_inputs), tuple(values)).simple
            scales = [(layer.scale.data[start : start + len(rows)], rows) for start, rows in places]
            slices[f"{name}.scale"] = rows_of((part.outputs,), scales)
        return slices

    def finish(self, layer: Linear) -> None:
        if not layer.scale.isfinite().all():
            raise ModelError("a ternary matrix has a scale that is NaN or infinite; the checkpoint is damaged")

    def apply(self, layer: Linear, x: Tensor) -> Tensor:
        out = x @ layer.values.to(x.dtype).T * layer.scale.to(x.dtype)
        return out if layer.bias is None else out + layer.bias

    def apply_gated(self, layer: Linear, x: Tensor, activation: str, rounding: Any = None) -> Tensor:
        return gated(self.apply(layer, x), activation)


class TernaryScheme:
    """Chooses the method of each layer. `inventory`: the checkpoint's tensors; None: the weights are random."""

    def __init__(self, config: Mapping[str, Any], inventory: Inventory | None, target: Target) -> None:
        self.inventory = inventory

    def linear(self, path: str, layer: Linear) -> TernaryLinear | None:
        if self.inventory is None:
            return TernaryLinear()
        ternary = [f"{name}.values" in self.inventory.tensors for name in layer.parts(path)]
        if any(ternary) and not all(ternary):
            raise ModelError(f"{path}: all of its matrices must be ternary, or none")
        return TernaryLinear() if all(ternary) else None

    def embedding(self, path: str, layer: Any) -> None:
        return None

    def head(self, path: str, layer: Any) -> None:
        return None

    def experts(self, path: str, layer: Any) -> None:
        return None
