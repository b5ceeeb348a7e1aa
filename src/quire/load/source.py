"""The interface of weight sources, mapped files, and random weights."""

import hashlib
import mmap
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from quire.files.reading import open_regular
from quire.layers.parameter import CheckpointTensor, Ranges
from quire.ops.blocks import QuantizedMatrix
from quire.types.errors import ModelError


@dataclass(frozen=True)
class TensorSlice:
    name: str
    ranges: Ranges = ()


class Source(Protocol):
    """Tensors under Hugging Face's names."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of all tensors, before any is read."""
        ...

    def read(self, slices: Collection[TensorSlice]) -> Iterator[tuple[TensorSlice, Tensor]]:
        """Yield the slices one at a time, in the fastest order, on any device and of any dtype. Other parts of a tensor are not
        read if the format allows it.
        """
        ...

    def find_rows(self, name: str) -> QuantizedMatrix | None:
        """Return a matrix whose rows can be read one by one; None: it is not stored in rows."""
        ...


def cut(tensor: Tensor, ranges: Ranges) -> Tensor:
    return tensor[tuple(slice(*edges) for edges in ranges)] if ranges else tensor


def read_whole(source: Source) -> dict[str, Tensor]:
    """Return all tensors."""
    return {part.name: tensor for part, tensor in source.read([TensorSlice(name) for name in source.shapes])}


def map_file(path: Path, *, prefetch: bool = True) -> mmap.mmap:
    """Map a file copy-on-write, since torch requires writable memory; nothing is written. prefetch: all of it will be read."""
    try:
        with open_regular(path) as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror or error}") from error
    if prefetch:
        data.madvise(mmap.MADV_WILLNEED)
    return data


WEIGHT_STD = 0.02
SCALES = re.compile(r"(scales?|scale_inv|scale_2|absmax|SCB)$")  # must not be negative


class DummySource:
    """Random weights, made on the device. A value depends on the seed and the tensor's name only, so slices match the whole."""

    def __init__(self, table: Mapping[str, CheckpointTensor | None], seed: int) -> None:
        self.entries = {name: entry for name, entry in table.items() if entry is not None}
        self.seed = seed

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: entry.shape for name, entry in self.entries.items()}

    def read(self, slices: Collection[TensorSlice]) -> Iterator[tuple[TensorSlice, Tensor]]:
        generators: dict[torch.device, torch.Generator] = {}
        for part in slices:
            entry = self.entries[part.name]
            view = entry.destinations[0].view
            generator = generators.setdefault(view.device, torch.Generator(view.device))
            generator.manual_seed(int.from_bytes(hashlib.sha256(f"{self.seed}/{part.name}".encode()).digest()[:7], "little"))
            values = _values(entry.shape, view, generator)
            if part.name.endswith("_scales") and values.dtype == torch.uint8:  # exponents of values as small as weights
                values = values % 8 + 116
            if SCALES.search(part.name) and values.is_floating_point():
                values = values.float().abs().to(values.dtype)
            if part.name.endswith("quant_map"):  # the values of 8-bit codes
                values = torch.linspace(-1, 1, len(values), dtype=values.dtype, device=values.device)
            yield part, cut(values, part.ranges)

    def find_rows(self, name: str) -> None:  # noqa: ARG002
        return None


def _values(shape: tuple[int, ...], view: Tensor, generator: torch.Generator) -> Tensor:
    """Return random values of the view's dtype; scales among floats are drawn like weights."""
    kind = view.dtype
    if not kind.is_floating_point:
        whole = torch.empty(shape, dtype=kind, device=view.device)
        bounds = torch.iinfo(kind)
        return whole.random_(bounds.min, bounds.max, generator=generator)
    values = torch.empty(shape, dtype=kind if kind.itemsize > 1 else torch.float32, device=view.device)
    values.normal_(0.0, WEIGHT_STD, generator=generator)
    return values.masked_fill_(values == 0, WEIGHT_STD).to(kind)  # a scale of 0 would be refused
