"""Repack quantized GGUF weights, and float32 weights, into the layouts that CPU kernels read.

**Own kernels** read tiles of the same size as in the file. For 4- and 8-bit weights (`native/product.c`) a tile has four
outputs on ARM and sixteen on x86. It is a row of groups of 32 inputs:

    [ values: 8 times 4 inputs of each output | scales | offsets, if any ]

Of 4-bit values, the first 4 inputs are in the low halves of the bytes that hold the next 4 in their high halves. Values
without offsets are signed. Scales and offsets have half precision if the file has. A float32 tile (`native/floats.c`) has
twelve or sixteen outputs, input by input.

**OpenVINO** quantizes activations to 8 bits per group of 32 and adds integers, so the result of a token does not depend on
the rest of the batch. It supports scales with integer zero points only. Other offsets are rounded to zero points. The
remainders, fractions of a scale, are quantized and appended to the values. Then it is one product again:

    x @ (scale * (values + zero) + remainder)  =  (x, sums of x per group) @ (scale * (values + zero), unit * remainders)

If remainders would be too coarse for that, offsets are a small product of their own:

    x @ (scale * values + offset)  =  x @ (scale * values)  +  (sums of x per group) @ offset
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.device.cpu.graph import ELEMENTS, FLOATS, OWN, Array, Graph, Runtime
from quire.ops.blocks import GROUP, BlockMatrix, Integers, cut, has_half_factors, to_integers
from quire.ops.native import float_tile, tile

FLOAT = ELEMENTS[np.dtype(np.float32)]
FINE = 4  # the unit of remainders is at most 1 / FINE of a scale, on average
CHUNK_ELEMENTS = 1 << 20  # values laid out at once; torch reuses the temporary memory of a chunk


@dataclass(frozen=True)
class Packed:
    """A matrix [N, K] as OpenVINO reads it. G = K / 32, plus the groups of folded remainders."""

    bits: int
    inputs: int  # K
    numbers: Array  # [N, G, 4 * bits] uint8; two 4-bit values per byte, the first in the low half
    scale: Array  # [N, G] float32
    zeros: Array | None  # [N, G * bits / 8, rounded up] uint8: zero points, if not the middle value
    offset: Array | None  # [K / 32, N] float32, if not folded
    bias: Array | None  # [N] float32

    @property
    def outputs(self) -> int:
        return int(self.numbers.shape[0])

    @property
    def folded(self) -> bool:
        return bool(self.scale.shape[1] * GROUP > self.inputs)

    def each_zero(self) -> Array:
        """Return the zero points [N, G] uint8, one per byte."""
        shape = self.scale.shape
        if self.zeros is None:
            return np.full(shape, 2 ** (self.bits - 1), np.uint8)
        if self.bits == 8:
            return self.zeros
        return np.stack((self.zeros & 15, self.zeros >> 4), axis=-1).reshape(shape[0], -1)[:, : shape[1]].copy()


def pack(stored: Sequence[BlockMatrix], bias: Tensor | None) -> Packed:
    """Return the matrices, one below the other, as one. Of different widths the larger one is used."""
    parts = [to_integers(part) for part in stored]
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
    """Return values [N, 32 * G], scales and zero points [N, G], or None if the remainders would be too coarse."""
    assert matrix.offset is not None
    middle, scale = 2 ** (matrix.bits - 1), matrix.scale
    zeros = (middle - matrix.offset / scale).nan_to_num(middle, middle, middle).round_().clamp_(0, 2 * middle - 1)
    remainders = matrix.offset + (zeros - middle) * scale  # [N, K / 32]
    remainders = torch.nn.functional.pad(remainders, (0, -remainders.shape[1] % GROUP)).view(len(remainders), -1, GROUP)
    unit = remainders.abs().amax(-1) / (middle - 1)  # [N, groups of remainders]
    if unit.mean() * FINE > scale.mean():
        return None
    steps = (remainders / unit[..., None]).nan_to_num(0.0).round_().add_(middle).to(torch.uint8).flatten(1)
    zeros = torch.cat((zeros, torch.full_like(unit, middle)), dim=1).to(torch.uint8)
    return torch.cat((matrix.numbers, steps), dim=1), torch.cat((scale, unit), dim=1), zeros


def _in_bytes(numbers: Tensor, bits: int) -> Tensor:
    """Pack [N, C] into [N, C * bits / 8, rounded up]."""
    if bits == 8:
        return numbers
    numbers = torch.nn.functional.pad(numbers, (0, numbers.shape[1] % 2))
    return numbers[:, 0::2] | numbers[:, 1::2] << 4


def emit_packed(graph: Graph, x: str, packed: Packed) -> str:
    """Add the product to a graph, which takes the matrix over. x is [T, K], the result [T, N]."""
    sums = _emit_sums(graph, x, packed) if packed.offset is not None or packed.folded else ""
    y = _emit_product(graph, x, sums, packed)
    if packed.offset is not None:
        [y] = graph.add("Gemm", [sums, graph.adopt(packed.offset), y])
    return y


def _emit_sums(graph: Graph, x: str, packed: Packed) -> str:
    """Add the sums of x per group, [T, K / 32]; if folded, padded with zeros to whole groups.

    A product with ones and zeros is one operator; a sum would be several.
    """
    count = packed.inputs // GROUP
    width = packed.scale.shape[1] * GROUP - packed.inputs if packed.folded else count
    ones = np.zeros((width, packed.inputs), np.float32)
    ones[:count] = np.repeat(np.eye(count, dtype=np.float32), GROUP, axis=1)
    return graph.add("Gemm", [x, graph.shared(ones)], transB=1)[0]


def _emit_product(graph: Graph, x: str, sums: str, packed: Packed) -> str:
    """Add a dequantized matrix and the product with it. The matrix has whole groups only."""
    outputs, groups = packed.scale.shape
    if packed.folded:
        [x] = graph.add("Concat", [x, sums], axis=1)
    shape = outputs, groups, GROUP
    numbers = graph.adopt(packed.numbers, shape) if packed.bits == 4 else graph.adopt(packed.numbers.reshape(shape))
    wide = [graph.add("Cast", [name], to=FLOAT)[0] for name in (numbers, graph.adopt(packed.each_zero()[..., None]))]
    [scaled] = graph.add("Mul", [*graph.add("Sub", wide), graph.adopt(packed.scale[..., None])])
    [matrix] = graph.add("Reshape", [scaled, graph.constant(np.array([outputs, groups * GROUP], np.int64))])
    bias = [] if packed.bias is None else [graph.constant(packed.bias)]
    return graph.add("Gemm", [x, matrix, *bias], transB=1)[0]


@dataclass(frozen=True)
class Tiles:
    """A matrix in tiles for our own kernels."""

    kind: int  # the constant in C
    inputs: int
    outputs: int
    memory: Array  # [tiles, ...]
    bias: Array | None  # [outputs, rounded up to whole tiles] float32


def lay_out(stored: Sequence[BlockMatrix], bias: Tensor | None) -> Tiles:
    """Return the matrices, one below the other, in tiles. Of different widths the larger one is used."""
    outputs, groups, width = sum(map(len, stored)), stored[0].columns // GROUP, tile()
    samples = [to_integers(part, 0, 1) for part in stored]
    bits, offsets = max(part.bits for part in samples), any(part.offset is not None for part in samples)
    exact = all(map(has_half_factors, stored))
    wide = not exact or (bits == 8 and offsets)
    kind = torch.float32 if wide else torch.float16
    nbytes = width * (4 * bits + kind.itemsize * (1 + offsets))
    memory = np.empty((-(-outputs // width), groups, nbytes), np.uint8)
    step = max(1, CHUNK_ELEMENTS // stored[0].columns // width) * width
    for start in range(0, outputs, step):
        parts = [to_integers(part, low, high) for part, low, high, _ in cut(stored, start, min(start + step, outputs))]
        parts = [part.widened() for part in parts] if bits == 8 else parts
        factors = zip(*(_factors(part, offsets) for part in parts), strict=True)
        scale, offset = (_by_tiles(torch.cat(some), width).to(kind).view(torch.uint8) for some in factors)
        numbers = _in_tiles(torch.cat([part.numbers for part in parts]), width, bits, offsets)
        place = torch.from_numpy(memory[start // width : start // width + len(numbers)])
        torch.cat([numbers, scale, *([offset] if offsets else [])], dim=-1, out=place)
    for part in stored:
        part.forget()
    return Tiles(4 * (bits == 8) + 2 * wide + offsets, stored[0].columns, outputs, memory, _padded(bias, width))


def lay_out_floats(weight: Tensor, bias: Tensor | None) -> Tiles:
    """Return weight [N, K] in tiles."""
    outputs, inputs = weight.shape
    width = float_tile()
    memory = np.zeros((-(-outputs // width), inputs, width), np.float32)
    for number, place in enumerate(torch.from_numpy(memory)):
        some = weight[number * width : (number + 1) * width]
        place[:, : len(some)] = some.detach().t()
    return Tiles(FLOATS, inputs, outputs, memory, _padded(bias, width))


def _padded(bias: Tensor | None, width: int) -> Array | None:
    return None if bias is None else torch.nn.functional.pad(bias.detach().float(), (0, -len(bias) % width)).numpy()


def _factors(matrix: Integers, offsets: bool) -> tuple[Tensor, Tensor]:
    """Return scales and offsets [N, groups]. 4-bit values that have offsets start at 0."""
    scale, offset = matrix.scale, torch.zeros_like(matrix.scale) if matrix.offset is None else matrix.offset
    return scale, (offset.double() - 8 * scale.double()).float() if offsets and matrix.bits == 4 else offset


def _in_tiles(numbers: Tensor, width: int, bits: int, offsets: bool) -> Tensor:
    """Return values [N, K] as [tiles, groups, 4 * width * bits]."""
    numbers = torch.nn.functional.pad(numbers, (0, 0, 0, -len(numbers) % width))
    fours = numbers.view(torch.int32).view(len(numbers) // width, width, -1, GROUP // 4)  # 4 inputs each
    tiles = fours.permute(0, 2, 3, 1).contiguous().view(torch.uint8)  # [tiles, groups, 8, 4 * width]
    if bits == 8:
        return (tiles ^ 128).flatten(2)
    if not offsets:
        tiles = tiles ^ 8
    return (tiles[:, :, 0::2] | tiles[:, :, 1::2] << 4).flatten(2)


def _by_tiles(factors: Tensor, width: int) -> Tensor:
    """Return factors [N, groups] as [tiles, groups, width]."""
    factors = torch.nn.functional.pad(factors, (0, 0, 0, -len(factors) % width))
    return factors.view(len(factors) // width, width, -1).transpose(1, 2).contiguous()


def emit_tiles(graph: Graph, x: str, tiles: Tiles) -> str:
    """Add the product to a graph of our own kernels. x is [T, K], the result [T, N]."""
    inputs = [x, graph.borrow(tiles.memory)]
    if tiles.bias is not None:
        inputs.append(graph.constant(tiles.bias))
    return graph.add("Tiles", inputs, domain=OWN, kind=tiles.kind, columns=tiles.outputs)[0]


Repacked = Packed | Tiles


def repack(stored: Sequence[BlockMatrix], bias: Tensor | None, runtime: Runtime) -> Repacked:
    """Return the matrices, one below the other, for a runtime."""
    return lay_out(stored, bias) if runtime is Runtime.OWN else pack(stored, bias)


def emit(graph: Graph, x: str, matrix: Repacked) -> str:
    """Add the product to a graph, which takes the matrix over. x is [T, K], the result [T, N]."""
    return emit_tiles(graph, x, matrix) if isinstance(matrix, Tiles) else emit_packed(graph, x, matrix)
