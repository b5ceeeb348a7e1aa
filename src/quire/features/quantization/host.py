"""Quantized weights: memory of their dequantized copies."""

from typing import TYPE_CHECKING

from quire.features.host import NO_MEMORY, Feature, Memory, Sizes
from quire.types.cache import DTYPE_BYTES
from quire.types.prompts import Extras

if TYPE_CHECKING:
    from quire.config.config import Config


class QuantizedWeights(Feature):
    name = "quantization"

    def memory(self, config: "Config", sizes: Sizes) -> Memory:
        return Memory(optional=sizes.copied_values * DTYPE_BYTES[config.dtype]) if may_copy(config) else NO_MEMORY

    def cache_salt(self, extras: Extras) -> tuple[str, ...]:  # noqa: ARG002
        return ()


def may_copy(config: "Config") -> bool:
    """Several engines or ranks on one GPU have no copies: none of them sees what the others will allocate."""
    wanted = config.args.dequantized_copies is not False
    return wanted and config.device == "cuda" and config.dtype != "float32" and not config.share_gpus
