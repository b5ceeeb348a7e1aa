"""What a model needs of the cache, and how that was laid out in pages."""

from dataclasses import dataclass
from typing import Literal

GroupKind = Literal["full", "window"]


@dataclass(frozen=True)
class LayerCache:
    """The cache one attention layer needs. `window` is the number of positions a query sees, itself included; None = all."""

    kv_heads: int
    head_dim: int
    window: int | None = None

    @property
    def kind(self) -> GroupKind:
        return "full" if self.window is None else "window"

    def bytes_per_token(self, element_bytes: int) -> int:
        return 2 * self.kv_heads * self.head_dim * element_bytes


@dataclass(frozen=True)
class CacheGroup:
    """Layers that share one page table. `layers[j]` is the model layer whose keys live in buffer j."""

    kind: GroupKind
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
