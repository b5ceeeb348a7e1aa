"""Numbers of 8 and 4 bits with a point, as checkpoints have them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from quire.files.reading import shown, told
from quire.layers.quant.layout import LARGEST, Raw, check_numbers, check_sign
from quire.ops.quantized_layouts import TABLES, Activation, Code, Float4, Float8, pack_nibbles, powers_of_two
from quire.types.errors import ModelError
from quire.types.json_text import read_json

NEAR = 1e-3  # a table that is stored in fewer bits is the same one: neighbours in it are farther apart


@dataclass(frozen=True)
class Float8Layout:
    """weight [N, K] and `scale`: one for all, for each output, or for blocks; with Activation.TENSOR also input_scale."""

    raw: Mapping[str, Raw]
    scale: str  # its name
    rows: int  # outputs and inputs of a block; 0 = all
    columns: int
    activation: Activation
    skipped: tuple[str, ...] = ()
    scales: tuple[str, ...] = ("weight_scale",)
    signed: bool = False

    def convert(self, tensors: Mapping[str, Tensor], where: str) -> Float8:
        numbers, scale = tensors["weight"], tensors[self.scale]
        check_numbers(numbers, f"{where}.weight")
        *lead, outputs, inputs = numbers.shape
        columns = self.columns or inputs
        scale = powers_of_two(scale) if scale.dtype == torch.uint8 else scale.float()
        given = tensors.get("input_scale") if self.activation is Activation.TENSOR else None
        input_scale = None if given is None else given.float().reshape(lead)
        if not self.rows:  # each output has that of the tensor
            scale = scale.reshape(*lead, 1, 1).expand(*lead, outputs, 1)
        scale = scale.reshape(*lead, -1, -(-inputs // columns))
        return Float8(self.rows or 1, columns, numbers, scale.contiguous(), self.activation, input_scale)


@dataclass(frozen=True)
class Float4Layout:
    """Two numbers to a byte, the first in the low half: `numbers` [N, K / 2] and `scale` [N, K / group]; nvfp4 also has a
    factor for the tensor, that of compressed-tensors a divisor."""

    raw: Mapping[str, Raw]
    numbers: str
    scale: str
    group: int
    factor: str | None = None
    divides: bool = False
    skipped: tuple[str, ...] = ()
    scales: tuple[str, ...] = ()
    signed: bool = False

    def convert(self, tensors: Mapping[str, Tensor], where: str) -> Float4:
        numbers = tensors[self.numbers]
        *lead, outputs, _ = numbers.shape
        scale = tensors[self.scale].reshape(*lead, outputs, -1)
        if scale.dtype == torch.float8_e4m3fn:
            check_numbers(scale, f"{where}.{self.scale}")
            check_sign(scale.float(), f"{where}.{self.scale}")
        if scale.dtype == torch.float8_e8m0fnu:
            scale = scale.view(torch.uint8)
        factor = None
        if self.factor is not None:
            one = tensors[self.factor].float().reshape(*lead, 1, 1)
            if self.divides:
                one = 1 / one
                if not bool((one * LARGEST).isfinite().all()):
                    raise ModelError(f"{where}.{self.factor} is too small to divide by; the checkpoint is damaged")
            factor = one.expand(*lead, outputs, 1).contiguous()
        return Float4("e2m1", self.group, numbers, scale, factor)


@dataclass(frozen=True)
class BlockwiseLayout:
    """bitsandbytes: `weight` has all numbers row by row, two to a byte, the first in the high half; each `group` of them have a
    scale, which may be of 8 bits itself, with a scale for each `nested` and an offset for all. `state` says it as JSON.
    Tables of what numbers stand for are there, too: `quant_map`, which must be what is known of the code."""

    raw: Mapping[str, Raw]
    code: str
    outputs: int  # of the whole matrix
    inputs: int
    group: int
    nested: int  # scales that share one; 0 = none do
    state: str
    skipped: tuple[str, ...] = ()
    scales: tuple[str, ...] = ()
    signed: bool = False

    def convert(self, tensors: Mapping[str, Tensor], where: str) -> Float4:
        state = self._read_state(tensors, where)
        self._check_table(tensors, where)
        packed = tensors["weight"].flatten().view(torch.uint8)
        numbers = torch.stack((packed >> 4, packed & 15), dim=-1).view(-1, self.inputs)
        scale = tensors["weight.absmax"]
        if self.nested:
            table, factors = tensors["weight.nested_quant_map"].float(), tensors["weight.nested_absmax"].float()
            if not bool((table[1:] >= table[:-1]).all()) or not bool((table.abs() <= 1).all()) or float(table[-1]) == 0:
                raise ModelError(f"{where}.weight.nested_quant_map does not rise from -1 to 1; the checkpoint is damaged")
            if not bool(factors.isfinite().all()):
                raise ModelError(f"{where}.weight.nested_absmax has a scale that is not a number; the checkpoint is damaged")
            check_sign(factors, f"{where}.weight.nested_absmax")
            offset = state.get("nested_offset", 0.0)
            scale = table[scale.int()] * factors.repeat_interleave(self.nested)[: len(scale)] + offset
        if not bool(scale.isfinite().all()):
            raise ModelError(f"{where}.weight.absmax has a scale that is not a number; the checkpoint is damaged")
        if not self.nested:  # rounding may put those a little below 0
            check_sign(scale, f"{where}.weight.absmax")
        return Float4(cast(Code, self.code), self.group, pack_nibbles(numbers), scale.float().view(len(numbers), -1))

    def _check_table(self, tensors: Mapping[str, Tensor], where: str) -> None:
        found = tensors.get("weight.quant_map")
        if found is None:
            return
        known = torch.tensor(TABLES[cast(Code, self.code)], device=found.device)
        if not torch.allclose(found.float(), known, rtol=0, atol=NEAR):
            raise ModelError(f"{where}.weight.quant_map is not the table of {self.code}; the checkpoint is damaged")

    def _read_state(self, tensors: Mapping[str, Tensor], where: str) -> dict[str, Any]:
        if self.state not in tensors:
            return {}
        try:
            state = read_json(bytes(tensors[self.state].tolist()))
        except ValueError as error:
            raise ModelError(f"{where}.{self.state} is not JSON ({told(error)})") from error
        if not isinstance(state, dict):
            raise ModelError(f"{where}.{self.state} must be an object, got {shown(state)}")
        expected = {"blocksize": self.group, "quant_type": self.code, "shape": [self.outputs, self.inputs]} | (
            {"nested_blocksize": self.nested} if self.nested else {}
        )
        for name, value in expected.items():
            if state.get(name, value) != value:
                raise ModelError(f"{where}.{self.state}: {name} is {shown(state[name])}; only {value!r} is read")
        offset = state.get("nested_offset")
        if self.nested and not (isinstance(offset, float | int) and math.isfinite(offset)):
            raise ModelError(f"{where}.{self.state}: nested_offset must be a number, got {shown(offset)}")
        return state
