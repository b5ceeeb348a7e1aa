"""Which slices of a checkpoint's tensors go where in a model."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

Ranges = tuple[tuple[int, int], ...]  # start and end along each dimension; () = all of it


@dataclass(frozen=True)
class Take:
    view: Tensor
    ranges: Ranges = ()


@dataclass(frozen=True)
class Claim:
    """A tensor of `shape` in the checkpoint, and who takes what of it."""

    shape: tuple[int, ...]
    takes: tuple[Take, ...]
    otherwise: "Claim | None" = None  # if the tensor has another shape, which some files save it in

    @property
    def transposed(self) -> "Claim":
        """Of a checkpoint that has the last two dimensions the other way round."""
        return Claim(_swapped(self.shape), tuple(Take(take.view.mT, _swapped(take.ranges)) for take in self.takes))

    @property
    def simple(self) -> "Claim":
        """The same, without ranges of what takes all of it."""
        full = tuple((0, size) for size in self.shape)
        return Claim(self.shape, tuple(Take(take.view) if take.ranges == full else take for take in self.takes))


Claims = dict[str, Claim | None]  # by the name in the checkpoint; None = may be there and is not read


def whole(view: Tensor) -> Claim:
    return Claim(tuple(view.shape), (Take(view),))


def rows_of(shape: tuple[int, ...], takes: Iterable[tuple[Tensor, range]]) -> Claim:
    """Of a tensor of that shape, who takes which of its rows."""
    rest = tuple((0, size) for size in shape[1:])
    return Claim(shape, tuple(Take(view, ((rows.start, rows.stop), *rest)) for view, rows in takes)).simple


def _swapped(items: tuple[Any, ...]) -> tuple[Any, ...]:
    return (*items[:-2], *items[:-3:-1])
