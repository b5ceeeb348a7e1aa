"""compressed-tensors: groups of modules, each with its own weight format and activation quantization."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import lcm
from typing import Any

import torch

from quire.files.reading import shown
from quire.layers.quant.fp8 import float8_layout, read_block
from quire.layers.quant.layout import Dim, Float4Layout, Int8Layout, Layout, PackedLayout, check_group
from quire.layers.quant.patterns import Paths
from quire.layers.quant.scheme import (
    MATRIX,
    CheckpointScheme,
    Inventory,
    as_object,
    get_bool,
    get_int,
    get_names,
    get_object,
    get_text,
)
from quire.layers.quant.stored import Target
from quire.ops.quantized_layouts import Activation
from quire.types.errors import ModelError

CLASS = "Linear"  # module class that targets name
PACKED, PLAIN_INTS = "pack-quantized", ("int-quantized", "naive-quantized")
PLAIN_FLOATS = ("float-quantized", "naive-quantized")
STRATEGIES = ("tensor", "channel", "group", "block", "tensor_group")


@dataclass(frozen=True)
class Weights:
    """One group's `weights` and `input_activations`, with defaults filled in."""

    format: str
    bits: int
    type: str
    symmetric: bool
    strategy: str
    group: int  # 0 = none
    block: tuple[int, int] | None
    activation: Activation

    @property
    def grain(self) -> int:
        """Return the same as `CheckpointScheme.grain`."""
        words = 8 if self.format == PACKED else 1
        group = {"nvfp4-pack-quantized": 16, "mxfp4-pack-quantized": 32, "mxfp8-quantized": 32}.get(self.format, self.group)
        return lcm(words, group or 1, *(self.block or ()))


class CompressedTensorsScheme(CheckpointScheme):
    def __init__(self, config: Mapping[str, Any], inventory: Inventory | None, target: Target) -> None:
        super().__init__(config, inventory, target)
        for name in ("sparsity_config", "transform_config"):
            found = get_object(config, name) or {}
            if found.get("config_groups") or found.get("format", "dense") != "dense":
                raise ModelError(f"quantization_config: {name} is not supported: {shown(found)}")
        self._ignore = Paths("ignore", get_names(config, "ignore"))
        groups = get_object(config, "config_groups")
        if not groups:
            raise ModelError("quantization_config lacks config_groups")
        self._groups = [
            (Paths(f"{name}: targets", get_names(as_object(name, group), "targets")), read_group(name, group, config))
            for name, group in groups.items()
        ]

    @property
    def grain(self) -> int:
        return lcm(*(weights.grain for _, weights in self._groups if weights is not None))

    def layout(self, name: str, outputs: int, inputs: int) -> Layout | None:
        names = self.checkpoint_name(name)
        if self._ignore.match(names):
            return None
        weights = self._of(names)
        return None if weights is None else self._layout(weights, name, (outputs, inputs))

    def _of(self, names: tuple[str, ...]) -> Weights | None:
        """Return the weights of the first matching group; targets that name a module take precedence over those that name a
        class."""
        for targets, weights in self._groups:
            if targets.match(names):
                return weights
        return next((weights for targets, weights in self._groups if CLASS in targets), None)

    def _layout(self, weights: Weights, name: str, sizes: tuple[int, int]) -> Layout:
        match weights.type, weights.bits, weights.format:
            case "int", 4 | 8, "pack-quantized":
                return self._packed(weights, name, sizes)
            case "int", 4 | 8, kind if kind in PLAIN_INTS:
                return self._ints(weights, name, sizes)
            case "float", 8, kind if kind in PLAIN_FLOATS:
                return self._float8(weights, name, sizes)
            case "float", 8, "mxfp8-quantized":
                return float8_layout(self, name, sizes, "weight_scale", (1, 32), weights.activation, powers=True)
            case "float", 4, "nvfp4-pack-quantized" | "mxfp4-pack-quantized":
                return self._float4(weights, name, sizes)
        raise ModelError(f"{name}: {weights.type} of {weights.bits} bits in the format {weights.format!r} is not supported")

    def _packed(self, weights: Weights, name: str, sizes: tuple[int, int]) -> PackedLayout:
        outputs, inputs = sizes
        group, per = weights.group or inputs, 32 // weights.bits
        check_group(inputs, group, name)
        if weights.strategy not in ("group", "channel"):
            raise ModelError(f"{name}: packed integers support the strategies group and channel; got {weights.strategy!r}")
        if inputs % per or (not weights.symmetric and outputs % per):
            raise ModelError(f"{name}: {outputs} outputs and {inputs} inputs are not divisible by {per} values per word")
        groups = Dim("inputs", group)
        raw = {
            "weight_packed": self.raw(name, "weight_packed", (Dim("outputs"), Dim("inputs", per)), sizes, torch.int32),
            "weight_scale": self.raw(name, "weight_scale", (Dim("outputs"), groups), sizes),
        }
        if not weights.symmetric:
            dims = (Dim("outputs", per), groups)
            raw["weight_zero_point"] = self.raw(name, "weight_zero_point", dims, sizes, torch.int32)
        if self.has(name, "weight_g_idx"):
            raw["weight_g_idx"] = self.raw(name, "weight_g_idx", (Dim("inputs"),), sizes, torch.int32)
        return PackedLayout(raw, weights.bits, group)

    def _ints(self, weights: Weights, name: str, sizes: tuple[int, int]) -> Int8Layout:
        if weights.strategy == "group":
            check_group(sizes[1], weights.group, name)
        dims = {"tensor": (), "channel": (Dim("outputs"),), "group": (Dim("outputs"), Dim("inputs", weights.group or 1))}
        if weights.strategy not in dims:
            raise ModelError(f"{name}: the strategy {weights.strategy!r} is not supported for integers")
        scale = dims[weights.strategy]
        raw = {
            "weight": self.raw(name, "weight", MATRIX, sizes, torch.int8),
            "weight_scale": self.raw(name, "weight_scale", scale, sizes),
        }
        if not weights.symmetric:
            raw["weight_zero_point"] = self.raw(name, "weight_zero_point", scale, sizes, torch.int8)
        unused = self.unused(name, "input_scale", sizes)
        group = weights.group if weights.strategy == "group" else 0
        return Int8Layout(raw | unused, group, weights.activation, scales=("weight_scale", *unused))

    def _float8(self, weights: Weights, name: str, sizes: tuple[int, int]) -> Layout:
        blocks = {"tensor": (0, 0), "channel": (1, 0), "group": (1, weights.group), "block": weights.block}
        block = blocks.get(weights.strategy)
        if block is None:
            raise ModelError(f"{name}: the strategy {weights.strategy!r} is not supported for 8-bit floats")
        return float8_layout(self, name, sizes, "weight_scale", block, weights.activation)

    def _float4(self, weights: Weights, name: str, sizes: tuple[int, int]) -> Float4Layout:
        nvidia = weights.format.startswith("nvfp4")
        group = 16 if nvidia else 32
        if weights.group not in (0, group):
            raise ModelError(f"{name}: {weights.format} requires groups of {group}; got {weights.group}")
        check_group(sizes[1], group, name)
        kind = torch.float8_e4m3fn if nvidia else torch.uint8
        raw = {
            "weight_packed": self.raw(name, "weight_packed", (Dim("outputs"), Dim("inputs", 2)), sizes, torch.uint8),
            "weight_scale": self.raw(name, "weight_scale", (Dim("outputs"), Dim("inputs", group)), sizes, kind),
        }
        if not nvidia:
            return Float4Layout(raw, "weight_packed", "weight_scale", group, scales=("weight_scale",))
        factor = "weight_global_scale"
        raw[factor] = self.raw(name, factor, (), sizes, torch.float32)
        unused = self.unused(name, "input_global_scale", sizes)
        return Float4Layout(
            raw | unused, "weight_packed", "weight_scale", group, factor, True, skipped=("input_global_scale",),
            scales=(factor, *unused),
        )  # fmt: skip


def read_group(name: str, group: Mapping[str, Any], config: Mapping[str, Any]) -> Weights | None:
    """Return a config group's weights; None: the modules are not quantized."""
    weights = get_object(group, "weights")
    if weights is None:
        return None
    size = None if weights.get("group_size") is None else get_int(weights, "group_size")
    strategy = get_text(weights, "strategy") or ("tensor" if size is None else "channel" if size == -1 else "group")
    if strategy not in STRATEGIES:
        raise ModelError(f"quantization_config: {name} has the unknown strategy {strategy!r}; known: {', '.join(STRATEGIES)}")
    if strategy == "group" and (size is None or size <= 0):
        raise ModelError(f"quantization_config: {name} has groups, but its group_size is {shown(size)}")
    return Weights(
        format=get_text(group, "format") or get_text(config, "format") or "dense",
        bits=get_int(weights, "num_bits", default=8),
        type=get_text(weights, "type") or "int",
        symmetric=get_bool(weights, "symmetric", True),
        strategy=strategy,
        group=size if size is not None and size > 0 else 0,
        block=read_block(weights.get("block_structure")) or ((128, 128) if strategy == "block" else None),
        activation=read_activation(name, get_object(group, "input_activations")),
    )


def read_activation(name: str, given: Mapping[str, Any] | None) -> Activation:
    """Return how activations are quantized. 4-bit activations stay unquantized, which is more exact.

    A dynamic scale per tensor becomes one per token.
    """
    if given is None or get_int(given, "num_bits", default=8) != 8:
        return Activation.NONE
    strategy = get_text(given, "strategy") or "tensor"
    if strategy not in ("tensor", "token", "group", "tensor_group"):
        raise ModelError(f"quantization_config: {name} has activations with the unknown strategy {strategy!r}")
    dynamic = given.get("dynamic")
    if dynamic not in (None, False, True, "local"):
        raise ModelError(f"quantization_config: {name}: dynamic must be true or false, got {shown(dynamic)}")
    if not dynamic:
        return Activation.TENSOR if given.get("type") == "float" else Activation.TOKEN
    return Activation.GROUP if strategy == "group" else Activation.TOKEN
