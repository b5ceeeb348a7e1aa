"""FP8 with a scale per matrix, output or block of 128 x 128, and FP8 quantization at load (quantization="fp8")."""

from collections.abc import Mapping
from math import lcm
from typing import Any

import torch
from torch import Tensor

from quire.files.reading import shown
from quire.layers.class_linear import ClassLinear
from quire.layers.embedding import Embedding, Head
from quire.layers.linear import Linear, Plain
from quire.layers.moe import Experts, PlainExperts
from quire.layers.quant.layout import Dim, Float8Layout
from quire.layers.quant.scheme import MATRIX, ROUTERS, CheckpointScheme, Inventory, get_names, get_text
from quire.layers.quant.stored import QuantizedLinear, Target
from quire.ops.quantized import (
    dequantized,
    device_layout,
    quantize_float8,
    quantized_experts_forward,
)
from quire.ops.quantized_layouts import Activation
from quire.types.errors import ModelError

ACTIVATIONS = ("dynamic", "static")


class Float8Scheme(CheckpointScheme):
    def __init__(self, config: Mapping[str, Any], inventory: Inventory | None, target: Target) -> None:
        super().__init__(config, inventory, target)
        self._block = read_block(config.get("weight_block_size"))
        self._activation = get_text(config, "activation_scheme") or "dynamic"
        if self._activation not in ACTIVATIONS:
            raise ModelError(f"quantization_config: activation_scheme must be dynamic or static, got {self._activation!r}")
        self._not = get_names(config, "ignored_layers", "modules_to_not_convert")
        if self._block is not None and self._activation == "static":
            raise ModelError("quantization_config: weight_block_size requires the activation_scheme dynamic; got static")

    @property
    def grain(self) -> int:
        return lcm(*(self._block or ()))

    def layout(self, name: str, outputs: int, inputs: int) -> Float8Layout | None:
        names = self.checkpoint_name(name)
        if name == "lm_head" or any(own == listed or own.startswith(f"{listed}.") for own in names for listed in self._not):
            return None
        if self._block is not None:
            return float8_layout(self, name, (outputs, inputs), "weight_scale_inv", self._block, Activation.GROUP)
        activation = Activation.TENSOR if self._activation == "static" else Activation.TOKEN
        info = self.info(name, "weight_scale")
        by_output = self.config.get("quant_method") == "fbgemm_fp8" or (info is not None and info.elements == outputs > 1)
        return float8_layout(self, name, (outputs, inputs), "weight_scale", (1, 0) if by_output else (0, 0), activation)


def read_block(value: Any) -> tuple[int, int] | None:
    """Return the block size of weight_block_size or block_structure: [128, 128] or "128x128"."""
    if value is None:
        return None
    parts = value.split("x") if isinstance(value, str) else value
    if not isinstance(parts, list) or len(parts) != 2 or not all(map(_is_size, parts)):
        raise ModelError(f"quantization_config: a block must be two positive integers such as [128, 128]; got {shown(value)}")
    return int(parts[0]), int(parts[1])


def _is_size(part: Any) -> bool:
    digits = str(part).strip()
    return digits.isascii() and digits.isdigit() and int(digits) > 0


def float8_layout(
    scheme: CheckpointScheme,
    name: str,
    sizes: tuple[int, int],
    scale: str,
    block: tuple[int, int],
    activation: Activation,
    powers: bool = False,
) -> Float8Layout:
    """Return the layout of FP8 weights.

    block: outputs and inputs that share a scale; 0: all
    powers: bytes are scales, too: exponents of 2
    """
    rows, columns = block
    dims = [Dim("outputs", rows)] if rows else []
    dims += [Dim("inputs", columns)] if columns else []
    info = scheme.info(name, scale)
    kind = torch.float32 if info is None else torch.uint8 if powers and info.dtype == "U8" else None
    raw = {
        "weight": scheme.raw(name, "weight", MATRIX, sizes, torch.float8_e4m3fn),
        scale: scheme.raw(name, scale, tuple(dims), sizes, kind),
    }
    if activation is Activation.TENSOR:
        raw["input_scale"] = scheme.raw(name, "input_scale", (), sizes, torch.float32)
        return Float8Layout(raw, scale, rows, columns, activation, scales=(scale, "input_scale"))
    unused = scheme.unused(name, "input_scale", sizes)
    return Float8Layout(raw | unused, scale, rows, columns, activation, skipped=("input_scale",), scales=(scale, *unused))


# ---- quantized at load ------------------------------------------------------------------------------------------------------


class OnlineLinear(QuantizedLinear, Plain):
    matrix = None  # until the weights are loaded

    def finish(self, layer: Linear) -> None:
        form = quantize_float8(layer.weight.data)
        self.matrix = device_layout(form)
        if self.matrix is None:
            layer.hold(Plain(), weight=dequantized(form, layer.weight.dtype))
        else:
            layer.hold(self)


class OnlineExperts(PlainExperts):
    matrices: tuple[Any, Any]

    def finish(self, layer: Experts) -> None:
        super().finish(layer)
        up, down = (device_layout(quantize_float8(stack.data)) for stack in (layer.up, layer.down))
        assert up is not None and down is not None  # kernels for scales per channel take any size
        self.matrices = up, down
        layer.hold(self)

    def apply(self, layer: Experts, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        return quantized_experts_forward(x, weights, experts, *self.matrices, layer.gating, layer.biases)


class RoundedLinear(Plain):
    """Quantize and dequantize, for devices without fp8 GEMMs."""

    def finish(self, layer: Linear) -> None:
        layer.hold(Plain(), weight=dequantized(quantize_float8(layer.weight.data), layer.weight.dtype))


class RoundedExperts(PlainExperts):
    def finish(self, layer: Experts) -> None:
        super().finish(layer)
        up, down = (dequantized(quantize_float8(stack.data), stack.dtype) for stack in (layer.up, layer.down))
        layer.hold(PlainExperts(), up=up, down=down)


class OnlineFloat8Scheme:
    """quantization="fp8" for a checkpoint of floats: matrices are quantized after loading,
    except embedding, head, routers and classification heads."""

    def __init__(self, config: Mapping[str, Any], inventory: Inventory | None, target: Target) -> None:  # noqa: ARG002
        self._target = target

    def linear(self, path: str, layer: Linear) -> Plain | None:
        if path.rpartition(".")[2] in ROUTERS or isinstance(layer, ClassLinear):
            return None
        return OnlineLinear() if "fp8" in self._target.keeps and not layer.as_floats else RoundedLinear()

    def embedding(self, path: str, layer: Embedding) -> None:  # noqa: ARG002
        return None

    def head(self, path: str, layer: Head) -> None:  # noqa: ARG002
        return None

    def experts(self, path: str, layer: Experts) -> PlainExperts:  # noqa: ARG002
        return OnlineExperts() if self._target.keeps >= {"fp8", "experts"} else RoundedExperts()
