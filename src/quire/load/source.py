"""What every source of weights offers, and how files are mapped."""

import mmap
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor

from quire.files.reading import open_regular
from quire.layers.parameter import Ranges
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
