"""Where a rank stands among those that share a model's matrices."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import lcm

from quire.types.cache import LayerCache
from quire.types.errors import ConfigError

GRAINS = (256, 32, 8)  # numbers that had better stay together: blocks of quantized matrices, and what processors load at once
UNEVEN = 8  # so many grains for each rank, and it does not matter that some ranks have one more


@dataclass(frozen=True)
class Position:
    rank: int
    size: int  # ranks that there are
    expert_parallel: bool = False  # each rank has whole experts; otherwise each has a part of every expert
    grain: int = 1  # numbers that cannot be parted, where there are enough for all ranks: groups of a quantized matrix


ALONE = Position(0, 1)
Cut = Callable[[Position], range]  # which numbers along a dimension are a rank's


def divide(count: int, position: Position) -> range:
    """As evenly as can be."""
    if count < position.size:
        raise ConfigError(f"{count} cannot be divided among {position.size} ranks")
    return range(count * position.rank // position.size, count * (position.rank + 1) // position.size)


def evenly(count: int) -> Cut:
    """Between grains, where they are many or go up; the position's own also where they are few. The last of those may be less."""

    def cut(position: Position) -> range:
        least = position.grain if count > position.grain * (position.size - 1) else 1
        for grain in (lcm(each, least) for each in GRAINS):
            grains, rest = divmod(count, grain)
            if not rest and (grains % position.size == 0 or grains >= UNEVEN * position.size):
                return _times(divide(grains, position), grain)
        share = _times(divide(-(-count // least), position), least)
        return range(share.start, min(share.stop, count))

    return cut


@dataclass(frozen=True)
class HeadDivision:
    """Of an attention: each key head serves equally many query heads, on every rank.

    Ranks that are no more than key heads have some of these with all their query heads. If there are more, several ranks have
    the same key head, and each some of its query heads.
    """

    queries: int
    keys: int
    size: int  # numbers of a head

    def share(self, position: Position) -> tuple[range, range]:
        """Query heads and key heads."""
        if self.queries < position.size:
            raise ConfigError(f"{self.queries} attention heads cannot be divided among {position.size} ranks")
        group = self.queries // self.keys
        if position.size <= self.keys:
            keys = share_keys(self.keys, position)
            return _times(keys, group), keys
        ranks = [rank * self.keys // position.size for rank in range(position.size)]  # the key head of each
        keys = share_keys(self.keys, position)
        first = ranks.index(keys.start)
        own = divide(group, Position(position.rank - first, ranks.count(keys.start)))
        return range(keys.start * group + own.start, keys.start * group + own.stop), keys

    def holders(self, position: Position) -> int:
        """How many ranks have the key heads of this one."""
        ranks = [rank * self.keys // position.size for rank in range(position.size)]
        return ranks.count(ranks[position.rank]) if position.size > self.keys else 1

    def cut_queries(self, position: Position) -> range:
        return _times(self.share(position)[0], self.size)

    def cut_keys(self, position: Position) -> range:
        return _times(self.share(position)[1], self.size)


def share_keys(count: int, position: Position) -> range:
    """A rank's of so many key heads: some, or one that others have as well."""
    if position.size <= count:
        return divide(count, position)
    key = position.rank * count // position.size
    return range(key, key + 1)


def share_layers(layers: Sequence[LayerCache], position: Position) -> tuple[LayerCache, ...]:
    """What a rank's cache holds of each."""
    if position.size == 1:
        return tuple(layers)
    return tuple(replace(layer, kv_heads=len(share_keys(layer.kv_heads, position))) for layer in layers)


def largest_share(layers: Sequence[LayerCache], size: int) -> tuple[LayerCache, ...]:
    """What the cache of the rank holds that has most of them: pages are counted by it."""
    if size == 1:
        return tuple(layers)
    return tuple(replace(layer, kv_heads=-(-layer.kv_heads // size)) for layer in layers)


def _times(some: range, factor: int) -> range:
    return range(some.start * factor, some.stop * factor)
