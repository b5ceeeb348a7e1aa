"""What every source of weights offers."""

from collections.abc import Iterator, Mapping
from typing import Protocol

from torch import Tensor


class Source(Protocol):
    """Tensors under the names Hugging Face's files give them."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Every tensor there is, known before any is read."""
        ...

    def read(self, names: frozenset[str]) -> Iterator[tuple[str, Tensor]]:
        """Those tensors, one at a time, in whatever order is fastest; on any device, of any dtype."""
        ...
