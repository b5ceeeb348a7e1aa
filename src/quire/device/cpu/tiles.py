"""Matrices as Quire's own kernels for products want them: as large as in the file.

Of numbers of 4 or 8 bits (`native/product.c`) four outputs are a tile on ARM, sixteen on x86. A tile is a row of groups of 32
inputs:

    [ numbers: 8 times 4 inputs of each output | scales | offsets, if there are any ]

4-bit numbers of the first 4 inputs are in the lower halves of the bytes whose upper halves have the next 4. Without offsets
numbers are signed. Scales and offsets are in half precision where the file has them so.

Of float32 numbers (`native/floats.c`) twelve or sixteen outputs are a tile, input by input.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.device.cpu.graph import OWN, Array, Graph
from quire.ops.blocks import GROUP, BlockMatrix, Integers, cut, has_half_factors, take_apart
from quire.ops.native import float_tile, tile

FLOATS = 8  # the kind
AT_ONCE = 1 << 20  # numbers that are laid out at once: what it takes in between goes back to torch, not to the system


@dataclass(frozen=True)
class Tiles:
    kind: int  # as C counts them
    inputs: int
    outputs: int
    memory: Array  # [tiles, ...]
    bias: Array | None  # [outputs, rounded up to whole tiles] float32


def lay_out(stored: Sequence[BlockMatrix], bias: Tensor | None) -> Tiles:
    """One matrix of matrices above each other; numbers of different width take the larger one."""
    outputs, groups, width = sum(map(len, stored)), stored[0].columns // GROUP, tile()
    samples = [take_apart(part, 0, 1) for part in stored]
    bits, offsets = max(part.bits for part in samples), any(part.offset is not None for part in samples)
    exact = all(map(has_half_factors, stored))
    wide = not exact or (bits == 8 and offsets)
    kind = torch.float32 if wide else torch.float16
    nbytes = width * (4 * bits + kind.itemsize * (1 + offsets))
    memory = np.empty((-(-outputs // width), groups, nbytes), np.uint8)
    step = max(1, AT_ONCE // stored[0].columns // width) * width
    for start in range(0, outputs, step):
        parts = [take_apart(part, low, high) for part, low, high, _ in cut(stored, start, min(start + step, outputs))]
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
    """weight [N, K]."""
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
    """Scales and offsets [N, groups]; 4-bit numbers that have offsets begin with 0."""
    scale, offset = matrix.scale, torch.zeros_like(matrix.scale) if matrix.offset is None else matrix.offset
    return scale, (offset.double() - 8 * scale.double()).float() if offsets and matrix.bits == 4 else offset


def _in_tiles(numbers: Tensor, width: int, bits: int, offsets: bool) -> Tensor:
    """[N, K] -> [tiles, groups, 4 * width * bits]."""
    numbers = torch.nn.functional.pad(numbers, (0, 0, 0, -len(numbers) % width))
    fours = numbers.view(torch.int32).view(len(numbers) // width, width, -1, GROUP // 4)  # 4 inputs each
    tiles = fours.permute(0, 2, 3, 1).contiguous().view(torch.uint8)  # [tiles, groups, 8, 4 * width]
    if bits == 8:
        return (tiles ^ 128).flatten(2)
    if not offsets:
        tiles = tiles ^ 8
    return (tiles[:, :, 0::2] | tiles[:, :, 1::2] << 4).flatten(2)


def _by_tiles(factors: Tensor, width: int) -> Tensor:
    """[N, groups] -> [tiles, groups, width]."""
    factors = torch.nn.functional.pad(factors, (0, 0, 0, -len(factors) % width))
    return factors.view(len(factors) // width, width, -1).transpose(1, 2).contiguous()


def emit(graph: Graph, x: str, tiles: Tiles) -> str:
    """Adds the product to a graph of our own; x is [T, K], the result [T, N]."""
    inputs = [x, graph.lend(tiles.memory)]
    if tiles.bias is not None:
        inputs.append(graph.constant(tiles.bias))
    return graph.add("Tiles", inputs, domain=OWN, kind=tiles.kind, columns=tiles.outputs)[0]
