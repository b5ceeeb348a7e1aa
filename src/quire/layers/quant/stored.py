"""Quantized linear layers: loaded as the checkpoint stores them (`layout`), then converted to a quantized layout
(`ops/quantized_layouts.py`), or dequantized to the model's dtype if the device does not keep that layout."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from quire.layers.embedding import Head, PlainHead
from quire.layers.linear import Linear, Plain
from quire.layers.moe import Experts, PlainExperts, UngatedExperts
from quire.layers.parameter import CheckpointTensor, Destination, Method, WeightSlices
from quire.layers.quant.layout import UNDIVIDED, Layout, Raw, check_scales
from quire.ops.quantized import (
    dequantized,
    device_layout,
    quantized_experts_forward,
    quantized_gated_linear,
    quantized_linear,
    quantized_linear_float,
    rounding_for,
)
from quire.ops.quantized_layouts import Activations, Rounding, merge
from quire.types.errors import ModelError

# tensors with the group of each input: the configuration field that enables them
ACT_ORDER = {"g_idx": "desc_act", "weight_g_idx": "weight_g_idx"}
VALUES_AT_ONCE = 1 << 26  # values of experts that are converted together


@dataclass(frozen=True)
class Target:
    """What quantized matrices are converted to. `dequantized` counts the dequantized ones by layout."""

    dtype: torch.dtype
    keeps: frozenset[str]  # layouts that the device multiplies by, and "experts" if experts may stay quantized
    dequantized: Counter[str] = field(default_factory=Counter)

    def combine(self, parts: Sequence[Any], stack: bool = False) -> Any:
        """Return parts stacked along the outputs as one quantized matrix, or as floats in the model's dtype."""
        whole = merge(parts) if not any(isinstance(part, Tensor) for part in parts) else None
        if whole is not None and whole.kind in self.keeps and ("experts" in self.keeps or not stack):
            held = device_layout(whole)
            if held is not None:
                return held
        self.dequantized[parts[0].kind if whole is not None else "mixed"] += 1
        floats = [part.to(self.dtype) if isinstance(part, Tensor) else dequantized(part, self.dtype) for part in parts]
        return floats[0] if len(floats) == 1 else torch.cat(floats, dim=-2)


@dataclass(frozen=True)
class QuantizedSlice:
    """One quantized matrix of the checkpoint, and the slice of it that a layer holds."""

    name: str
    layout: Layout
    whole: tuple[int, int]  # outputs and inputs of the checkpoint's matrix
    outputs: tuple[range, ...]
    inputs: range
    called: tuple[str, ...]  # the checkpoint's names; one for each expert of this rank

    @property
    def local(self) -> tuple[int, int]:
        return sum(map(len, self.outputs)), len(self.inputs)

    def checkpoint_tensor(self, name: str, raw: Raw, view: Tensor) -> CheckpointTensor:
        """Return the checkpoint tensor that fills `view`, the layer's whole share of it."""
        where, at, destinations, done = f"{self.name}.{name}", raw.outputs, list[Destination](), 0
        if name in ACT_ORDER and raw.dims[0].along == "inputs" and len(self.inputs) < self.whole[1]:
            groups = f"act-order groups ({ACT_ORDER[name]})"
            raise ModelError(f"{self.name}: {groups} cannot be divided along the inputs {UNDIVIDED}")
        for rows in self.outputs if at is not None else self.outputs[:1]:
            ranges = raw.ranges(rows, self.inputs, self.whole, where)
            place = view
            if at is not None:
                size = ranges[at][1] - ranges[at][0]
                place, done = view.narrow(at, done, size), done + size
            destinations.append(Destination(place, ranges))
        return CheckpointTensor(raw.shape(*self.whole), tuple(destinations)).simple

    def convert(self, tensors: Mapping[str, Tensor], called: str) -> Any:
        check_scales(self.layout, tensors, called)
        return self.layout.convert(tensors, called)


class QuantizedLinear:
    """GEMM of a linear layer by a quantized matrix."""

    matrix: Any

    def rounding(self, x: Activations) -> Rounding | None:
        return rounding_for(self.matrix, x)

    def apply(self, layer: Linear, x: Activations) -> Tensor:
        return quantized_linear(x, self.matrix, layer.bias)

    def apply_gated(self, layer: Linear, x: Activations, activation: str, rounding: Rounding | None = None) -> Activations:
        return quantized_gated_linear(x, self.matrix, layer.bias, activation, rounding)


class HeldLinear(QuantizedLinear):
    """Linear layer with a quantized matrix if the device supports the layout; otherwise it becomes a plain layer."""

    target: Target

    def install(self, layer: Linear, parts: Sequence[Any]) -> None:
        """Set the matrix to parts stacked along the outputs."""
        found = self.target.combine(parts)
        if isinstance(found, Tensor):
            layer.hold(Plain(), weight=found)
        else:
            layer.hold(self)
            self.matrix = found


class HeldHead:
    target: Target
    matrix: Any  # a quantized layout

    def install(self, layer: Head, parts: Sequence[Any]) -> None:
        found = self.target.combine(parts)
        if isinstance(found, Tensor):
            layer.hold(PlainHead(), weight=found)
        else:
            layer.hold(self)
            self.matrix = found

    def apply(self, layer: Head, hidden: Tensor) -> Tensor:
        return quantized_linear_float(hidden, self.matrix, layer.bias)


class HeldExperts:
    target: Target
    up: Any  # quantized layouts: up [E, 2 * inner, hidden] with gate rows first, down [E, hidden, inner]
    down: Any

    def install(self, layer: Experts, *stacks: Any) -> None:
        """Set the matrices. stacks: gate, up and down; without a gate they are dequantized."""
        target = self.target if layer.gated else replace(self.target, keeps=frozenset())
        above, below = target.combine(stacks[:-1], stack=True), target.combine(stacks[-1:], stack=True)
        if isinstance(above, Tensor) or isinstance(below, Tensor):
            floats = [part if isinstance(part, Tensor) else dequantized(part, self.target.dtype) for part in (above, below)]
            layer.hold(PlainExperts() if layer.gated else UngatedExperts(), up=floats[0], down=floats[1])
        else:
            layer.hold(self)
            self.up, self.down = above, below

    def apply(self, layer: Experts, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        return quantized_experts_forward(x, weights, experts, self.up, self.down, layer.gating, layer.biases)


class QuantizedParameters(Method):
    """Tensors of quantized matrices as parameters of a layer of any kind."""

    def __init__(self, matrices: Mapping[str, QuantizedSlice], target: Target, stack: tuple[int, ...] = ()) -> None:
        """stack: leading dimensions of each tensor."""
        self.matrices, self.target, self.stack = matrices, target, stack
        self._raw = {
            f"{key}_{name.replace('.', '_')}": (matrix, raw, name)
            for key, matrix in matrices.items()
            for name, raw in matrix.layout.raw.items()
        }
        self.dtypes = {key: raw.dtype for key, (_, raw, _) in self._raw.items() if raw.dtype is not None}

    def declared(self) -> Mapping[str, tuple[int, ...]]:
        return {key: (*self.stack, *raw.shape(*matrix.local)) for key, (matrix, raw, _) in self._raw.items()}

    def all_slices(self, layer: Any) -> WeightSlices:
        taken: WeightSlices = {
            f"{matrix.name}.{name}": None for matrix in self.matrices.values() for name in matrix.layout.skipped
        }
        for key, (matrix, raw, name) in self._raw.items():
            taken[f"{matrix.name}.{name}"] = matrix.checkpoint_tensor(name, raw, layer.get_parameter(key).data)
        return taken

    def tensors(self, layer: Any, key: str) -> dict[str, Tensor]:
        matrix = self.matrices[key]
        return {name: layer.get_parameter(f"{key}_{name.replace('.', '_')}").data for name in matrix.layout.raw}

    def convert(self, layer: Any) -> list[Any]:
        return [matrix.convert(self.tensors(layer, key), matrix.called[0]) for key, matrix in self.matrices.items()]


class StoredLinear(HeldLinear, QuantizedParameters):
    """Linear layer of matrices stacked along the outputs."""

    def shapes(self, inputs: int, outputs: int) -> Mapping[str, tuple[int, ...]]:  # noqa: ARG002
        return self.declared()

    def weight_slices(self, layer: Linear, path: str) -> WeightSlices:  # noqa: ARG002
        return self.all_slices(layer)

    def finish(self, layer: Linear) -> None:
        self.install(layer, self.convert(layer))


class StoredHead(QuantizedParameters, HeldHead):
    """Head of one matrix."""

    def shapes(self, vocab_size: int, hidden_size: int) -> Mapping[str, tuple[int, ...]]:  # noqa: ARG002
        return self.declared()

    def weight_slices(self, layer: Head, path: str) -> WeightSlices:  # noqa: ARG002
        return self.all_slices(layer)

    def finish(self, layer: Head) -> None:
        self.install(layer, self.convert(layer))


class StoredExperts(QuantizedParameters, HeldExperts):
    """Experts: `gate` if there is one, `up` and `down` of every expert of this rank. A matrix's name follows the expert's
    number."""

    def shapes(self, count: int, hidden_size: int, inner_size: int) -> Mapping[str, tuple[int, ...]]:  # noqa: ARG002
        return self.declared()

    def weight_slices(self, layer: Experts, path: str) -> WeightSlices:
        taken: WeightSlices = {}
        for key, (matrix, raw, name) in self._raw.items():
            stack = layer.get_parameter(key).data
            for expert in range(layer.total):
                place = f"{path}.{expert}.{matrix.name}.{name}"
                taken[place] = (
                    matrix.checkpoint_tensor(name, raw, stack[expert - layer.local.start]) if expert in layer.local else None
                )
        for matrix in self.matrices.values():
            for name in set(matrix.layout.skipped) - matrix.layout.raw.keys():
                taken |= {f"{path}.{expert}.{matrix.name}.{name}": None for expert in range(layer.total)}
        return taken

    def finish(self, layer: Experts) -> None:
        self.install(layer, *(self._convert_stack(layer, key) for key in self.matrices))

    def _convert_stack(self, layer: Experts, key: str) -> Any:
        """Convert some experts at a time: intermediate values need more memory."""
        matrix, tensors = self.matrices[key], self.tensors(layer, key)
        step = max(1, VALUES_AT_ONCE // (matrix.local[0] * matrix.local[1]))
        starts = range(0, self.stack[0], step)
        return join_stacks(
            [self._convert_some(matrix, tensors, range(start, min(start + step, self.stack[0]))) for start in starts]
        )

    def _convert_some(self, matrix: QuantizedSlice, tensors: Mapping[str, Tensor], some: range) -> Any:
        try:
            return matrix.convert(
                {name: values[some.start : some.stop] for name, values in tensors.items()}, matrix.called[some[0]]
            )
        except ModelError:
            for one in some if len(some) > 1 else ():  # find the broken expert
                self._convert_some(matrix, tensors, range(one, one + 1))
            raise


def join_stacks(stacks: Sequence[Any]) -> Any:
    """Concatenate stacks of the same layout."""
    first = stacks[0]
    if len(stacks) == 1:
        return first
    if isinstance(first, Tensor):
        return torch.cat(list(stacks))
    names = [item.name for item in fields(first) if isinstance(getattr(first, item.name), Tensor)]
    return replace(first, **{name: torch.cat([getattr(stack, name) for stack in stacks]) for name in names})
