"""What every source of weights offers, and how files are mapped."""

import mmap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

from torch import Tensor

from quire.ops.blocks import Stored
from quire.types.errors import ModelError


class Source(Protocol):
    """Tensors under the names Hugging Face's files give them."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Every tensor there is, known before any is read."""
        ...

    def read(self, names: frozenset[str]) -> Iterator[tuple[str, Tensor]]:
        """Those tensors, one at a time, in whatever order is fastest; on any device, of any dtype."""
        ...

    def find_rows(self, name: str) -> Stored | None:
        """That matrix where it lies, to be read row by row; None = it does not lie in rows."""
        ...


def map_file(path: Path) -> mmap.mmap:
    """Copy-on-write, because torch wants memory it could write to; nothing is ever written."""
    try:
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror or error}") from error
    data.madvise(mmap.MADV_WILLNEED)
    return data
