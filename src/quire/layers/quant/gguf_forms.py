"""Matrices of a GGUF file that become forms (`ops/blocks.py`) when all is loaded, for devices that multiply by those."""

from collections.abc import Mapping, Sequence

import torch

from quire.layers.claims import Claims
from quire.layers.embedding import Embedding, Head
from quire.layers.linear import Linear
from quire.layers.moe import Experts
from quire.layers.parameter import Method
from quire.layers.quant.gguf import GGUFScheme
from quire.layers.quant.stored import HeldExperts, HeldHead, HeldLinear, Target
from quire.ops.blocks import QuantizedMatrix, form_of, has_form, stack_forms
from quire.ops.quantized_layouts import Float4, PackedInts
from quire.types.errors import ModelError


class _Blocks(Method):
    """Nothing of theirs is a parameter: the file is mapped."""

    def __init__(self, target: Target, device: torch.device) -> None:
        self.target, self._device = target, device

    def shapes(self, *sizes: int) -> Mapping[str, tuple[int, ...]]:  # noqa: ARG002
        return {}

    def claims(self, layer: object, path: str) -> Claims:  # noqa: ARG002
        return {}

    def form(self, stored: QuantizedMatrix) -> PackedInts | Float4:
        found = form_of(stored, self._device)
        stored.forget()
        scale = found.scale
        if bool((scale == 255).any() if scale.dtype == torch.uint8 else ~scale.isfinite().all()):
            raise ModelError(f"{stored.name} has a scale that is not a number; the file is damaged")
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


class GGUFFormsScheme(GGUFScheme):
    """As far as there is a form; an embedding becomes floats, and a head that is tied to it."""

    def __init__(self, stored: Mapping[str, QuantizedMatrix], target: Target, device: torch.device) -> None:
        super().__init__(stored)
        self._target, self._device = target, device

    def can_use(self, type_: int) -> bool:
        return has_form(type_)

    def multiply_by(self, parts: Sequence[QuantizedMatrix]) -> BlocksLinear:
        return BlocksLinear(parts, self._target, self._device)

    def embedding(self, path: str, layer: Embedding) -> None:  # noqa: ARG002
        return None

    def head(self, path: str, layer: Head) -> BlocksHead | None:
        if layer.tied is not None:
            return None
        found = self.find(f"{path}.weight", (layer.total, layer.hidden_size), layer.kept, range(layer.hidden_size))
        if found is None:
            return None
        self.kept.add(f"{path}.weight")
        return BlocksHead(found, self._target, self._device)

    def experts(self, path: str, layer: Experts) -> BlocksExperts | None:
        inner, across = layer.kept_inner, range(layer.hidden_size)
        wide = layer.total_inner, layer.hidden_size
        parts = {
            "gate_proj": (wide, inner, across),
            "up_proj": (wide, inner, across),
            "down_proj": (wide[::-1], across, inner),
        }
        found = [[self.find(f"{path}.{expert}.{name}.weight", *part) for expert in layer.kept] for name, part in parts.items()]
        stacks = [[matrix for matrix in stack if matrix is not None] for stack in found]
        whole = all(len(stack) == len(layer.kept) and len({matrix.type for matrix in stack}) == 1 for stack in stacks)
        if not whole or "experts" not in self._target.keeps:
            return None
        self.kept.update(f"{path}.{expert}.{name}.weight" for expert in range(layer.total) for name in parts)
        return BlocksExperts(stacks, self._target, self._device)
