"""Snapshots of recurrent states as bytes."""

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.layers.recurrent import Recurrence
from quire.runner.transfer import upload_together
from quire.types.plan import Ints


class StateMemory:
    """The states of all recurrent layers, after these were bound to them: those of an entry follow each other."""

    def __init__(self, layers: Sequence[Recurrence]) -> None:
        self._arrays = [array for layer in layers for array in layer.bound() if array.numel()]  # each [entries, ...]
        self._sizes = [array[0].numel() * array.itemsize for array in self._arrays]
        self.bytes = sum(self._sizes)  # of an entry

    def gather(self, entries: Ints) -> Tensor:
        """Return copies of these entries, [entries, bytes] uint8."""
        (index,) = upload_together([entries], self._arrays[0].device)
        return torch.cat([array[index].view(len(entries), -1).view(torch.uint8) for array in self._arrays], 1)

    def scatter(self, entries: Ints, content: Tensor) -> None:
        """Overwrite these entries. content: [entries, bytes] uint8"""
        (index,) = upload_together([entries], self._arrays[0].device)
        for array, part in zip(self._arrays, torch.split(content, self._sizes, 1), strict=True):
            array[index] = part.clone().view(array.dtype).view(len(entries), *array.shape[1:])
