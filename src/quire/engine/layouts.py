"""How the cache of an engine lies, whose model may be divided among ranks and stages. Importing this imports no torch."""

from quire.cache.layout import make_layout
from quire.cache.stages import pool_layout, stage_layout
from quire.config.config import Config
from quire.dist.mesh import largest_share
from quire.engine.executor.nodes import share_ranks
from quire.types.cache import CacheLayout


def whole_layout(config: Config) -> CacheLayout:
    """By which pages are counted: those of the rank that has most of each."""
    layers = largest_share(config.facts.layers, config.ranks)
    if config.stages == 1:
        return make_layout(layers, config.page_size, config.cache_bytes, bool(config.facts.states))
    return pool_layout(layers, config.stage_layers, config.page_size, config.cache_bytes)


def share_memory(config: Config, layout: CacheLayout, memory: int) -> int:
    """Of memory that all ranks of a node have together, the part of the one that has most of each page: all get to the same
    number of pages so."""
    if config.stages == 1:
        return memory // config.node_ranks
    layers = largest_share(config.facts.layers, config.ranks)
    stages = [stage_layout(layers, stage, config.page_size, config.cache_bytes) for stage in config.stage_layers]
    each = [stage.bytes_per_page for stage in stages for _ in range(config.ranks)]  # rank
    most = max(sum(each[rank] for rank in node) for node in share_ranks(config.world, config.args.nnodes))
    return memory * layout.bytes_per_page // most
