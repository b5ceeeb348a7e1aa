"""NVIDIA ModelOpt: FP8 per tensor, output or block, and NVFP4 weights."""

from collections.abc import Mapping
from math import lcm
from typing import Any

import torch

from quire.layers.quant.fp8 import float8_layout
from quire.layers.quant.layout import Dim, Float4Layout, Layout, check_group
from quire.layers.quant.scheme import CheckpointScheme, Inventory, as_object, contains, get_names, get_object, get_text
from quire.layers.quant.stored import Target
from quire.ops.quantized_layouts import Activation
from quire.types.errors import ModelError

# algorithm: (outputs and inputs that share a scale (0: all), activation quantization)
FLOAT8 = {
    "FP8": ((0, 0), Activation.TENSOR),
    "FP8_PER_CHANNEL_PER_TOKEN": ((1, 0), Activation.TOKEN),
    "FP8_PB_WO": ((128, 128), Activation.NONE),
    "MXFP8": ((1, 32), Activation.NONE),
}
FLOAT4 = ("NVFP4", "W4A16_NVFP4")
GROUP = 16
MIXED = "MIXED_PRECISION"


class ModelOptScheme(CheckpointScheme):
    def __init__(self, config: Mapping[str, Any], inventory: Inventory | None, target: Target) -> None:
        super().__init__(config, inventory, target)
        self._algorithm = (get_text(config, "quant_algo") or "").upper()
        self._not = get_names(config, "exclude_modules", "ignore")
        layers = get_object(config, "quantized_layers") or {}
        self._layers = {layer: as_object(f"quantized_layers: {layer}", found) for layer, found in layers.items()}
        if self._algorithm not in (*FLOAT8, *FLOAT4, MIXED):
            known = ", ".join((*FLOAT8, *FLOAT4, MIXED))
            raise ModelError(
                f"quantization_config: the quant_algo {config.get('quant_algo')!r} is not supported; supported: {known}"
            )

    @property
    def grain(self) -> int:
        named = {(get_text(found, "quant_algo") or "").upper() for found in self._layers.values()}
        algorithms = named if self._algorithm == MIXED else {self._algorithm}
        blocks = [FLOAT8[each][0] if each in FLOAT8 else (1, GROUP) for each in algorithms]
        return lcm(*(max(1, size) for block in blocks for size in block))

    def layout(self, name: str, outputs: int, inputs: int) -> Layout | None:
        names, sizes = self.checkpoint_name(name), (outputs, inputs)
        if contains(self._not, names):
            return None
        algorithm = self._algorithm
        if algorithm == MIXED:
            found = next((self._layers[own] for own in names if own in self._layers), None)
            if found is None:
                return None
            algorithm = (get_text(found, "quant_algo") or "").upper()
        if algorithm in FLOAT8:
            return float8_layout(self, name, sizes, "weight_scale", *FLOAT8[algorithm], powers=algorithm == "MXFP8")
        if algorithm not in FLOAT4:
            raise ModelError(f"{name}: the quant_algo {algorithm!r} is not supported")
        check_group(inputs, GROUP, name)
        raw = {
            "weight": self.raw(name, "weight", (Dim("outputs"), Dim("inputs", 2)), sizes, torch.uint8),
            "weight_scale": self.raw(
                name, "weight_scale", (Dim("outputs"), Dim("inputs", GROUP)), sizes, torch.float8_e4m3fn
            ),
            "weight_scale_2": self.raw(name, "weight_scale_2", (), sizes, torch.float32),
        }  # fmt: skip
        unused = self.unused(name, "input_scale", sizes, experts=True)
        return Float4Layout(
            raw | unused, "weight", "weight_scale", GROUP, "weight_scale_2", skipped=("input_scale",),
            scales=("weight_scale_2", *unused),
        )  # fmt: skip
