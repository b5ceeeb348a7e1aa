"""Addition of LoRA adapters: tokens sorted by adapter, one or two launches per layer on a GPU."""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.ops.arguments import ADAPTER_BLOCK, AdapterTable, AdapterTiles, Moves
from quire.ops.linear import linear, streams

ENTRY = 5  # numbers of a part in a table
UNIT = 16  # outputs, where parts begin and end at multiples of it


def make_table(entries: Tensor, stride: int, ranks: int, parts: Sequence[tuple[int, int]]) -> AdapterTable:
    """`parts`: first output and width of each, in the order of the entries."""
    unit = UNIT if all(number % UNIT == 0 for part in parts for number in part) else 1
    blocks = [
        (number, at // unit, start // unit, width // unit)
        for number, (start, width) in enumerate(parts)
        for at in range(start, start + width, ADAPTER_BLOCK)
    ]
    there = torch.tensor(blocks, dtype=torch.int32, device=entries.device)
    return AdapterTable(entries, stride, ranks, there, unit, len(parts))


def tile(places: npt.NDArray[np.int64], device: torch.device) -> AdapterTiles:
    """places [T]: of each token's adapter, 0 = none."""
    firsts = np.flatnonzero(np.diff(places, prepend=-1))  # of tokens beside each other that have the same
    distinct, groups = np.unique(places[firsts], return_inverse=True)
    count = len(firsts)
    room = -(-(count + 1) // 4) * 4  # each begins at a multiple of 16 bytes
    packed = np.zeros((3, room), np.int32)
    packed[0, :count], packed[1, :count], packed[1, count], packed[2, : len(distinct)] = groups, firsts, len(places), distinct
    there = torch.from_numpy(packed)
    there = there.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else there
    return sort_rows(there[0, :count], there[1, : count + 1], there[2, :count], len(places), len(distinct))


def sort_rows(groups: Tensor, starts: Tensor, places: Tensor, tokens: int, most: int) -> AdapterTiles:
    """groups [R] int32 of rows, from 0 on without a gap, starts [R + 1] int32 of the rows among the tokens, places [R] int32 of
    each group. There are `most` groups at most."""
    from quire.ops.kernels import adapters

    return adapters.sort(groups, starts, places, tokens, most)


def add_tiled(
    out: Tensor, x: Tensor, rows: AdapterTiles, table: AdapterTable, own: Tensor | None, activation: str = ""
) -> Tensor:
    """out [T, outputs], which it may overwrite, of x [T, inputs]; own [outputs]: the layer's bias. With an activation: the
    first half of the outputs is then a gate of the second -> [T, outputs / 2]."""
    from quire.ops.kernels import adapters

    return adapters.add(out, x, rows, table, own, activation)


def linear_tiled(
    x: Tensor, weight: Tensor, bias: Tensor | None, rows: AdapterTiles, table: AdapterTable, activation: str = ""
) -> Tensor:
    """A matrix times rows, with what their adapters add; as `add_tiled`."""
    if len(x) == 1 and streams(x, weight):
        from quire.ops.kernels import adapters

        return adapters.one_row(x, weight, bias, rows, table, activation)
    return add_tiled(linear(x, weight, bias), x, rows, table, bias, activation)


def find_largest(raw: Tensor, moves: Moves) -> Tensor:
    """[S] float32, of raw [n]: how far from 0 numbers of each span get; infinitely if one of them is no number."""
    if raw.is_cuda:
        from quire.ops.kernels import adapters

        return adapters.find_largest(raw, moves)
    found = [raw[first : first + count].float().abs().max() for first, count in moves.spans.tolist()]
    return torch.stack(found).nan_to_num(nan=math.inf, posinf=math.inf)


def pack(raw: Tensor, flat: Tensor, moves: Moves, scales: Tensor) -> None:
    """Of raw [n] into flat [m]; scales [C] float32: what each copy is multiplied by."""
    if raw.is_cuda:
        from quire.ops.kernels import adapters

        adapters.pack(raw, flat, moves, scales)
        return
    for (to, rows, columns, first, down, across), scale in zip(moves.copies.tolist(), scales.tolist(), strict=True):
        source = torch.as_strided(raw, (rows, columns), (down, across), first)
        torch.mul(source.float(), scale, out=flat[to : to + rows * columns].view(rows, columns))
