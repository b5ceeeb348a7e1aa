"""The cache that a model needs, and its layout in pages."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from math import prod

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
EIGHT_BITS = {"fp8": "fp8_e4m3", "fp8_e4m3": "fp8_e4m3", "fp8_e5m2": "fp8_e5m2"}  # kv_cache_dtype -> dtype
EVICTION_POLICIES = ("lru", "lfu", "cost")  # `cache/policies.py`
SCALE_BYTES = 4  # of 8-bit caches: a scale per token and head for the key, and one for the value


@dataclass(frozen=True)
class LayerCache:
    """The cache of one attention layer. `window`: positions that a query attends to, itself included; None: all.
    `latent`: the value is the first `latent` elements of the key, and no values are stored (MLA); None: values are stored.

    Layers of one `kind` and window share groups, and `cache/groups.py` has a class for every kind.
    groups, and `cache/groups.py` has a class for every kind.
    """

    kv_heads: int
    head_dim: int
    window: int | None = None
    latent: int | None = None

    @property
    def sides(self) -> int:
        """Return 2 for keys and values, 1 if they are stored together."""
        return 2 if self.latent is None else 1

    @property
    def kind(self) -> str:
        return "full" if self.window is None else "window"

    def bytes_per_token(self, element_bytes: int) -> int:
        scale = SCALE_BYTES if element_bytes == 1 else 0
        return self.sides * self.kv_heads * (self.head_dim * element_bytes + scale)

    def page_bytes(self, page_size: int, element_bytes: int) -> int:
        return page_size * self.bytes_per_token(element_bytes)


@dataclass(frozen=True)
class StateCache:
    """The state of a recurrent layer for a sequence of any length: the last inputs of its convolution, in the model's dtype,
    and its recurrent state, in float32. Either may be empty.

    keys: key heads (groups of B and C), each of which serves an equal number of heads; 0: the layer has channels, no heads
    """

    conv: tuple[int, ...] = (0,)  # channels, inputs
    state: tuple[int, ...] = (0,)  # heads or channels, ...
    keys: int = 0
    key_channels: int = 0  # channels of the convolution for each key head; the others belong to the heads

    @property
    def units(self) -> int:
        """Return the heads or channels that ranks divide."""
        return self.state[0] or self.conv[0]

    def bytes(self, element_bytes: int) -> int:
        return prod(self.conv) * element_bytes + 4 * prod(self.state)


@dataclass(frozen=True)
class CacheGroup:
    """Layers that share one page table. `layers[j]` is the model layer whose keys live in buffer j."""

    kind: str
    window: int | None
    layers: tuple[int, ...]


@dataclass(frozen=True)
class CacheLayout:
    """Pages of `page_size` tokens; a page id is valid in every buffer, and belongs to one group at a time.

    buffer 0   [ page 0 | page 1 | page 2 | ... ]      group A's layer 0, or group B's layer 6, ...
    buffer 1   [ page 0 | page 1 | page 2 | ... ]      group A's layer 1, or group B's layer 7, ...
    """

    page_size: int
    page_bytes: int  # of one page in one buffer
    buffers: int
    groups: tuple[CacheGroup, ...]

    @property
    def bytes_per_page(self) -> int:
        return self.page_bytes * self.buffers


def can_divide(layout: CacheLayout, layers: Sequence[LayerCache], element_bytes: int) -> bool:
    """Return whether buffers can have another layout than PAGES."""
    if element_bytes == 1:
        return False
    uniform = len({(layer.sides, layer.kv_heads, layer.head_dim) for layer in layers}) == 1
    return uniform and layout.page_bytes == layers[0].page_bytes(layout.page_size, element_bytes)


class KVLayout(Enum):
    """The memory layout of a buffer.

    PAGES   [ page 0: keys of head 0, head 1 ..., values of head 0 ... | page 1 ... ]
    LINES   [ keys of head 0: page 0, page 1, ... | keys of head 1: ... | values of head 0: ... ]
    SPLIT   [ keys of all heads: page 0, page 1, ... | values of all heads: page 0, page 1, ... ]

    Buffers that cannot be divided have PAGES nevertheless, and so do 8-bit caches: the scales are stored after a page's
    values.
    """

    PAGES = "page by page"
    LINES = "line by line"  # consecutive pages are contiguous per head, and need no copy
    SPLIT = "keys apart from values"
