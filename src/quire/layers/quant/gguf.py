"""Matrices that stay in a GGUF file's blocks: mapped, not loaded. For CPUs, in float32.

Few rows are multiplied by a copy in whole numbers (`ops/product.py`). Many are worth unfolding the blocks for
(`ops/unfold.py`), each time anew. The formats are known to `ops/blocks.py`.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function_unary

from quire.files.gguf import GGML_TYPES
from quire.ops.blocks import GROUP, Stored, dequantize
from quire.ops.choice import by_layer, folds, unfold_from
from quire.ops.onnx import Runtime
from quire.ops.product import Product, Repacked, repack
from quire.ops.unfold import unfolded_linear, unfolds_quickly

if TYPE_CHECKING:
    from quire.layers.linear import Linear

MANY_IDS = 64


def suits(stored: Stored) -> bool:
    """Are its rows whole blocks, and whole groups of what they are repacked to?"""
    return stored.columns % GROUP == 0 and stored.columns % GGML_TYPES[stored.type][1] == 0


class GGUFMethod:
    """A matrix of parts above each other, each of its own type."""

    dtype = None

    def __init__(self, parts: Sequence[Stored]) -> None:
        self.parts = tuple(parts)
        self._taken = False  # whoever took the repacked matrix multiplies few rows; none is made here
        self._product: Product | None = None

    @property
    def unfolds_quickly(self) -> bool:
        return unfolds_quickly(self.parts)

    def shapes(self, inputs: int, outputs: int) -> Mapping[str, tuple[int, ...]]:  # noqa: ARG002
        return {}

    def load(self, name: str, stored: nn.Parameter, start: int, size: int, inputs: int) -> Tensor:  # noqa: ARG002
        raise AssertionError(f"nothing is copied into {name}")

    def finish(self, layer: "Linear") -> None:
        pass

    def apply(self, layer: "Linear", x: Tensor) -> Tensor:
        """It can be overridden."""
        if has_torch_function_unary(x):
            return handle_torch_function(GGUFMethod.apply, (x,), self, layer, x)
        if self._taken or len(x) >= unfold_from(self.unfolds_quickly, by_layer()):
            return unfolded_linear(x, self.parts, layer.bias)
        if self._product is None:
            self._product = Product(self._repack(layer, by_layer()), by_layer())
        return self._product(x)

    def take(self, layer: "Linear", runtime: Runtime) -> Repacked:
        """The matrix repacked, for whoever multiplies few rows by it from now on."""
        self._taken = True
        return self._repack(layer, runtime)

    def _repack(self, layer: "Linear", runtime: Runtime) -> Repacked:
        return repack(self.parts, layer.bias, runtime, folds(runtime))


def look_up(stored: Stored, ids: Tensor) -> Tensor:
    """The rows `ids` [T] unfolded: [T, columns] float32."""
    rows = stored.rows.index_select(0, ids if stored.order is None else stored.order[ids])
    if len(ids) > MANY_IDS:
        stored.forget()
    return dequantize(rows.flatten(), stored.type, (len(ids), stored.columns)).float()
