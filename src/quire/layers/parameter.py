"""Parameters that are only ever read, and layers that leave it to a method which ones they have."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from quire.ops.quantized_layouts import Rounding, Rows


def parameter(*shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
    """Uninitialized: the loader fills it. `dtype` fixes the type; without it the parameter takes the model's."""
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)


class Method:
    """What most methods leave as it is."""

    dtypes: Mapping[str, torch.dtype] = MappingProxyType({})  # of parameters whose type is not the model's

    def finish(self, layer: Any) -> None:
        """When all is loaded."""

    def rounding(self, x: Rows) -> Rounding | None:  # noqa: ARG002
        """As `layers.linear.LinearMethod` has it."""
        return None


class MethodLayer(nn.Module):
    """How its numbers are stored and used is a *method*: an object that names the parameters and does the arithmetic.

    A method is exchanged by `use`, before anything is loaded or, by whoever has taken the numbers over, after it.
    """

    stored: tuple[str, ...] = ()  # the names of the method's parameters
    fixed: frozenset[str] = frozenset()  # those whose type is not the model's
    method: Any

    def declare(self, shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, torch.dtype] | None = None) -> None:
        """From now on these are the method's parameters; those it had are None. dtypes: of those that have one of their own."""
        for name in self.stored:
            self._parameters[name] = None
        dtypes = dtypes or {}
        self.stored, self.fixed = tuple(shapes), frozenset(dtypes)
        for name, shape in shapes.items():
            self.register_parameter(name, parameter(*shape, dtype=dtypes.get(name)))

    def hold(self, method: Any, **numbers: torch.Tensor) -> None:
        """When all is loaded: another method, and its parameters."""
        self.declare({})
        self.method, self.stored = method, tuple(numbers)
        for name, values in numbers.items():
            self.register_parameter(name, nn.Parameter(values, requires_grad=False))
