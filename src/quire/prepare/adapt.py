"""Room for adapters in the layers of a model: low-rank additions that each row of a batch may ask for (`AdapterRows`).

What an adapter's file looks like, and who asks for which, is not known here.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quire.layers.adapter import BankPart, LinearBank
from quire.layers.linear import Linear
from quire.layers.role import Role
from quire.types.errors import ModelError


@dataclass(frozen=True)
class LowRank:
    """An addition to one matrix of the checkpoint: up @ down."""

    down: Tensor  # [rank, inputs]
    up: Tensor  # [outputs, rank], multiplied by the adapter's scale


@dataclass(frozen=True)
class Place:
    """Where the adapters' additions to one matrix of the checkpoint are, and which of its inputs and outputs are ours."""

    part: BankPart
    inputs: range
    outputs: tuple[range, ...]
    shape: tuple[int, int]  # of the whole matrix

    def put(self, number: int, addition: LowRank) -> None:
        rank = len(addition.down)
        rows = torch.cat([addition.up[some.start : some.stop] for some in self.outputs])
        self.part.down[number - 1, :rank] = addition.down[:, self.inputs.start : self.inputs.stop]
        self.part.up[number - 1, :, :rank] = rows


class Adapters:
    """Those that are there, by number from 1 on."""

    def __init__(self, places: Mapping[str, Place], count: int, rank: int) -> None:
        self._places, self._count, self._rank = places, count, rank

    def put(self, number: int, additions: Mapping[str, LowRank]) -> None:
        """In the place of the adapter that has the number. additions: by the matrix's path in the checkpoint, after renames."""
        self._check(number, additions)
        self.remove(number)
        for name, addition in additions.items():
            self._places[name].put(number, addition)

    def remove(self, number: int) -> None:
        for place in self._places.values():
            place.part.down[number - 1] = 0.0
            place.part.up[number - 1] = 0.0

    def _check(self, number: int, additions: Mapping[str, LowRank]) -> None:
        if not 1 <= number <= self._count:
            raise ModelError(f"there is room for {self._count} adapters, so none can have the number {number}")
        for name, addition in additions.items():
            if name not in self._places:
                raise ModelError(f"{name!r} is not a matrix that an adapter can add to")
            (outputs, rank), (inner, inputs) = addition.up.shape, addition.down.shape
            if rank != inner or (outputs, inputs) != self._places[name].shape:
                raise ModelError(
                    f"the addition to {name!r} is {outputs} x {rank} times {inner} x {inputs}, the matrix "
                    f"{' x '.join(map(str, self._places[name].shape))}"
                )
            if rank > self._rank:
                raise ModelError(f"the addition to {name!r} has rank {rank}; there is room for {self._rank}")


def adapt(model: nn.Module, count: int, rank: int, *, device: torch.device, dtype: torch.dtype) -> Adapters:
    """Room for `count` adapters of at most that rank in every layer that is divided by columns or rows. After `shard`."""
    places = {}
    for path, layer in model.named_modules():
        if isinstance(layer, Linear) and layer.role in (Role.COLUMN, Role.ROW):
            parts = []
            for name, matrix in layer.parts(path).items():
                outputs = tuple(rows for _, rows in matrix.kept)
                down = torch.zeros(count, rank, layer.inputs, device=device, dtype=dtype)
                up = torch.zeros(count, sum(map(len, outputs)), rank, device=device, dtype=dtype)
                parts.append(BankPart(matrix.kept[0][0], down, up))
                places[name] = Place(parts[-1], layer.kept_inputs, outputs, (matrix.outputs, layer.all_inputs))
            layer.bank = LinearBank(parts)
    return Adapters(places, count, rank)
