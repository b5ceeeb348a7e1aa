"""AWQ: 4 bits in groups, with zero points."""

from collections.abc import Mapping
from math import lcm
from typing import Any

import torch

from quire.layers.quant.ints import AWQLayout
from quire.layers.quant.layout import Dim, check_group
from quire.layers.quant.scheme import CheckpointScheme, Inventory, contains, get_bool, get_int, get_names, get_text
from quire.layers.quant.stored import Target
from quire.types.errors import ModelError


class AWQScheme(CheckpointScheme):
    def __init__(self, config: Mapping[str, Any], inventory: Inventory | None, target: Target) -> None:
        super().__init__(config, inventory, target)
        bits = get_int(config, "bits", "w_bit")
        if bits != 4:
            raise ModelError(f"AWQ with {bits} bits is not known; 4 are")
        self._group = get_int(config, "group_size", "q_group_size", default=-1)
        version = (get_text(config, "version") or "gemm").lower()
        if version != "gemm":
            raise ModelError(f"AWQ's layout {version!r} is not read; gemm is")
        self._not = get_names(config, "modules_to_not_convert")
        self._head = get_bool(config, "lm_head")

    @property
    def grain(self) -> int:
        return lcm(8, max(1, self._group))

    def layout(self, name: str, outputs: int, inputs: int) -> AWQLayout | None:
        if contains(self._not, self.checkpoint_name(name)) or (name == "lm_head" and not self._head):
            return None
        group, sizes = inputs if self._group == -1 else self._group, (outputs, inputs)
        check_group(inputs, group, name)
        if outputs % 8:
            raise ModelError(f"{name}: AWQ packs outputs by eights, and it has {outputs}")
        eights, groups = Dim("outputs", 8), Dim("inputs", group)
        raw = {
            "qweight": self.raw(name, "qweight", (Dim("inputs"), eights), sizes, torch.int32),
            "scales": self.raw(name, "scales", (groups, Dim("outputs")), sizes),
        }
        if get_bool(self.config, "zero_point", True) or self.has(name, "qzeros"):
            raw["qzeros"] = self.raw(name, "qzeros", (groups, eights), sizes, torch.int32)
        return AWQLayout(raw, group)
