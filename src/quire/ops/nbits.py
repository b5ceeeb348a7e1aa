"""Products with matrices of 4- or 8-bit numbers, through ONNX Runtime's MatMulNBits: activations are rounded to 8 bits by
groups of 32 as well, and the sums are integers, so a row's result does not depend on the rows beside it.

The operator knows scales but only whole offsets. Offsets of any value are a small product of their own:

    x @ (scale * numbers + offset)  =  x @ (scale * numbers)  +  (sums of x by group) @ offset
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from quire.ops.blocks import GROUP, Stored, take_apart
from quire.ops.onnx import CONTRIB, Array, Graph, Session

BY_INTEGERS = 4  # the operator's accuracy_level


@dataclass(frozen=True)
class Packed:
    """A matrix [N, K] as the operator wants it."""

    bits: int
    numbers: Array  # [N, K / 32, 4 * bits] uint8; 4 bits: two to a byte, the first in the low half
    scale: Array  # [N, K / 32] float32
    offset: Array | None  # [K / 32, N] float32
    bias: Array | None  # [N] float32

    @property
    def outputs(self) -> int:
        return int(self.numbers.shape[0])

    @property
    def inputs(self) -> int:
        return int(self.numbers.shape[1]) * GROUP


def pack(stored: Sequence[Stored], bias: Tensor | None) -> Packed:
    """One matrix of matrices above each other; numbers of different width take the larger one."""
    parts = [take_apart(part) for part in stored]
    for part in stored:
        part.forget()
    if len({part.bits for part in parts}) > 1:
        parts = [part.widened() for part in parts]
    numbers, scale = torch.cat([part.numbers for part in parts]), torch.cat([part.scale for part in parts])
    if parts[0].bits == 4:
        numbers = numbers[:, 0::2] | numbers[:, 1::2] << 4
    offset = None
    if any(part.offset is not None for part in parts):
        each = [torch.zeros_like(part.scale) if part.offset is None else part.offset for part in parts]
        offset = torch.cat(each).t().contiguous().numpy()
    shaped = numbers.reshape(*scale.shape, -1).numpy()
    return Packed(parts[0].bits, shaped, scale.contiguous().numpy(), offset, None if bias is None else bias.float().numpy())


def emit(graph: Graph, x: str, packed: Packed) -> str:
    """Adds the product to a graph, which takes the matrix over; x is [T, K], the result [T, N]."""
    inputs = [x, graph.give(packed.numbers), graph.give(packed.scale)]
    if packed.bias is not None:
        inputs += ["", "", graph.constant(packed.bias)]
    shape = {"K": packed.inputs, "N": packed.outputs, "bits": packed.bits, "block_size": GROUP, "accuracy_level": BY_INTEGERS}
    [y] = graph.add("MatMulNBits", inputs, domain=CONTRIB, **shape)
    if packed.offset is None:
        return y
    groups = graph.constant(np.array([0, packed.inputs // GROUP, GROUP], np.int64))
    [by_group] = graph.add("Reshape", [x, groups])
    [sums] = graph.add("ReduceSum", [by_group, graph.constant(np.array([2], np.int64))], keepdims=0)
    [total] = graph.add("Gemm", [sums, graph.give(packed.offset), y])
    return total


class Product:
    """x [T, K] -> [T, N]."""

    def __init__(self, packed: Packed, hold: bool | None = None) -> None:
        graph, x = Graph(), "x"
        y = emit(graph, x, packed)
        hold = not forgets(packed.bits) if hold is None else hold
        self._session = Session(graph, [(x, packed.inputs)], [(y, packed.outputs)], hold)

    def __call__(self, x: Tensor) -> Tensor:
        return self._session.run(x)[0]


@cache
def forgets(bits: int) -> bool:
    """Does the runtime, on this machine, never look again at a matrix it was lent? Tried on a small one, by changing it."""
    rng = np.random.default_rng(0)
    numbers = rng.integers(0, 256, (96, 4, 4 * bits), np.uint8)
    scale, offset = rng.random((96, 4), np.float32), rng.random((4, 96), np.float32)
    product = Product(Packed(bits, numbers, scale, offset, None), hold=True)
    some = [torch.from_numpy(rng.random((rows, 4 * GROUP), np.float32)) for rows in (1, 40)]
    before = [product(x).clone() for x in some]
    for array in (numbers, scale, offset):
        array[:] = 1
    return all(torch.equal(product(x), was) for x, was in zip(some, before, strict=True))
