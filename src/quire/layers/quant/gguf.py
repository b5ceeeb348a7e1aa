"""GGUF's blocks: loaded as they lie in the file, repacked once, multiplied as whole numbers. For CPUs, in float32.

It knows ggml's type numbers and its row sizes; the formats themselves are in `ops/blocks.py`.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function_unary

from quire.files.gguf import GGML_TYPES
from quire.ops.blocks import GROUP, dequantize, take_apart
from quire.ops.nbits import Packed, Product, pack

if TYPE_CHECKING:
    from quire.layers.linear import Linear


def row_bytes(type_: int, columns: int) -> int:
    _, elements, nbytes = GGML_TYPES[type_]
    return columns // elements * nbytes


def suits(type_: int, columns: int) -> bool:
    """Are rows of so many columns whole blocks, and whole groups of what they are repacked to?"""
    return columns % GROUP == 0 and columns % GGML_TYPES[type_][1] == 0


class GGUFMethod:
    """A matrix of parts above each other, each of its own type: (outputs, type). Bytes end to end until `finish`."""

    dtype = torch.uint8

    def __init__(self, parts: Sequence[tuple[int, int]]) -> None:
        self.parts = tuple(parts)
        self.packed: Packed | None = None  # after `finish`, until a product is made of it
        self._product: Product | None = None

    def shapes(self, inputs: int, outputs: int) -> Mapping[str, tuple[int, ...]]:  # noqa: ARG002
        return {"weight": (sum(size * row_bytes(type_, inputs) for size, type_ in self.parts),)}

    def load(self, name: str, stored: nn.Parameter, start: int, size: int, inputs: int) -> Tensor:  # noqa: ARG002
        first = at = 0
        for count, type_ in self.parts:
            width = row_bytes(type_, inputs)
            if at == start:
                return stored.data[first : first + size * width].view(size, width)
            first, at = first + count * width, at + count
        raise AssertionError(f"no part of {self.parts} starts at {start}")

    def finish(self, layer: "Linear") -> None:
        starts = [sum(size for size, _ in self.parts[:i]) for i in range(len(self.parts))]
        stored = layer.weight
        self.packed = pack(
            [
                take_apart(self.load("weight", stored, start, size, layer.inputs), type_)
                for start, (size, type_) in zip(starts, self.parts, strict=True)
            ],
            layer.bias,
        )
        layer.weight = nn.Parameter(torch.empty(0), requires_grad=False)

    def apply(self, layer: "Linear", x: Tensor) -> Tensor:
        """It can be overridden."""
        if has_torch_function_unary(x):
            return handle_torch_function(GGUFMethod.apply, (x,), self, layer, x)
        if self._product is None:
            self._product = Product(self.take())
        return self._product(x)

    def take(self) -> Packed:
        """The repacked matrix, for whoever multiplies by it from now on."""
        assert self.packed is not None
        packed, self.packed = self.packed, None
        return packed


def look_up(stored: Tensor, type_: int, ids: Tensor, columns: int) -> Tensor:
    """stored [V, row bytes] -> the rows `ids` [T] unfolded, [T, columns] float32."""
    return dequantize(stored.index_select(0, ids).flatten(), type_, (len(ids), columns))
