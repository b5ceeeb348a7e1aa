"""Parameters that are only ever read, and layers that leave it to a method which ones they have."""

from collections.abc import Mapping

import torch
from torch import nn


def parameter(*shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
    """Uninitialized: the loader fills it. `dtype` fixes the type; without it the parameter takes the model's."""
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)


class MethodLayer(nn.Module):
    """How its numbers are stored and used is a *method*: an object that names the parameters and does the arithmetic.

    A method is exchanged by `use`, before anything is loaded or, by whoever has taken the numbers over, after it.
    """

    stored: tuple[str, ...] = ()  # the names of the method's parameters

    def declare(self, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype | None = None) -> None:
        """From now on these are the method's parameters; those it had are None."""
        for name in self.stored:
            self._parameters[name] = None
        self.stored = tuple(shapes)
        for name, shape in shapes.items():
            self.register_parameter(name, parameter(*shape, dtype=dtype))
