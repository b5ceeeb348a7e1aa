"""Products with matrices of 4- or 8-bit numbers, through OpenVINO: activations are rounded to 8 bits by groups of 32 as well,
and the sums are integers, so a row's result does not depend on the rows beside it.

It knows scales but only whole offsets. Offsets of any value are rounded, and the rests, which are a fraction of a scale, become
numbers of few bits themselves, behind the others. Then it is one product again:

    x @ (scale * (numbers + whole) + rest)  =  (x, sums of x by group) @ (scale * (numbers + whole), unit * rests)

or, where the rests would be too coarse for that, the offsets are a small product of their own:

    x @ (scale * numbers + offset)  =  x @ (scale * numbers)  +  (sums of x by group) @ offset
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.device.cpu.graph import ELEMENTS, Array, Graph
from quire.ops.blocks import GROUP, BlockMatrix, Integers, take_apart

FLOAT = ELEMENTS[np.dtype(np.float32)]
FINE = 4  # rests are in units of at most 1 / FINE of a scale, on average


@dataclass(frozen=True)
class Packed:
    """A matrix [N, K] as the operator wants it. G = K / 32, and with offsets folded as many more as their rests take."""

    bits: int
    inputs: int  # K
    numbers: Array  # [N, G, 4 * bits] uint8; 4 bits: two to a byte, the first in the low half
    scale: Array  # [N, G] float32
    zeros: Array | None  # [N, G * bits / 8, rounded up] uint8: numbers that stand for 0, if not those in the middle
    offset: Array | None  # [K / 32, N] float32, if they are not
    bias: Array | None  # [N] float32

    @property
    def outputs(self) -> int:
        return int(self.numbers.shape[0])

    @property
    def folded(self) -> bool:
        return bool(self.scale.shape[1] * GROUP > self.inputs)

    def each_zero(self) -> Array:
        """[N, G] uint8: the numbers that stand for 0, one to a byte."""
        shape = self.scale.shape
        if self.zeros is None:
            return np.full(shape, 2 ** (self.bits - 1), np.uint8)
        if self.bits == 8:
            return self.zeros
        return np.stack((self.zeros & 15, self.zeros >> 4), axis=-1).reshape(shape[0], -1)[:, : shape[1]].copy()


def pack(stored: Sequence[BlockMatrix], bias: Tensor | None) -> Packed:
    """One matrix of matrices above each other; numbers of different width take the larger one."""
    parts = [take_apart(part) for part in stored]
    for part in stored:
        part.forget()
    if len({part.bits for part in parts}) > 1:
        parts = [part.widened() for part in parts]
    bits, numbers, scale = parts[0].bits, torch.cat([part.numbers for part in parts]), torch.cat([part.scale for part in parts])
    offset = zeros = None
    if any(part.offset is not None for part in parts):
        offset = torch.cat([torch.zeros_like(part.scale) if part.offset is None else part.offset for part in parts])
        folded = _fold(Integers(bits, numbers, scale, offset))
        if folded is not None:
            offset, (numbers, scale, zeros) = None, folded
    return Packed(
        bits,
        stored[0].columns,
        _in_bytes(numbers, bits).view(*scale.shape, -1).numpy(),
        scale.contiguous().numpy(),
        None if zeros is None else _in_bytes(zeros, bits).numpy(),
        None if offset is None else offset.t().contiguous().numpy(),
        None if bias is None else bias.float().numpy(),
    )


def _fold(matrix: Integers) -> tuple[Tensor, Tensor, Tensor] | None:
    """numbers [N, 32 * G], scale and zeros [N, G]; None = the rests would have to be too coarse."""
    assert matrix.offset is not None
    middle, scale = 2 ** (matrix.bits - 1), matrix.scale
    zeros = (middle - matrix.offset / scale).nan_to_num(middle, middle, middle).round_().clamp_(0, 2 * middle - 1)
    rests = matrix.offset + (zeros - middle) * scale  # [N, K / 32]
    rests = torch.nn.functional.pad(rests, (0, -rests.shape[1] % GROUP)).view(len(rests), -1, GROUP)
    unit = rests.abs().amax(-1) / (middle - 1)  # [N, groups of rests]
    if unit.mean() * FINE > scale.mean():
        return None
    steps = (rests / unit[..., None]).nan_to_num(0.0).round_().add_(middle).to(torch.uint8).flatten(1)
    zeros = torch.cat((zeros, torch.full_like(unit, middle)), dim=1).to(torch.uint8)
    return torch.cat((matrix.numbers, steps), dim=1), torch.cat((scale, unit), dim=1), zeros


def _in_bytes(numbers: Tensor, bits: int) -> Tensor:
    """[N, C] -> [N, C * bits / 8, rounded up]."""
    if bits == 8:
        return numbers
    numbers = torch.nn.functional.pad(numbers, (0, numbers.shape[1] % 2))
    return numbers[:, 0::2] | numbers[:, 1::2] << 4


def emit(graph: Graph, x: str, packed: Packed) -> str:
    """Adds the product to a graph, which takes the matrix over; x is [T, K], the result [T, N]."""
    sums = _emit_sums(graph, x, packed) if packed.offset is not None or packed.folded else ""
    y = _emit_product(graph, x, sums, packed)
    if packed.offset is not None:
        [y] = graph.add("Gemm", [sums, graph.give(packed.offset), y])
    return y


def _emit_sums(graph: Graph, x: str, packed: Packed) -> str:
    """[T, K / 32], or if they are folded, with zeros behind that make whole groups. It is one small product by ones and zeros
    where a sum would be several operators."""
    count = packed.inputs // GROUP
    width = packed.scale.shape[1] * GROUP - packed.inputs if packed.folded else count
    ones = np.zeros((width, packed.inputs), np.float32)
    ones[:count] = np.repeat(np.eye(count, dtype=np.float32), GROUP, axis=1)
    return graph.add("Gemm", [x, graph.shared(ones)], transB=1)[0]


def _emit_product(graph: Graph, x: str, sums: str, packed: Packed) -> str:
    """As a matrix that is dequantized and then multiplied by. It has whole groups only."""
    outputs, groups = packed.scale.shape
    if packed.folded:
        [x] = graph.add("Concat", [x, sums], axis=1)
    shape = outputs, groups, GROUP
    numbers = graph.give(packed.numbers, shape) if packed.bits == 4 else graph.give(packed.numbers.reshape(shape))
    wide = [graph.add("Cast", [name], to=FLOAT)[0] for name in (numbers, graph.give(packed.each_zero()[..., None]))]
    [scaled] = graph.add("Mul", [*graph.add("Sub", wide), graph.give(packed.scale[..., None])])
    [matrix] = graph.add("Reshape", [scaled, graph.constant(np.array([outputs, groups * GROUP], np.int64))])
    bias = [] if packed.bias is None else [graph.constant(packed.bias)]
    return graph.add("Gemm", [x, matrix, *bias], transB=1)[0]
