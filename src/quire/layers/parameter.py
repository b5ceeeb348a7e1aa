"""Parameters of layers: how they are stored, which checkpoint slices fill them, and how ranks divide them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from quire.ops.quantized_layouts import Rounding, Rows


class Role(Enum):
    """`prepare/shard.py` does what it says. A merged layer has its role in each of its parts."""

    REPLICATED = "every rank has all of it"
    COLUMN = "a rank has some outputs"
    ROW = "a rank has some inputs, and what it makes of them is added to what the others do"
    VOCABULARY = "a rank has some tokens"
    EXPERT = "a rank has some experts, or a part of each"


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
