"""A KV cache of 8 bits. Its scales are part of the page (`LayerCache.page_bytes`), so it takes nothing beside the cache."""

from typing import TYPE_CHECKING

from quire.features.host import NO_MEMORY, Feature, Memory, Sizes
from quire.types.prompts import Extras

if TYPE_CHECKING:
    from quire.config.config import Config


class QuantizedCache(Feature):
    name = "kv_quant"

    def memory(self, config: "Config", sizes: Sizes) -> Memory:  # noqa: ARG002
        return NO_MEMORY

    def cache_salt(self, extras: Extras) -> tuple[str, ...]:  # noqa: ARG002
        return ()
