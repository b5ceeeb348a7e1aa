"""GPTQ (4 or 8 bits, act-order) and AWQ (4 bits): integers in groups."""

from collections.abc import Mapping
from math import lcm
from typing import Any

import torch

from quire.files.reading import shown
from quire.layers.quant.layout import AWQLayout, Dim, GPTQLayout, check_group
from quire.layers.quant.patterns import Patterns
from quire.layers.quant.scheme import (
    CheckpointScheme,
    Inventory,
    as_object,
    contains,
    get_bool,
    get_int,
    get_names,
    get_object,
    get_text,
)
from quire.layers.quant.stored import Target
from quire.types.errors import ModelError

FORMATS = {"gptq": 1, "gptq_v2": 0}  # added to stored zero points


class GPTQScheme(CheckpointScheme):
    def __init__(self, config: Mapping[str, Any], inventory: Inventory | None, target: Target) -> None:
        super().__init__(config, inventory, target)
        kind = get_text(config, "checkpoint_format") or get_text(config, "format") or "gptq"
        if kind not in FORMATS:
            raise ModelError(f"GPTQ's format must be {' or '.join(FORMATS)}; got {kind!r}")
        self._added = FORMATS[kind]
        get_int(config, "bits")
        self._dynamic = read_dynamic(get_object(config, "dynamic") or {})
        patterns = [pattern.removeprefix("+:").removeprefix("-:") for pattern in self._dynamic]
        self._patterns = Patterns("dynamic", patterns)
        self._inside = read_inside(config.get("modules_in_block_to_quantize"))
        self._head = get_bool(config, "lm_head")

    @property
    def grain(self) -> int:
        changed = (changes for pattern, changes in self._dynamic.items() if changes and not pattern.startswith("-:"))
        return lcm(8, *(max(1, get_int(config, "group_size", default=-1)) for config in (self.config, *changed)))

    def layout(self, name: str, outputs: int, inputs: int) -> GPTQLayout | None:
        config = self._of(self.checkpoint_name(name))
        if config is None or (name == "lm_head" and not self._head):
            return None
        if self._inside and name != "lm_head" and not contains(self._inside, (name,)):
            return None
        bits, group = get_int(config, "bits"), get_int(config, "group_size", default=-1)
        if bits not in (4, 8):
            raise ModelError(f"{name}: GPTQ requires 4 or 8 bits; got {bits}")
        group, sizes, per = inputs if group == -1 else group, (outputs, inputs), 32 // bits
        check_group(inputs, group, name)
        if outputs % per or inputs % per:
            raise ModelError(f"{name}: GPTQ requires outputs and inputs divisible by {per}; got {outputs} and {inputs}")
        groups = Dim("inputs", group)
        raw = {
            "qweight": self.raw(name, "qweight", (Dim("inputs", per), Dim("outputs")), sizes, torch.int32),
            "scales": self.raw(name, "scales", (groups, Dim("outputs")), sizes),
        }
        if not get_bool(config, "sym", True) or self.has(name, "qzeros"):
            raw["qzeros"] = self.raw(name, "qzeros", (groups, Dim("outputs", per)), sizes, torch.int32)
        if group == inputs or self.inventory is None:
            return GPTQLayout(raw, bits, group, self._added, skipped=("g_idx",))
        shuffled = get_bool(config, "desc_act")
        if shuffled or self.has(name, "g_idx"):  # without desc_act every rank reads and checks all indices
            every = Dim("inputs") if shuffled else Dim("neither", inputs)
            raw["g_idx"] = self.raw(name, "g_idx", (every,), sizes, torch.int32)
        return GPTQLayout(raw, bits, group, self._added)

    def _of(self, names: tuple[str, ...]) -> Mapping[str, Any] | None:
        """Return a module's configuration by the first matching pattern; None: the module is not quantized."""
        fits = [any(each) for each in zip(*map(self._patterns.match, names), strict=True)]
        for (pattern, changes), here in zip(self._dynamic.items(), fits, strict=True):
            if here:
                return None if pattern.startswith("-:") or changes is False else {**self.config, **changes}
        return self.config


def read_dynamic(found: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the configuration changes by pattern; modules that are not quantized may have none."""
    for pattern, changes in found.items():
        if changes is not False and not pattern.startswith("-:"):
            as_object(f"dynamic: {pattern}", changes)
    return found


def read_inside(found: Any) -> list[str]:
    """Return the names in a list of names or of lists of names."""
    given = [] if found is None else found
    each = (
        [name for names in given for name in (names if isinstance(names, list) else [names])] if isinstance(given, list) else []
    )
    if not isinstance(given, list) or not all(isinstance(name, str) for name in each):
        raise ModelError(f"quantization_config: modules_in_block_to_quantize must be a list of names, got {shown(found)}")
    return each


class AWQScheme(CheckpointScheme):
    def __init__(self, config: Mapping[str, Any], inventory: Inventory | None, target: Target) -> None:
        super().__init__(config, inventory, target)
        bits = get_int(config, "bits", "w_bit")
        if bits != 4:
            raise ModelError(f"AWQ requires 4 bits; got {bits}")
        self._group = get_int(config, "group_size", "q_group_size", default=-1)
        version = (get_text(config, "version") or "gemm").lower()
        if version != "gemm":
            raise ModelError(f"AWQ's version must be gemm; got {version!r}")
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
            raise ModelError(f"{name}: AWQ requires outputs divisible by 8; got {outputs}")
        eights, groups = Dim("outputs", 8), Dim("inputs", group)
        raw = {
            "qweight": self.raw(name, "qweight", (Dim("inputs"), eights), sizes, torch.int32),
            "scales": self.raw(name, "scales", (groups, Dim("outputs")), sizes),
        }
        if get_bool(self.config, "zero_point", True) or self.has(name, "qzeros"):
            raw["qzeros"] = self.raw(name, "qzeros", (groups, eights), sizes, torch.int32)
        return AWQLayout(raw, group)
