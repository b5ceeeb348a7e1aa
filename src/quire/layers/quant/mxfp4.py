"""gpt-oss's experts in MXFP4.

The checkpoint has `gate_up_proj_blocks` [E, 2 * inner, hidden / 32, 16] with interleaved gate and up rows, `down_proj_blocks`
[E, hidden, inner / 32, 16], and `_scales` of the same shape without the last dimension. Devices without FP4 experts get floats.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from quire.layers.embedding import Embedding, Head
from quire.layers.linear import Linear
from quire.layers.moe import Experts, PlainExperts, pairs_of, part_pairs
from quire.layers.parameter import CheckpointTensor, Destination, Method, WeightSlices
from quire.layers.quant.layout import check_group, check_scale
from quire.layers.quant.scheme import Inventory
from quire.layers.quant.stored import Target
from quire.ops.quantized import device_layout, quantized_experts_forward
from quire.ops.quantized_layouts import Float4
from quire.types.errors import ModelError

GROUP, BYTES = 32, 16  # values that share a scale, and their bytes
STACKS = ("gate_up_proj", "down_proj")
PARTS = ("blocks", "scales")


class MXFP4Experts(Method):
    """Experts in MXFP4. A rank that holds a part of each expert reads whole blocks and drops the values of other ranks."""

    def __init__(self, layer: Experts, called: str, target: Target) -> None:
        for name, inputs in zip(STACKS, (layer.hidden_size, layer.total_inner), strict=True):
            check_group(inputs, GROUP, f"{called}.{name}")
        self._called, self._target = called, target
        self._inner = range(layer.local_inner.start // GROUP, -(-layer.local_inner.stop // GROUP))  # blocks
        self.dtypes = {f"{name}_{part}": torch.uint8 for name in STACKS for part in PARTS}

    def shapes(self, count: int, hidden_size: int, inner_size: int) -> Mapping[str, tuple[int, ...]]:
        up, down = (count, 2 * inner_size, hidden_size // GROUP), (count, hidden_size, len(self._inner))
        both = zip(STACKS, (up, down), strict=True)
        return {f"{name}_{part}": (*shape, BYTES) if part == "blocks" else shape for name, shape in both for part in PARTS}

    def weight_slices(self, layer: Experts, path: str) -> WeightSlices:
        hidden, inner, few = layer.hidden_size, layer.total_inner, (layer.local.start, layer.local.stop)
        wholes = (layer.total, 2 * inner, hidden // GROUP), (layer.total, hidden, inner // GROUP)
        ours = (
            (few, pairs_of(layer.local_inner), (0, hidden // GROUP)),
            (few, (0, hidden), (self._inner.start, self._inner.stop)),
        )
        taken: WeightSlices = {}
        for name, whole, ranges in zip(STACKS, wholes, ours, strict=True):
            blocks, scales = (layer.get_parameter(f"{name}_{part}").data for part in PARTS)
            taken[f"{path}.{name}_blocks"] = CheckpointTensor(
                (*whole, BYTES), (Destination(blocks, (*ranges, (0, BYTES))),)
            ).simple
            taken[f"{path}.{name}_scales"] = CheckpointTensor(whole, (Destination(scales, ranges),)).simple
        return taken

    up: Any  # quantized layouts
    down: Any

    def finish(self, layer: Experts) -> None:
        whole = layer.local_inner.start % GROUP == 0 and layer.local_inner.stop % GROUP == 0
        if whole and self._target.keeps >= {Float4.kind, "experts"}:
            gates, back = (self._form(layer, name) for name in STACKS)
            part_pairs(gates.numbers)
            part_pairs(gates.scale)
            self.up, self.down = device_layout(gates), device_layout(back)
            assert self.up is not None and self.down is not None  # kernels take groups of 32
            layer.hold(self)
            return
        up, down = (self._dequantize(layer, name) for name in STACKS)
        part_pairs(up)
        first = layer.local_inner.start - self._inner.start * GROUP
        down = down[..., first : first + len(layer.local_inner)].contiguous()
        layer.hold(PlainExperts(), up=up, down=down)

    def _form(self, layer: Experts, name: str) -> Float4:
        blocks, scales = (layer.get_parameter(f"{name}_{part}").data for part in PARTS)
        check_scale(scales, f"{self._called}.{name}_scales")
        return Float4("e2m1", GROUP, blocks.flatten(2), scales)

    def apply(self, layer: Experts, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        return quantized_experts_forward(x, weights, experts, self.up, self.down, layer.gating, layer.biases)

    def _dequantize(self, layer: Experts, name: str) -> Tensor:
        """Dequantize one expert at a time: intermediate values need more memory."""
        blocks, scales = (layer.get_parameter(f"{name}_{part}").data for part in PARTS)
        check_scale(scales, f"{self._called}.{name}_scales")
        self._target.dequantized[Float4.kind] += 1
        out = torch.empty(*blocks.shape[:2], blocks.shape[2] * GROUP, dtype=self._target.dtype, device=blocks.device)
        for place, numbers, scale in zip(out, blocks.flatten(2), scales, strict=True):
            place.copy_(Float4("e2m1", GROUP, numbers, scale).dequantize())
        return out


class MXFP4Scheme:
    """Experts in MXFP4; all other weights are floats."""

    grain = GROUP  # see `CheckpointScheme.grain`

    def __init__(self, config: Mapping[str, Any], inventory: Inventory | None, target: Target) -> None:  # noqa: ARG002
        self._inventory, self._target = inventory, target

    def linear(self, path: str, layer: Linear) -> None:  # noqa: ARG002
        return None

    def embedding(self, path: str, layer: Embedding) -> None:  # noqa: ARG002
        return None

    def head(self, path: str, layer: Head) -> None:  # noqa: ARG002
        return None

    def experts(self, path: str, layer: Experts) -> MXFP4Experts | None:
        if self._inventory is not None and f"{path}.gate_up_proj" in self._inventory.tensors:
            return None
        if not layer.paired:
            raise ModelError(f"{path}: mxfp4 is supported for the experts of gpt-oss only")
        called = path if self._inventory is None else self._inventory.names.get(path, path)
        return MXFP4Experts(layer, called, self._target)
