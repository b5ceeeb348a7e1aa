"""What ranks do together. Every rank calls the same in the same order, and all get the same bits."""

from typing import Protocol

from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary


class Group(Protocol):
    """The ranks that share a model's matrices."""

    def add(self, part: Tensor) -> Tensor:
        """The sum of all ranks' parts, of one shape, added in the order of ranks."""
        ...

    def join(self, part: Tensor, total: int) -> Tensor:
        """All ranks' parts beside each other, in the order of ranks: [..., total], of which each has what `evenly` gives it."""
        ...


def add_parts(part: Tensor, group: Group) -> Tensor:
    """It can be overridden."""
    if has_torch_function_unary(part):
        return handle_torch_function(add_parts, (part,), part, group)
    return group.add(part)
