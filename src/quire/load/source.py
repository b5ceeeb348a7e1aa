"""What every source of weights offers, and how files are mapped."""

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
    """Tensors under the names Hugging Face's files give them."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Every tensor there is, known before any is read."""
        ...

    def read(self, slices: Collection[TensorSlice]) -> Iterator[tuple[TensorSlice, Tensor]]:
        """Those, one at a time, in whatever order is fastest; on any device, of any dtype. What lies beside them in a file is
        not read, as far as its format allows."""
        ...

    def find_rows(self, name: str) -> QuantizedMatrix | None:
        """That matrix where it lies, to be read row by row; None = it does not lie in rows."""
        ...


def cut(tensor: Tensor, ranges: Ranges) -> Tensor:
    return tensor[tuple(slice(*edges) for edges in ranges)] if ranges else tensor


def read_whole(source: Source) -> dict[str, Tensor]:
    """Every tensor there is."""
    return {part.name: tensor for part, tensor in source.read([TensorSlice(name) for name in source.shapes])}


def map_file(path: Path, *, ahead: bool = True) -> mmap.mmap:
    """Copy-on-write, because torch wants memory it could write to; nothing is ever written. `ahead`: all of it will be read."""
    try:
        with open_regular(path) as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror or error}") from error
    if ahead:
        data.madvise(mmap.MADV_WILLNEED)
    return data


SPREAD = 0.02
SCALES = re.compile(r"(scales?|scale_inv|scale_2|absmax|SCB)$")  # which none may be below 0


class DummySource:
    """Makes what is claimed, on the device where it is wanted; a slice has the values it has in the whole."""

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
            if part.name.endswith("_scales") and values.dtype == torch.uint8:  # exponents: of numbers as small as weights are
                values = values % 8 + 116
            if SCALES.search(part.name) and values.is_floating_point():
                values = values.float().abs().to(values.dtype)
            if part.name.endswith("quant_map"):  # what 8 bits stand for
                values = torch.linspace(-1, 1, len(values), dtype=values.dtype, device=values.device)
            yield part, cut(values, part.ranges)

    def find_rows(self, name: str) -> None:  # noqa: ARG002
        return None


def _values(shape: tuple[int, ...], view: Tensor, generator: torch.Generator) -> Tensor:
    """Of few bits: any; scales among floats are as good as weights are."""
    kind = view.dtype
    if not kind.is_floating_point:
        whole = torch.empty(shape, dtype=kind, device=view.device)
        bounds = torch.iinfo(kind)
        return whole.random_(bounds.min, bounds.max, generator=generator)
    values = torch.empty(shape, dtype=kind if kind.itemsize > 1 else torch.float32, device=view.device)
    values.normal_(0.0, SPREAD, generator=generator)
    return values.masked_fill_(values == 0, SPREAD).to(kind)  # a scale of 0 would be refused
