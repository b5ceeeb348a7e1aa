"""Rows of one token beyond what is known, for drafters with a cache.

What they write behind the last known token is written again when that has come. Where a table has no page yet, they guess
worse, and nobody else notices.
"""

import torch
from torch import Tensor

from quire.attn.batch import Batch, GroupView
from quire.runner.slots import Slots


class Ahead:
    """Row after row of the same slots, over the pages of one of the model's groups."""

    def __init__(self, slots: Slots, group: int, slot: Tensor) -> None:
        self._size, self._last = slots.page_size, slots.length - 1
        self._tables = slots.tables[group, slot]
        self._starts = torch.arange(len(slot) + 1, dtype=torch.int32, device=slot.device)
        self._index = torch.arange(len(slot), device=slot.device)

    def batch(self, ids: Tensor, place: Tensor) -> Batch:
        """ids and place [R] int64: each row runs this token, at this position."""
        size, place = self._size, place.clamp(0, self._last)
        page = place // size
        write = self._tables.gather(1, page[:, None])[:, 0].long() * size + (place - page * size)
        lengths = (place + 1).tolist()
        width = -(-max(lengths) // size)
        return Batch(
            ids=ids,
            positions=place,
            row_starts=self._starts,
            kv_lengths=(place + 1).int(),
            rows=tuple((i, 1, keys) for i, keys in enumerate(lengths)),
            logit_index=self._index,
            groups=(GroupView(self._tables[:, :width].contiguous(), write),),
        )
