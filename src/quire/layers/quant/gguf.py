"""Matrices that stay in a GGUF file's blocks: mapped, not loaded. For CPUs, in float32.

A device may multiply few rows by a copy of its own. For many the blocks are worth dequantizing (`ops/dequantized_linear.py`),
each time anew. The formats are known to `ops/blocks.py`.
"""

from collections.abc import Callable, Mapping, Sequence
from math import lcm

from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from quire.files.gguf import GGML_TYPES
from quire.layers.claims import Claims
from quire.layers.embedding import Embedding, EmbeddingMethod, Head, HeadMethod
from quire.layers.linear import Linear, LinearMethod
from quire.layers.moe import Experts, ExpertsMethod
from quire.layers.parameter import Method
from quire.ops.activation import gated
from quire.ops.blocks import GROUP, BlockMatrix, QuantizedMatrix, dequantize
from quire.ops.dequantized_linear import dequantized_linear, dequantizes_quickly
from quire.ops.quantized_layouts import Rounding

MANY_IDS = 64


class GGUFMethod(Method):
    """A matrix of parts above each other, each of its own type."""

    def __init__(self, parts: Sequence[BlockMatrix]) -> None:
        self.parts = tuple(parts)
        self.few: Callable[[Tensor], Tensor | None] | None = None  # a device's way to multiply few rows; None = they are many

    @property
    def dequantizes_quickly(self) -> bool:
        return dequantizes_quickly(self.parts)

    def shapes(self, inputs: int, outputs: int) -> Mapping[str, tuple[int, ...]]:  # noqa: ARG002
        return {}

    def claims(self, layer: Linear, path: str) -> Claims:  # noqa: ARG002
        return {}

    def apply(self, layer: Linear, x: Tensor) -> Tensor:
        """It can be overridden."""
        if has_torch_function_unary(x):
            return handle_torch_function(GGUFMethod.apply, (x,), self, layer, x)
        out = None if self.few is None else self.few(x)
        return dequantized_linear(x, self.parts, layer.bias) if out is None else out

    def apply_gated(self, layer: Linear, x: Tensor, activation: str, rounding: Rounding | None = None) -> Tensor:  # noqa: ARG002
        return gated(self.apply(layer, x), activation)


class GGUFRows:
    """An embedding whose rows are looked up where a file has them, in blocks or in floats, and not held."""

    def __init__(self, rows: QuantizedMatrix) -> None:
        self.rows = rows

    def shapes(self, count: int, size: int) -> Mapping[str, tuple[int, ...]]:  # noqa: ARG002
        return {}

    def look_up(self, layer: Embedding, ids: Tensor) -> Tensor:  # noqa: ARG002
        """-> [T, size] float32."""
        stored = self.rows
        rows = stored.rows.index_select(0, ids if stored.order is None else stored.order[ids])
        if len(ids) > MANY_IDS:
            stored.forget()
        return dequantize(rows.flatten(), stored.type, (len(ids), stored.columns)).float()


class GGUFHead(Method):
    """A head whose matrix stays in blocks. A device may multiply by a copy of its own."""

    def __init__(self, matrix: BlockMatrix) -> None:
        self.matrix = matrix
        self.product: Callable[[Tensor], Tensor] | None = None

    def shapes(self, vocab_size: int, hidden_size: int) -> Mapping[str, tuple[int, ...]]:  # noqa: ARG002
        return {}

    def claims(self, layer: Head, path: str) -> Claims:  # noqa: ARG002
        return {}

    def apply(self, layer: Head, hidden: Tensor) -> Tensor:
        return dequantized_linear(hidden, [self.matrix], layer.bias) if self.product is None else self.product(hidden)


class GGUFScheme:
    """A matrix stays in the file's blocks where a layer can use it so. `stored`: what there is, by the model's names."""

    def __init__(self, stored: Mapping[str, QuantizedMatrix]) -> None:
        self._stored = stored
        self.kept: set[str] = set()  # names of those that stay

    def linear(self, path: str, layer: Linear) -> LinearMethod | None:
        parts = {f"{name}.weight": part for name, part in layer.parts(path).items()}
        found = [
            self.find(name, (part.outputs, layer.all_inputs), rows, layer.kept_inputs)
            for name, part in parts.items()
            for _, rows in part.kept
        ]
        matrices = [matrix for matrix in found if matrix is not None]
        if layer.transposed or layer.as_floats or len(matrices) < len(found):
            return None
        self.kept |= parts.keys()
        return self.multiply_by(matrices)

    def multiply_by(self, parts: Sequence[QuantizedMatrix]) -> LinearMethod:
        """parts: above each other."""
        return GGUFMethod(parts)

    def embedding(self, path: str, layer: Embedding) -> EmbeddingMethod | None:
        found = self.find(f"{path}.weight", (layer.total, layer.size), layer.kept, range(layer.size))
        if found is None:
            return None
        self.kept.add(f"{path}.weight")
        return GGUFRows(found)

    def head(self, path: str, layer: Head) -> HeadMethod | None:
        if layer.tied is not None:
            return GGUFHead(layer.tied.method.rows) if isinstance(layer.tied.method, GGUFRows) else None
        found = self.find(f"{path}.weight", (layer.total, layer.hidden_size), layer.kept, range(layer.hidden_size))
        if found is None:
            return None
        self.kept.add(f"{path}.weight")
        return GGUFHead(found)

    def can_use(self, type_: int) -> bool:  # noqa: ARG002
        """Blocks of any type."""
        return True

    def experts(self, path: str, layer: Experts) -> ExpertsMethod | None:  # noqa: ARG002
        return None

    def find(self, name: str, shape: tuple[int, int], rows: range, columns: range) -> QuantizedMatrix | None:
        """These rows and columns, which must be whole blocks, and whole groups of what they are repacked to."""
        found = self._stored.get(name)
        if found is None or (len(found), found.columns) != shape or not self.can_use(found.type):
            return None
        grain = lcm(GROUP, GGML_TYPES[found.type][1])
        if columns.start % grain or columns.stop % grain:
            return None
        return found.cut(rows, columns)
