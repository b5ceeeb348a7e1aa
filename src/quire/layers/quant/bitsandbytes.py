"""bitsandbytes: nf4 and fp4 in blocks of 64, and int8 by output."""

from collections.abc import Mapping
from typing import Any

import torch

from quire.layers.quant.layout import BlockwiseLayout, Dim, Int8Layout, Layout, Raw
from quire.layers.quant.scheme import DTYPES, MATRIX, CheckpointScheme, Inventory, contains, get_bool, get_names, get_text
from quire.layers.quant.stored import Target
from quire.ops.quantized_layouts import Activation
from quire.types.errors import ModelError

BLOCK = 64  # values per scale
NESTED = 256  # scales per second-level scale
CODED = 16  # codes of 4 bits
CODES = ("nf4", "fp4")


class BitsAndBytesScheme(CheckpointScheme):
    def __init__(self, config: Mapping[str, Any], inventory: Inventory | None, target: Target) -> None:
        super().__init__(config, inventory, target)
        self._eight, self._four = get_bool(config, "load_in_8bit"), get_bool(config, "load_in_4bit")
        if self._eight == self._four:
            raise ModelError("quantization_config: one of load_in_4bit and load_in_8bit must be true")
        self._code = get_text(config, "bnb_4bit_quant_type") or "fp4"
        if self._four and self._code not in CODES:
            raise ModelError(f"quantization_config: bnb_4bit_quant_type must be nf4 or fp4, got {self._code!r}")
        self._not = get_names(config, "llm_int8_skip_modules")
        self._nested = get_bool(config, "bnb_4bit_use_double_quant")

    def layout(self, name: str, outputs: int, inputs: int) -> Layout | None:
        if name == "lm_head" or contains(self._not, self.checkpoint_name(name)):
            return None
        return self._ints(name, outputs, inputs) if self._eight else self._floats(name, outputs, inputs)

    def _ints(self, name: str, outputs: int, inputs: int) -> Int8Layout:
        sizes = outputs, inputs
        raw = {
            "weight": self.raw(name, "weight", MATRIX, sizes, torch.int8),
            "SCB": self.raw(name, "SCB", (Dim("outputs"),), sizes, torch.float32),
        }
        return Int8Layout(raw, 0, Activation.TOKEN, "SCB", 127.0, skipped=("weight_format",), scales=(), signed=False)

    def _floats(self, name: str, outputs: int, inputs: int) -> BlockwiseLayout:
        sizes, state = (outputs, inputs), f"weight.quant_state.bitsandbytes__{self._code}"
        if inputs % BLOCK:
            raise ModelError(f"{name}: blocks of {BLOCK} do not divide its {inputs} inputs")
        info = self.info(name, "weight")
        kind = torch.uint8 if info is None else DTYPES.get(info.dtype, torch.uint8)
        raw = {
            "weight": self.raw(name, "weight", (Dim("all", 2 * kind.itemsize), Dim("neither", 1)), sizes, kind),
            "weight.absmax": self.raw(
                name, "weight.absmax", (Dim("all", BLOCK),), sizes, torch.uint8 if self._nested else torch.float32
            ),
        }  # fmt: skip
        if self.has(name, "weight.quant_map"):
            raw["weight.quant_map"] = self.raw(name, "weight.quant_map", (Dim("neither", CODED),), sizes)
        if self._nested:
            raw["weight.nested_absmax"] = Raw((Dim("all", BLOCK * NESTED),), torch.float32)
            raw["weight.nested_quant_map"] = Raw((Dim("neither", 256),), torch.float32)
        state_info = self.info(name, state)
        if state_info is not None or (self._nested and self.inventory is not None):
            raw[state] = Raw((Dim("neither", 1 if state_info is None else state_info.elements),), torch.uint8)
        return BlockwiseLayout(raw, self._code, outputs, inputs, BLOCK, NESTED if self._nested else 0, state)
