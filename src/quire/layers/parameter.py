"""Parameters of layers: how they are stored, which checkpoint slices fill them, and how ranks divide them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from quire.ops.quantized_layouts import Activations, Rounding


class Role(Enum):
    """How ranks divide a layer (`prepare/shard.py`). A merged layer has its role in each of its parts."""

    REPLICATED = "every rank holds all of it"
    COLUMN = "a rank holds some outputs"
    ROW = "a rank holds some inputs; the outputs are all-reduced"
    VOCABULARY = "a rank holds some tokens"
    EXPERT = "a rank holds some experts, or a part of each"


Ranges = tuple[tuple[int, int], ...]  # start and end along each dimension; (): all of it


@dataclass(frozen=True)
class Destination:
    view: Tensor
    ranges: Ranges = ()


@dataclass(frozen=True)
class CheckpointTensor:
    """A checkpoint tensor, and which of its slices are copied where."""

    shape: tuple[int, ...]
    destinations: tuple[Destination, ...]
    otherwise: "CheckpointTensor | None" = None  # the same for files that store the tensor in another shape

    @property
    def transposed(self) -> "CheckpointTensor":
        """Return the same for a checkpoint with the last two dimensions swapped."""
        return CheckpointTensor(
            _swapped(self.shape), tuple(Destination(part.view.mT, _swapped(part.ranges)) for part in self.destinations)
        )

    @property
    def simple(self) -> "CheckpointTensor":
        """Return the same with () for ranges of the whole tensor."""
        full = tuple((0, size) for size in self.shape)
        return CheckpointTensor(
            self.shape, tuple(Destination(part.view) if part.ranges == full else part for part in self.destinations)
        )


WeightSlices = dict[str, CheckpointTensor | None]  # by the name in the checkpoint; None: optional and not read


def whole(view: Tensor) -> CheckpointTensor:
    return CheckpointTensor(tuple(view.shape), (Destination(view),))


def rows_of(shape: tuple[int, ...], destinations: Iterable[tuple[Tensor, range]]) -> CheckpointTensor:
    """Return the rows of a checkpoint tensor of this shape that fill each view."""
    rest = tuple((0, size) for size in shape[1:])
    return CheckpointTensor(
        shape, tuple(Destination(view, ((rows.start, rows.stop), *rest)) for view, rows in destinations)
    ).simple


def _swapped(items: tuple[Any, ...]) -> tuple[Any, ...]:
    return (*items[:-2], *items[:-3:-1])


def parameter(*shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
    """Return an uninitialized parameter, which the loader fills. dtype: fixed dtype; None: the model's."""
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)


class Method:
    """Defaults of methods."""

    dtypes: Mapping[str, torch.dtype] = MappingProxyType({})  # of parameters whose dtype is not the model's

    def finish(self, layer: Any) -> None:
        """Repack the parameters after loading."""

    def rounding(self, x: Activations) -> Rounding | None:  # noqa: ARG002
        """Return None: activations are not quantized (`layers.linear.LinearMethod`)."""
        return None


class MethodLayer(nn.Module):
    """A layer whose weights belong to a *method*: an object that names the parameters and does the arithmetic.

    `use` exchanges the method before loading; `hold` does it afterwards.
    """

    stored: tuple[str, ...] = ()  # names of the method's parameters
    fixed: frozenset[str] = frozenset()  # names of parameters whose dtype is not the model's
    method: Any

    def declare(self, shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, torch.dtype] | None = None) -> None:
        """Replace the method's parameters by these; dtypes: of those whose dtype is not the model's."""
        for name in self.stored:
            self._parameters[name] = None
        dtypes = dtypes or {}
        self.stored, self.fixed = tuple(shapes), frozenset(dtypes)
        for name, shape in shapes.items():
            self.register_parameter(name, parameter(*shape, dtype=dtypes.get(name)))

    def hold(self, method: Any, **numbers: torch.Tensor) -> None:
        """Replace the method and its parameters after loading."""
        self.declare({})
        self.method, self.stored = method, tuple(numbers)
        for name, values in numbers.items():
            self.register_parameter(name, nn.Parameter(values, requires_grad=False))
