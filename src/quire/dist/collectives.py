"""What ranks do together. Every rank calls the same in the same order, and all get the same bits."""

from typing import Protocol

from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from quire.dist.mesh import Position


class Group(Protocol):
    """The ranks that share a model's matrices."""

    def add(self, part: Tensor) -> Tensor:
        """The sum of all ranks' parts, of one shape, added in the order of ranks."""
        ...

    def join(self, part: Tensor, total: int) -> Tensor:
        """All ranks' parts beside each other, in the order of ranks: [..., total], of which each has what `evenly` gives it."""
        ...

    def close(self) -> None:
        """Give back memory shared with the other ranks, which must have ended."""
        ...


class Exchange(Protocol):
    """The ranks of several engines that share experts (`experts.py`)."""

    @property
    def position(self) -> Position:
        """Of this rank, among those of all engines."""
        ...

    @property
    def leads(self) -> bool:
        """Is it the first rank of its engine, which brings the engine's rows?"""
        ...

    def run(self, layer: int, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """What all experts of a layer make of these rows: x [T, H], weights and experts [T, top_k] -> [T, H]."""
        ...


def spread(part: Tensor, kept: range, total: int) -> Tensor:
    """Return [..., total]: `part` [..., len(kept)] in its columns, zeros in those of other ranks."""
    whole = part.new_zeros(*part.shape[:-1], total)
    whole[..., kept.start : kept.stop] = part
    return whole


def join_parts(part: Tensor, group: Group, kept: range, total: int) -> Tensor:
    """Return all ranks' columns [..., total], of which this rank has those `kept`: adding zeros changes no bits. It can be
    overridden."""
    if has_torch_function_unary(part):
        return handle_torch_function(join_parts, (part,), part, group, kept, total)
    return group.add(spread(part, kept, total))


def add_parts(part: Tensor, group: Group) -> Tensor:
    """It can be overridden."""
    if has_torch_function_unary(part):
        return handle_torch_function(add_parts, (part,), part, group)
    return group.add(part)
