"""What adapters add to the products of a program (`program.py`): tables of addresses that kernels read, one for each layer.

inputs, parts, address of the entries ─► by place: address and ranks of down; of each part address of up, rank, first, count
"""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
from torch import Tensor

from quire.layers.lora import LinearBank, LinearLoRA

MOST_PARTS = 4


class LowRankTable:
    """Of one bank. The header stays where it is; entries grow with the places that there are."""

    def __init__(self, inputs: int) -> None:
        self._entries: npt.NDArray[np.int64] = np.zeros((2, 2 + 4 * MOST_PARTS), np.int64)
        self._header = np.array([inputs, MOST_PARTS, self._entries.ctypes.data], np.int64)
        self._kept: dict[int, list[Tensor]] = {}

    @property
    def address(self) -> int:
        return int(self._header.ctypes.data)

    def grow(self, place: int) -> None:
        """There is an entry for it from now on."""
        if place >= len(self._entries):
            more = np.zeros((2 * place, self._entries.shape[1]), np.int64)
            more[: len(self._entries)] = self._entries
            self._entries, self._header[2] = more, more.ctypes.data

    def write(self, place: int, numbers: LinearLoRA | None) -> None:
        self.grow(place)
        self._kept.pop(place, None)
        self._entries[place] = 0
        if numbers is None:
            return
        down, ups = numbers.narrow, [part.up.float().contiguous() for part in numbers.parts]
        self._kept[place] = [down, *ups]
        entry = [down.data_ptr(), down.shape[1]]
        for part, up in zip(numbers.parts, ups, strict=True):
            entry += [up.data_ptr(), len(up), part.start, up.shape[1]]
        self._entries[place, : len(entry)] = entry


class LowRankTables:
    """Of the layers of one model."""

    def __init__(self) -> None:
        self._tables: dict[LinearBank, LowRankTable] = {}
        self._unusual: dict[int, set[LinearBank]] = {}  # by place: who has something else of it
        self._largest = 0

    @property
    def banks(self) -> set[LinearBank]:
        return {*self._tables}

    def of(self, bank: LinearBank, inputs: int) -> LowRankTable:
        if bank not in self._tables:
            self._tables[bank] = LowRankTable(inputs)
        return self._tables[bank]

    def listen(self) -> None:
        """From now on what banks are given is in the tables, too."""
        for bank in self._tables:
            bank.on_change = lambda place, numbers, bank=bank: self._heard(bank, place, numbers)
            for place, numbers in bank.places.items():
                self._heard(bank, place, numbers)

    def have(self, places: Iterable[int]) -> list[int]:
        """Those of which they have all that the adapter adds. From now on they have an entry for each."""
        asked = list(places)
        if max(asked, default=0) > self._largest:
            self._largest = max(asked)
            for table in self._tables.values():
                table.grow(self._largest)
        return [place for place in asked if not self._unusual.get(place)]

    def _heard(self, bank: LinearBank, place: int, numbers: LinearLoRA | None) -> None:
        simple = numbers is None or (numbers.simple and len(numbers.parts) <= MOST_PARTS)
        (self._unusual.setdefault(place, set()).discard if simple else self._unusual.setdefault(place, set()).add)(bank)
        self._tables[bank].write(place, numbers if simple else None)
