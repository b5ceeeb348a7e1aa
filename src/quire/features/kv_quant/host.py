"""The 8-bit KV cache. Its scales are part of the page (`LayerCache.page_bytes`), so it takes no further memory."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.config.fields import TEXT, setting
from quire.features.host import NO_MEMORY, Conflict, Feature, Memory, Sizes
from quire.types.cache import EIGHT_BITS

if TYPE_CHECKING:
    from quire.config.config import Config


@dataclass
class CacheArgs:
    kv_cache_dtype: str = setting(
        "auto",
        TEXT,
        "cache and memory",
        "of cached keys and values: the model's (auto), or 8 bits with a scale for every token and head (fp8 is fp8_e4m3)",
        choices=("auto", "float32", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2"),
        after="kv_cache_memory_bytes",
    )


CONFLICTS: tuple[Conflict, ...] = (
    Conflict(
        "a cache of another type",
        lambda c: c.args.kv_cache_dtype not in ("auto", c.dtype, *EIGHT_BITS),
        lambda c: (
            f"kv_cache_dtype {c.args.kv_cache_dtype} is not the model's {c.dtype}; use auto, fp8 for 8 bits, or "
            f"dtype={c.args.kv_cache_dtype} for both"
        ),
    ),
    Conflict(
        "misaligned scales",
        lambda c: c.cache_bytes == 1 and any(x.sides * x.kv_heads * x.head_dim * c.page_size % 4 for x in c.facts.layers),
        lambda c: f"a cache of 8 bits needs pages of whole words of 4 bytes; block_size {2 * c.page_size} would do",
    ),
    Conflict(
        "latents of 8 bits",
        lambda c: c.cache_bytes == 1 and any(layer.latent for layer in c.facts.layers),
        lambda c: (
            f"kv_cache_dtype {c.args.kv_cache_dtype} is not built for latent attention (kv_lora_rank), whose cache is small; "
            "use auto"
        ),
    ),
    Conflict(
        "8 bits of nothing",
        lambda c: c.cache_bytes == 1 and not c.facts.layers,
        lambda c: (
            f"kv_cache_dtype {c.args.kv_cache_dtype}: {c.facts.architecture} has no keys and values to keep in 8 bits; its "
            "states are float32. Leave it at auto"
        ),
    ),
)  # fmt: skip


class QuantizedCache(Feature):
    name = "kv_quant"
    conflicts = CONFLICTS
    cache_salt = None  # a cache has one format as long as it lives

    def memory(self, config: "Config", sizes: Sizes) -> Memory:  # noqa: ARG002
        return NO_MEMORY
