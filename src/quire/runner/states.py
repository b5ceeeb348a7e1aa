"""The memory of recurrent states: an entry for each slot, snapshots of prefixes behind those, another for each slot where
drafts may be wrong, and one that is nobody's.

entries   [ slot 0 | slot 1 | ... | snapshot | ... | beside slot 0 | ... | nobody's ]      in every layer's two arrays
"""

from collections.abc import Callable, Sequence
from math import prod

import numpy as np
import torch
from torch import Tensor

from quire.layers.recurrent import Recurrence
from quire.runner.transfer import upload_together
from quire.types.plan import Ints


class StateBuffers:
    def __init__(
        self,
        layers: Sequence[Recurrence],
        slots: int,
        snapshots: int,
        dtype: torch.dtype,
        allocate: Callable[[int, int], Tensor],
        twice: bool = False,
    ) -> None:
        """`allocate`: pieces, and bytes of each -> raw memory [pieces, bytes] uint8, all zero. No slots: all share one entry,
        where what they compute does not matter. `twice`: a state is kept beside that of each slot."""
        self._shared = not slots
        self._beside = slots + snapshots
        self._entries = slots + snapshots + (slots if twice else 0) + 1
        self._arrays: list[Tensor] = []  # each [entries, ...]
        for layer in layers:
            conv, state = (
                _array(shape, kind, self._entries, allocate)
                for shape, kind in ((layer.cache.conv, dtype), (layer.cache.state, torch.float32))
            )
            layer.bind(conv, state)
            self._arrays += [array for array in (conv, state) if array.numel()]

    def entries(self, slots: Ints) -> Ints:
        return np.zeros_like(slots) if self._shared else slots

    def beside(self, slots: Ints) -> Ints:
        return slots + self._beside

    def copy(self, source: Ints, target: Ints) -> None:
        """state[target] = state[source]; no target is a source."""
        if not len(source) or self._shared:
            return
        read, write = upload_together([source, target], self._arrays[0].device)
        for array in self._arrays:
            array[write] = array[read]


def _array(shape: tuple[int, ...], dtype: torch.dtype, entries: int, allocate: Callable[[int, int], Tensor]) -> Tensor:
    size = prod(shape)
    if not size:
        return torch.empty(entries, *shape, dtype=dtype)
    return allocate(entries, size * dtype.itemsize).view(dtype).view(entries, *shape)
