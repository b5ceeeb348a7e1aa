"""The KV cache's eviction policy."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.config.fields import TEXT, setting
from quire.config.memory import parameter_parts
from quire.features.host import NO_MEMORY, Feature, Memory, Sizes
from quire.types.cache import EVICTION_POLICIES

if TYPE_CHECKING:
    from quire.config.config import Config

_GROUP = "cache and memory"


@dataclass
class TierArgs:
    cache_policy: str = setting(
        "lru",
        TEXT,
        _GROUP,
        "cached pages that are evicted first: unused for longest (lru), used least often (lfu), or saving the least "
        "computation (cost)",
        choices=EVICTION_POLICIES,
        after="enable_prefix_caching",
    )


class Tiers(Feature):
    name = "tiers"
    cache_salt = None

    def memory(self, config: "Config", sizes: Sizes) -> Memory:  # noqa: ARG002
        return NO_MEMORY


def even_pages(config: "Config") -> float:
    """Return the pages of a sequence at which full attention takes as many operations as the model's matrices."""
    parts, layers = parameter_parts(config.facts.hf), sum(layer.window is None for layer in config.facts.layers)
    if not layers or not parts.query_width:
        return float("inf")
    active = parts.dense + parts.expert * min(parts.experts, parts.experts_per_token)
    return active / (layers * parts.query_width * config.page_size)  # the mean position is half the length
