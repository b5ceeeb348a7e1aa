"""Matrices of a GGUF file that become forms (`ops/block_forms.py`) when all is loaded, for devices that multiply by those."""

from collections.abc import Mapping, Sequence

import torch

from quire.files.gguf import GGML_TYPES
from quire.layers.claims import Claims
from quire.layers.embedding import Embedding, Head
from quire.layers.linear import Linear
from quire.layers.moe import Experts
from quire.layers.parameter import Method
from quire.layers.quant.stored import HeldExperts, HeldHead, HeldLinear, Target
from quire.ops.block_forms import form_of, has_form, stack_forms
from quire.ops.blocks import QuantizedMatrix
from quire.ops.forms import PackedInts


class _Blocks(Method):
    """Nothing of theirs is a parameter: the file is mapped."""

    def __init__(self, target: Target, device: torch.device) -> None:
        self.target, self._device = target, device

    def shapes(self, *sizes: int) -> Mapping[str, tuple[int, ...]]:  # noqa: ARG002
        return {}

    def claims(self, layer: object, path: str) -> Claims:  # noqa: ARG002
        return {}

    def form(self, stored: QuantizedMatrix) -> PackedInts:
        found = form_of(stored, self._device)
        stored.forget()
        return found


class BlocksLinear(_Blocks, HeldLinear):
    def __init__(self, parts: Sequence[QuantizedMatrix], target: Target, device: torch.device) -> None:
        super().__init__(target, device)
        self._parts = parts

    def finish(self, layer: Linear) -> None:
        self.settle(layer, [self.form(part) for part in self._parts])


class BlocksHead(_Blocks, HeldHead):
    def __init__(self, matrix: QuantizedMatrix, target: Target, device: torch.device) -> None:
        super().__init__(target, device)
        self._matrix = matrix

    def finish(self, layer: Head) -> None:
        self.settle(layer, [self.form(self._matrix)])


class BlocksExperts(_Blocks, HeldExperts):
    """stacks: of each expert its gate, its up and its down."""

    def __init__(self, stacks: Sequence[Sequence[QuantizedMatrix]], target: Target, device: torch.device) -> None:
        super().__init__(target, device)
        self._stacks = stacks

    def finish(self, layer: Experts) -> None:
        self.settle(layer, *(stack_forms([self.form(matrix) for matrix in stack]) for stack in self._stacks))


class GGUFFormsScheme:
    """`stored`: what there is in blocks, by the model's names."""

    def __init__(self, stored: Mapping[str, QuantizedMatrix], target: Target, device: torch.device) -> None:
        self._stored, self._target, self._device = stored, target, device
        self.kept: set[str] = set()  # names of those that get a form

    def linear(self, path: str, layer: Linear) -> BlocksLinear | None:
        parts = layer.parts(path)
        found = [
            self._find(f"{name}.weight", (part.outputs, layer.all_inputs), rows, layer.kept_inputs)
            for name, part in parts.items()
            for _, rows in part.kept
        ]
        matrices = [matrix for matrix in found if matrix is not None]
        if layer.transposed or layer.as_floats or len(matrices) < len(found):
            return None
        self.kept.update(f"{name}.weight" for name in parts)
        return BlocksLinear(matrices, self._target, self._device)

    def embedding(self, path: str, layer: Embedding) -> None:  # noqa: ARG002
        return None

    def head(self, path: str, layer: Head) -> BlocksHead | None:
        if layer.tied is not None:
            return None
        found = self._find(f"{path}.weight", (layer.total, layer.hidden_size), layer.kept, range(layer.hidden_size))
        if found is None:
            return None
        self.kept.add(f"{path}.weight")
        return BlocksHead(found, self._target, self._device)

    def experts(self, path: str, layer: Experts) -> BlocksExperts | None:
        inner, across = layer.kept_inner, range(layer.hidden_size)
        wide = layer.total_inner, layer.hidden_size
        stacks = [
            [self._find(f"{path}.{expert}.{name}.weight", shape, rows, columns) for expert in layer.kept]
            for name, shape, rows, columns in (
                ("gate_proj", wide, inner, across),
                ("up_proj", wide, inner, across),
                ("down_proj", wide[::-1], across, inner),
            )
        ]
        kept = [[matrix for matrix in stack if matrix is not None] for stack in stacks]
        if "experts" not in self._target.keeps or any(len(stack) < len(layer.kept) for stack in kept):
            return None
        if any(len({matrix.type for matrix in stack}) > 1 for stack in kept):
            return None
        names = ("gate_proj", "up_proj", "down_proj")
        self.kept.update(f"{path}.{expert}.{name}.weight" for expert in range(layer.total) for name in names)
        return BlocksExperts(kept, self._target, self._device)

    def _find(self, name: str, shape: tuple[int, int], rows: range, columns: range) -> QuantizedMatrix | None:
        """These rows and columns, which must be whole blocks."""
        found = self._stored.get(name)
        if found is None or (len(found), found.columns) != shape or not has_form(found.type):
            return None
        grain = GGML_TYPES[found.type][1]
        if columns.start % grain or columns.stop % grain:
            return None
        return found.cut(rows, columns)
