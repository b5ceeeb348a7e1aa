"""Experts of gpt-oss in mxfp4, given as floats: `<name>_blocks` [E, N, K / 32, 16] and `<name>_scales` [E, N, K / 32] are the
stack `<name>` [E, K, N]."""

from collections.abc import Collection, Iterator, Mapping

import torch
from torch import Tensor

from quire.load.source import Source, TensorSlice, cut
from quire.ops.blocks import QuantizedMatrix
from quire.ops.quantized_layouts import Float4
from quire.types.errors import ModelError

BLOCKS, SCALES, GROUP = "_blocks", "_scales", 32


class MXFP4Source:
    """Of a checkpoint whose other tensors are floats."""

    def __init__(self, source: Source, dtype: torch.dtype) -> None:
        self._source, self._dtype = source, dtype
        self._stacks = [name.removesuffix(BLOCKS) for name in source.shapes if name.endswith(BLOCKS)]
        for name in self._stacks:
            blocks, scales = source.shapes[name + BLOCKS], source.shapes.get(name + SCALES)
            if len(blocks) != 4 or blocks[3] != GROUP // 2 or scales != blocks[:3]:
                found = "is missing" if scales is None else f"is {list(scales)}"
                raise ModelError(
                    f"{name}{BLOCKS} is {list(blocks)} and {name}{SCALES} {found}: these are not blocks of {GROUP}"
                )

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        parts = {name + end for name in self._stacks for end in (BLOCKS, SCALES)}
        found = {name: shape for name, shape in self._source.shapes.items() if name not in parts}
        for name in self._stacks:
            experts, outputs, blocks, _ = self._source.shapes[name + BLOCKS]
            found[name] = (experts, blocks * GROUP, outputs)
        return found

    def read(self, slices: Collection[TensorSlice]) -> Iterator[tuple[TensorSlice, Tensor]]:
        yield from self._source.read([part for part in slices if part.name not in self._stacks])
        for part in slices:
            if part.name in self._stacks:
                yield part, cut(self._dequantize(part.name), part.ranges)

    def find_rows(self, name: str) -> QuantizedMatrix | None:
        return self._source.find_rows(name)

    def _dequantize(self, name: str) -> Tensor:
        """An expert at a time: on the way numbers take more room."""
        read = self._source.read([TensorSlice(name + BLOCKS), TensorSlice(name + SCALES)])
        tensors = {part.name: tensor for part, tensor in read}
        blocks, scales = tensors[name + BLOCKS], tensors[name + SCALES]
        if bool((scales == 255).any()):
            raise ModelError(f"{name}{SCALES} has a scale of NaN; the checkpoint is damaged")
        out = torch.empty(self.shapes[name], dtype=self._dtype)
        for place, numbers, scale in zip(out, blocks.flatten(2), scales, strict=True):
            place.copy_(Float4("e2m1", GROUP, numbers, scale).dequantize().t())
        return out
