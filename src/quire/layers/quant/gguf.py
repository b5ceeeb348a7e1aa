"""GGUF matrices: multiplied in their blocks on a CPU, converted to a layout of `ops` for other devices."""

from collections.abc import Callable, Mapping, Sequence
from math import lcm

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from quire.files.gguf import GGML_TYPES
from quire.layers.embedding import Embedding, EmbeddingMethod, Head, HeadMethod
from quire.layers.linear import Linear, LinearMethod
from quire.layers.moe import Experts, ExpertsMethod
from quire.layers.parameter import Method, WeightSlices
from quire.layers.quant.stored import HeldExperts, HeldHead, HeldLinear, Target
from quire.ops.activation import gated
from quire.ops.blocks import GROUP, BlockMatrix, QuantizedMatrix, dequantize, has_layout, stack_layouts, to_layout
from quire.ops.dequantized_linear import dequantized_linear, dequantizes_quickly
from quire.ops.quantized_layouts import Float4, PackedInts, Rounding
from quire.types.errors import ModelError

MANY_IDS = 64  # ids of a lookup; after more of them, the file's mapped pages are released


class GGUFMethod(Method):
    """Linear layer with GGUF blocks. `parts`: matrices stacked along the outputs, each of its own GGML type."""

    def __init__(self, parts: Sequence[BlockMatrix]) -> None:
        self.parts = tuple(parts)
        self.few: Callable[[Tensor], Tensor | None] | None = None  # a device's GEMM for few tokens; None as result: too many

    @property
    def dequantizes_quickly(self) -> bool:
        return dequantizes_quickly(self.parts)

    def shapes(self, inputs: int, outputs: int) -> Mapping[str, tuple[int, ...]]:  # noqa: ARG002
        return {}

    def weight_slices(self, layer: Linear, path: str) -> WeightSlices:  # noqa: ARG002
        return {}

    def apply(self, layer: Linear, x: Tensor) -> Tensor:
        """Return the outputs of x. Overridable by __torch_function__."""
        if has_torch_function_unary(x):
            return handle_torch_function(GGUFMethod.apply, (x,), self, layer, x)
        out = None if self.few is None else self.few(x)
        return dequantized_linear(x, self.parts, layer.bias) if out is None else out

    def apply_gated(self, layer: Linear, x: Tensor, activation: str, rounding: Rounding | None = None) -> Tensor:  # noqa: ARG002
        return gated(self.apply(layer, x), activation)


class GGUFRows:
    """Embedding with rows in the mapped GGUF file, quantized or in floats; they are read at each lookup."""

    def __init__(self, rows: QuantizedMatrix) -> None:
        self.rows = rows

    def shapes(self, count: int, size: int) -> Mapping[str, tuple[int, ...]]:  # noqa: ARG002
        return {}

    def look_up(self, layer: Embedding, ids: Tensor) -> Tensor:  # noqa: ARG002
        """Return the embeddings [T, size] float32 of ids [T]."""
        stored = self.rows
        rows = stored.rows.index_select(0, ids if stored.order is None else stored.order[ids])
        if len(ids) > MANY_IDS:
            stored.forget()
        return dequantize(rows.flatten(), stored.type, (len(ids), stored.columns)).float()


class GGUFHead(Method):
    """Head with a matrix in GGUF blocks; a device may set `product` to multiply by its own copy."""

    def __init__(self, matrix: BlockMatrix) -> None:
        self.matrix = matrix
        self.product: Callable[[Tensor], Tensor] | None = None

    def shapes(self, vocab_size: int, hidden_size: int) -> Mapping[str, tuple[int, ...]]:  # noqa: ARG002
        return {}

    def weight_slices(self, layer: Head, path: str) -> WeightSlices:  # noqa: ARG002
        return {}

    def apply(self, layer: Head, hidden: Tensor) -> Tensor:
        return dequantized_linear(hidden, [self.matrix], layer.bias) if self.product is None else self.product(hidden)


class GGUFScheme:
    """Keep matrices in GGUF blocks where the layer supports it.

    stored: the file's matrices by the model's names
    in_blocks: names of the matrices that stay in blocks
    """

    def __init__(self, stored: Mapping[str, QuantizedMatrix]) -> None:
        self._stored = stored
        self.in_blocks: set[str] = set()

    def linear(self, path: str, layer: Linear) -> LinearMethod | None:
        parts = {f"{name}.weight": part for name, part in layer.parts(path).items()}
        found = [
            self.find(name, (part.outputs, layer.all_inputs), rows, layer.local_inputs)
            for name, part in parts.items()
            for _, rows in part.local
        ]
        matrices = [matrix for matrix in found if matrix is not None]
        if layer.transposed or layer.as_floats or len(matrices) < len(found):
            return None
        self.in_blocks |= parts.keys()
        return self.multiply_by(matrices)

    def multiply_by(self, parts: Sequence[QuantizedMatrix]) -> LinearMethod:
        """Return the method for parts stacked along the outputs."""
        return GGUFMethod(parts)

    def embedding(self, path: str, layer: Embedding) -> EmbeddingMethod | None:
        found = self.find(f"{path}.weight", (layer.total, layer.size), layer.local, range(layer.size))
        if found is None:
            return None
        self.in_blocks.add(f"{path}.weight")
        return GGUFRows(found)

    def head(self, path: str, layer: Head) -> HeadMethod | None:
        if layer.tied is not None:
            return GGUFHead(layer.tied.method.rows) if isinstance(layer.tied.method, GGUFRows) else None
        found = self.find(f"{path}.weight", (layer.total, layer.hidden_size), layer.local, range(layer.hidden_size))
        if found is None:
            return None
        self.in_blocks.add(f"{path}.weight")
        return GGUFHead(found)

    def can_use(self, type_: int) -> bool:  # noqa: ARG002
        """Return True: blocks of any type."""
        return True

    def experts(self, path: str, layer: Experts) -> ExpertsMethod | None:  # noqa: ARG002
        return None

    def find(self, name: str, shape: tuple[int, int], rows: range, columns: range) -> QuantizedMatrix | None:
        """Return these rows and columns of a matrix; None unless the columns are whole blocks and whole groups of the repacked
        layout."""
        found = self._stored.get(name)
        if found is None or (len(found), found.columns) != shape or not self.can_use(found.type):
            return None
        grain = lcm(GROUP, GGML_TYPES[found.type][1])
        if columns.start % grain or columns.stop % grain:
            return None
        return found.cut(rows, columns)


class _Blocks(Method):
    """Methods without parameters of their own: the file is mapped."""

    def __init__(self, target: Target, device: torch.device) -> None:
        self.target, self._device = target, device

    def shapes(self, *sizes: int) -> Mapping[str, tuple[int, ...]]:  # noqa: ARG002
        return {}

    def weight_slices(self, layer: object, path: str) -> WeightSlices:  # noqa: ARG002
        return {}

    def form(self, stored: QuantizedMatrix) -> PackedInts | Float4:
        found = to_layout(stored, self._device)
        stored.forget()
        scale = found.scale
        if bool((scale == 255).any() if scale.dtype == torch.uint8 else ~scale.isfinite().all()):
            raise ModelError(f"{stored.name} has a scale that is NaN or infinite; the file is damaged")
        return found


class BlocksLinear(_Blocks, HeldLinear):
    def __init__(self, parts: Sequence[QuantizedMatrix], target: Target, device: torch.device) -> None:
        super().__init__(target, device)
        self._parts = parts

    def finish(self, layer: Linear) -> None:
        self.install(layer, [self.form(part) for part in self._parts])


class BlocksHead(_Blocks, HeldHead):
    def __init__(self, matrix: QuantizedMatrix, target: Target, device: torch.device) -> None:
        super().__init__(target, device)
        self._matrix = matrix

    def finish(self, layer: Head) -> None:
        self.install(layer, [self.form(self._matrix)])


class BlocksExperts(_Blocks, HeldExperts):
    """stacks: the gate, up and down matrices of each expert."""

    def __init__(self, stacks: Sequence[Sequence[QuantizedMatrix]], target: Target, device: torch.device) -> None:
        super().__init__(target, device)
        self._stacks = stacks

    def finish(self, layer: Experts) -> None:
        self.install(layer, *(stack_layouts([self.form(matrix) for matrix in stack]) for stack in self._stacks))


class GGUFLayoutScheme(GGUFScheme):
    """Convert GGUF blocks to a quantized layout at load, where there is one. Embeddings and tied heads are dequantized."""

    def __init__(self, stored: Mapping[str, QuantizedMatrix], target: Target, device: torch.device) -> None:
        super().__init__(stored)
        self._target, self._device = target, device

    def can_use(self, type_: int) -> bool:
        return has_layout(type_)

    def multiply_by(self, parts: Sequence[QuantizedMatrix]) -> BlocksLinear:
        return BlocksLinear(parts, self._target, self._device)

    def embedding(self, path: str, layer: Embedding) -> None:  # noqa: ARG002
        return None

    def head(self, path: str, layer: Head) -> BlocksHead | None:
        if layer.tied is not None:
            return None
        found = self.find(f"{path}.weight", (layer.total, layer.hidden_size), layer.local, range(layer.hidden_size))
        if found is None:
            return None
        self.in_blocks.add(f"{path}.weight")
        return BlocksHead(found, self._target, self._device)

    def experts(self, path: str, layer: Experts) -> BlocksExperts | None:
        inner, across = layer.local_inner, range(layer.hidden_size)
        wide = layer.total_inner, layer.hidden_size
        parts = {
            "gate_proj": (wide, inner, across),
            "up_proj": (wide, inner, across),
            "down_proj": (wide[::-1], across, inner),
        }
        found = [[self.find(f"{path}.{expert}.{name}.weight", *part) for expert in layer.local] for name, part in parts.items()]
        stacks = [[matrix for matrix in stack if matrix is not None] for stack in found]
        whole = all(len(stack) == len(layer.local) and len({matrix.type for matrix in stack}) == 1 for stack in stacks)
        if not whole or "experts" not in self._target.keeps:
            return None
        self.in_blocks.update(f"{path}.{expert}.{name}.weight" for expert in range(layer.total) for name in parts)
        return BlocksExperts(stacks, self._target, self._device)
