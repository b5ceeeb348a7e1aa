"""LoRA adapters: memory and cache salt."""

from typing import TYPE_CHECKING

from quire.features.host import NO_MEMORY, Feature, Memory, Sizes
from quire.types.cache import DTYPE_BYTES
from quire.types.prompts import Extras

if TYPE_CHECKING:
    from quire.config.config import Config

UPLOADS = 2  # adapters with room beside the slots of a GPU: one as its file stores it, one as the layers read it


def reserved_bytes(slots: int, adapter: int, uploads: bool) -> int:
    """Return bytes on the device for `slots` adapters of `adapter` bytes each. uploads: they are packed on the device."""
    return (slots + (UPLOADS if uploads else 0)) * adapter


class LoRA(Feature):
    name = "lora"

    def memory(self, config: "Config", sizes: Sizes) -> Memory:
        if not config.max_loras:
            return NO_MEMORY
        twice = sizes.linear_values * DTYPE_BYTES[config.dtype] if _holds_twice(config) else 0
        if config.device_facts.one_memory:  # an adapter takes its own size there when it is loaded
            return Memory(weights=twice)
        return Memory(weights=twice, reserved=reserved_bytes(config.max_loras, sizes.adapter, config.device == "cuda"))

    def cache_salt(self, extras: Extras) -> tuple[str, ...]:
        version = extras.adapter if extras.lora is None else extras.lora.version
        return (f"adapter={version}",) if version else ()


def _holds_twice(config: "Config") -> bool:
    """A CPU's kernels have a copy of the weights that adapters add to. Layers that run one by one have none: those with
    recurrent states, and those between which a draft head reads hidden states."""
    compiled = not config.facts.states and not (config.draft_head and config.draft_head.taps)
    return config.device_facts.packs_floats and config.dtype == "float32" and compiled
