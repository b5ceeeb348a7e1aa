"""What a model needs of the cache, and how that was laid out in pages."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from math import prod

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
EIGHT_BITS = {"fp8": "fp8_e4m3", "fp8_e4m3": "fp8_e4m3", "fp8_e5m2": "fp8_e5m2"}  # kv_cache_dtype -> type
SCALE_BYTES = 4  # of numbers of 8 bits: one for the key of a token and a head, and one for its value


@dataclass(frozen=True)
class LayerCache:
    """The cache one attention layer needs. `window` is the number of positions a query sees, itself included; None = all.
    `latent`: the first so many numbers of a key are its value, too, and no values are kept beside keys; None = they are.

    Layers that keep something else have a class of their own with the same properties; layers of one `kind` and window share
    groups, and `cache/groups.py` has a class for every kind.
    """

    kv_heads: int
    head_dim: int
    window: int | None = None
    latent: int | None = None

    @property
    def sides(self) -> int:
        """Keys and values, or both in one."""
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
    """What a recurrent layer keeps of a sequence instead of keys and values, however long that is: the last inputs of its
    convolution, in the model's type, and its state, in float32. Either may be empty."""

    conv: tuple[int, ...] = (0,)  # channels, inputs
    state: tuple[int, ...] = (0,)

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
    """Otherwise a buffer has to lie page by page."""
    if element_bytes == 1:
        return False
    alike = len({(layer.sides, layer.kv_heads, layer.head_dim) for layer in layers}) == 1
    return alike and layout.page_bytes == layers[0].page_bytes(layout.page_size, element_bytes)


class KVLayout(Enum):
    """How a buffer lies in memory.

    PAGES   [ page 0: keys of head 0, head 1 ..., values of head 0 ... | page 1 ... ]
    LINES   [ keys of head 0: page 0, page 1, ... | keys of head 1: ... | values of head 0: ... ]
    SPLIT   [ keys of all heads: page 0, page 1, ... | values of all heads: page 0, page 1, ... ]

    Buffers that cannot be divided lie page by page nevertheless, and so do those of numbers of 8 bits: behind a page's numbers
    are their scales.
    """

    PAGES = "page by page"
    LINES = "line by line"  # pages that follow each other are one piece per head, and need no copy
    SPLIT = "keys apart from values"
