"""GPTQ: 4 or 8 bits in groups, which may be of inputs that are not neighbours (act-order)."""

import re
from collections.abc import Mapping
from typing import Any

import torch

from quire.layers.quant.ints import GPTQLayout
from quire.layers.quant.layout import Dim, check_group
from quire.layers.quant.scheme import CheckpointScheme, Inventory, contains, get_int
from quire.layers.quant.stored import Target
from quire.types.errors import ModelError

FORMATS = {"gptq": 1, "gptq_v2": 0}  # what is added to zero points


class GPTQScheme(CheckpointScheme):
    def __init__(self, config: Mapping[str, Any], inventory: Inventory | None, target: Target) -> None:
        super().__init__(config, inventory, target)
        kind = str(config.get("checkpoint_format") or config.get("format") or "gptq")
        if kind not in FORMATS:
            raise ModelError(f"GPTQ's format {kind!r} is not read; {' and '.join(FORMATS)} are")
        self._added = FORMATS[kind]
        dynamic = config.get("dynamic") or {}
        if not isinstance(dynamic, Mapping):
            raise ModelError(f"quantization_config: dynamic must be an object, got {dynamic!r}")
        self._dynamic: Mapping[str, Any] = dynamic
        inside = config.get("modules_in_block_to_quantize") or []
        self._inside = [name for names in inside for name in (names if isinstance(names, list) else [names])]
        self._head = bool(config.get("lm_head"))

    def layout(self, name: str, outputs: int, inputs: int) -> GPTQLayout | None:
        config = self._of(self.checkpoint_name(name))
        if config is None or (name == "lm_head" and not self._head):
            return None
        if self._inside and name != "lm_head" and not contains(self._inside, (name,)):
            return None
        bits, group = get_int(config, "bits"), get_int(config, "group_size", default=-1)
        if bits not in (4, 8):
            raise ModelError(f"{name}: GPTQ with {bits} bits is not read; 4 and 8 are")
        group, sizes, per = inputs if group == -1 else group, (outputs, inputs), 32 // bits
        check_group(inputs, group, name)
        if outputs % per or inputs % per:
            raise ModelError(f"{name}: GPTQ packs by {per}, which does not divide its {outputs} outputs and {inputs} inputs")
        groups = Dim("inputs", group)
        raw = {
            "qweight": self.raw(name, "qweight", (Dim("inputs", per), Dim("outputs")), sizes, torch.int32),
            "scales": self.raw(name, "scales", (groups, Dim("outputs")), sizes),
        }
        symmetric = bool(config.get("sym", True))
        if not symmetric or self.has(name, "qzeros"):
            raw["qzeros"] = self.raw(name, "qzeros", (groups, Dim("outputs", per)), sizes, torch.int32)
        skipped: tuple[str, ...] = ("g_idx",)
        if self.has(name, "g_idx") and group < inputs and config.get("desc_act"):
            raw["g_idx"] = self.raw(name, "g_idx", (Dim("inputs"),), sizes, torch.int32)
            skipped = ()
        return GPTQLayout(raw, bits, group, self._added, skipped)

    def _of(self, names: tuple[str, ...]) -> Mapping[str, Any] | None:
        """What holds for a module; None = it is not quantized. The first pattern that fits decides."""
        for pattern, changes in self._dynamic.items():
            if any(re.match(pattern.removeprefix("+:").removeprefix("-:"), name) for name in names):
                return None if pattern.startswith("-:") or changes is False else {**self.config, **changes}
        return self.config
