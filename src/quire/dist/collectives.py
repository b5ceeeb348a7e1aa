"""Collectives of ranks. Every rank calls the same ones in the same order, and all get the same bits."""

from typing import Protocol

from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from quire.dist.mesh import Position


class Group(Protocol):
    """The tensor-parallel ranks of a model."""

    def add(self, part: Tensor) -> Tensor:
        """All-reduce: return the sum of all ranks' parts, added in the order of ranks."""
        ...

    def join(self, part: Tensor, total: int) -> Tensor:
        """All-gather: concatenate all ranks' parts in the order of ranks to [..., total]. Parts have the sizes that `evenly`
        returns.
        """
        ...

    def close(self) -> None:
        """Unmap memory shared with the other ranks, whose processes must have ended."""
        ...


class RankGroup(Group, Protocol):
    """A group whose ranks run the same steps."""

    @property
    def records(self) -> bool:
        """Whether CUDA graphs may contain its collectives. Ranks then record the same graphs in the same order."""
        ...

    def largest(self, value: int) -> int:
        """Return the largest of all ranks' values, through the hosts."""
        ...

    def late(self) -> list[int]:
        """Return the ranks that the device of this one waits for, as far as that is known."""
        ...

    def abandon(self) -> bool:
        """End launched collectives, because ranks are lost. Return whether all launched work has ended."""
        ...


class Exchange(Protocol):
    """The ranks of several engines that share experts (`features/experts/exchange.py`)."""

    @property
    def position(self) -> Position:
        """Position of this rank among the ranks of all engines."""
        ...

    @property
    def leads(self) -> bool:
        """Whether it is the first rank of its engine, which brings the engine's tokens."""
        ...

    def run(self, layer: int, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """Return the output of all experts of a layer: x [T, H], weights and experts [T, top_k] -> [T, H]."""
        ...


def spread(part: Tensor, columns: range, total: int) -> Tensor:
    """Return [..., total]: `part` [..., len(columns)] in its columns, zeros in those of other ranks."""
    whole = part.new_zeros(*part.shape[:-1], total)
    whole[..., columns.start : columns.stop] = part
    return whole


def join_parts(part: Tensor, group: Group, columns: range, total: int) -> Tensor:
    """Return all ranks' columns [..., total]; this rank has `columns`. Adding zeros changes no bits.

    A torch function, so that it can be traced.
    """
    if has_torch_function_unary(part):
        return handle_torch_function(join_parts, (part,), part, group, columns, total)
    return group.add(spread(part, columns, total))


def add_parts(part: Tensor, group: Group) -> Tensor:
    """Return the sum of all ranks' parts. A torch function, so that it can be traced."""
    if has_torch_function_unary(part):
        return handle_torch_function(add_parts, (part,), part, group)
    return group.add(part)
