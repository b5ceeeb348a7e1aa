"""The share of a rank in a model's matrices and attention heads."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import lcm

from quire.types.cache import LayerCache, StateCache
from quire.types.errors import ConfigError

GRAINS = (256, 32, 8)  # preferred units of a share: blocks of quantized matrices, and vector widths
MIN_UNEVEN_GRAINS = 8  # per rank; from there on, one grain more on some ranks does not matter


@dataclass(frozen=True)
class Position:
    """The place of a rank in its group."""

    rank: int
    size: int  # number of ranks
    expert_parallel: bool = False  # each rank has whole experts; else a part of every expert
    grain: int = 1  # smallest unit of a share if there are enough for all ranks, e.g. quantization groups


ALONE = Position(0, 1)
Cut = Callable[[Position], range]  # the indices of a dimension that a rank has


def divide(count: int, position: Position) -> range:
    """Divide `count` as evenly as possible."""
    if count < position.size:
        raise ConfigError(f"{count} cannot be divided among {position.size} ranks")
    return range(count * position.rank // position.size, count * (position.rank + 1) // position.size)


def evenly(count: int) -> Cut:
    """Return a cut of `count` indices at multiples of a grain, if that is about even; the position's own grain is always
    respected.

    The last unit may be smaller.
    """

    def cut(position: Position) -> range:
        least = position.grain if count > position.grain * (position.size - 1) else 1
        for grain in (lcm(each, least) for each in GRAINS):
            grains, rest = divmod(count, grain)
            if not rest and (grains % position.size == 0 or grains >= MIN_UNEVEN_GRAINS * position.size):
                return _times(divide(grains, position), grain)
        share = _times(divide(-(-count // least), position), least)
        return range(share.start, min(share.stop, count))

    return cut


def channels_of(count: int) -> Cut:
    """Return a cut of the channels of a recurrent layer: as `evenly`, but whatever the grain, since the size of a state does not
    depend on how weights are stored.
    """
    return lambda position: evenly(count)(replace(position, grain=1))


@dataclass(frozen=True)
class HeadDivision:
    """How attention heads are divided: on every rank each KV head serves the same number of query heads.

    With at most as many ranks as KV heads, each rank has some KV heads with all their query heads. With more, several ranks
    have the same KV head, and each has some of its query heads.
    """

    queries: int
    keys: int
    size: int  # head_dim
    kind: str = "attention"

    def share(self, position: Position) -> tuple[range, range]:
        """Return the query heads and KV heads of a rank."""
        if self.queries < position.size:
            raise ConfigError(f"{self.queries} {self.kind} heads cannot be divided among {position.size} ranks")
        group = self.queries // self.keys
        if position.size <= self.keys:
            keys = share_keys(self.keys, position)
            return _times(keys, group), keys
        ranks = [rank * self.keys // position.size for rank in range(position.size)]  # the KV head of each
        keys = share_keys(self.keys, position)
        first = ranks.index(keys.start)
        own = divide(group, Position(position.rank - first, ranks.count(keys.start)))
        return range(keys.start * group + own.start, keys.start * group + own.stop), keys

    def holders(self, position: Position) -> int:
        """Return how many ranks have the KV heads of this one."""
        ranks = [rank * self.keys // position.size for rank in range(position.size)]
        return ranks.count(ranks[position.rank]) if position.size > self.keys else 1

    def cut_queries(self, position: Position) -> range:
        return _times(self.share(position)[0], self.size)

    def cut_keys(self, position: Position) -> range:
        return _times(self.share(position)[1], self.size)


def share_keys(count: int, position: Position) -> range:
    """Return a rank's KV heads: some, or one that other ranks have too."""
    if position.size <= count:
        return divide(count, position)
    key = position.rank * count // position.size
    return range(key, key + 1)


def share_layers(layers: Sequence[LayerCache], position: Position) -> tuple[LayerCache, ...]:
    """Return what the KV cache of a rank holds of each layer."""
    if position.size == 1:
        return tuple(layers)
    return tuple(replace(layer, kv_heads=len(share_keys(layer.kv_heads, position))) for layer in layers)


def largest_share(layers: Sequence[LayerCache], size: int) -> tuple[LayerCache, ...]:
    """Return what the KV cache of the rank with most KV heads holds; pages are sized by it."""
    if size == 1:
        return tuple(layers)
    return tuple(replace(layer, kv_heads=-(-layer.kv_heads // size)) for layer in layers)


def recurrent_heads(heads: int, keys: int, size: int) -> HeadDivision:
    """Return the division of a recurrent layer's heads."""
    return HeadDivision(heads, keys, size, "recurrent")


def share_state(state: StateCache, position: Position) -> StateCache:
    """Return what a rank holds of a recurrent layer's state."""
    if position.size == 1:
        return state
    if not state.keys:
        own = len(channels_of(state.units)(position))
        return replace(state, conv=_first(state.conv, own), state=_first(state.state, own))
    heads, keys = recurrent_heads(state.units, state.keys, 1).share(position)
    each = (state.conv[0] - state.keys * state.key_channels) // state.units
    channels = len(heads) * each + len(keys) * state.key_channels
    return replace(state, conv=_first(state.conv, channels), state=_first(state.state, len(heads)), keys=len(keys))


def largest_state(state: StateCache, size: int, element_bytes: int) -> int:
    """Return the bytes of a recurrent layer's state on the rank that holds most of it."""
    return max(share_state(state, Position(rank, size)).bytes(element_bytes) for rank in range(size))


def _first(shape: tuple[int, ...], size: int) -> tuple[int, ...]:
    return (size, *shape[1:]) if shape[0] else shape


def _times(some: range, factor: int) -> range:
    return range(some.start * factor, some.stop * factor)
