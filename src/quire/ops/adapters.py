"""Addition of LoRA adapters: tokens sorted by adapter, one or two launches per layer on a GPU."""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.ops.arguments import ADAPTER_BLOCK, AdapterTable, AdapterTiles, Moves
from quire.ops.linear import linear, streams

ENTRY = 5  # int64 values of a part in a table
UNIT = 16  # outputs; kernels are faster if parts begin and end at multiples of it


def make_table(entries: Tensor, stride: int, ranks: int, parts: Sequence[tuple[int, int]]) -> AdapterTable:
    """Return a table of adapters. parts: first output and width of each, in the order of the entries."""
    unit = UNIT if all(number % UNIT == 0 for part in parts for number in part) else 1
    blocks = [
        (number, at // unit, start // unit, width // unit)
        for number, (start, width) in enumerate(parts)
        for at in range(start, start + width, ADAPTER_BLOCK)
    ]
    blocks_on_device = torch.tensor(blocks, dtype=torch.int32, device=entries.device)
    return AdapterTable(entries, stride, ranks, blocks_on_device, unit, len(parts))


def tile(slots: npt.NDArray[np.int64], device: torch.device) -> AdapterTiles:
    """Return the tokens sorted by adapter. slots [T]: adapter slot of each token; 0: none."""
    firsts = np.flatnonzero(np.diff(slots, prepend=-1))  # first of adjacent tokens with the same adapter
    distinct, groups = np.unique(slots[firsts], return_inverse=True)
    count = len(firsts)
    room = -(-(count + 1) // 4) * 4  # each array begins at a multiple of 16 bytes
    packed = np.zeros((3, room), np.int32)
    packed[0, :count], packed[1, :count], packed[1, count], packed[2, : len(distinct)] = groups, firsts, len(slots), distinct
    sent = torch.from_numpy(packed)
    sent = sent.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else sent
    return sort_rows(sent[0, :count], sent[1, : count + 1], sent[2, :count], len(slots), len(distinct))


def sort_rows(groups: Tensor, starts: Tensor, slots: Tensor, tokens: int, most: int) -> AdapterTiles:
    """Return the tokens of rows sorted by adapter.

    groups: [R] int32 group of each row, from 0 without gaps
    starts: [R + 1] int32 of the rows among the tokens
    slots: [R] int32 adapter slot of each group
    most: upper bound of the number of groups
    """
    from quire.ops.kernels import adapters

    return adapters.sort(groups, starts, slots, tokens, most)


def add_tiled(
    out: Tensor, x: Tensor, rows: AdapterTiles, table: AdapterTable, own: Tensor | None, activation: str = ""
) -> Tensor:
    """Return out [T, outputs] of x [T, inputs] with each token's adapter applied. May overwrite `out`.

    own: [outputs] the layer's bias
    activation: the first half of the outputs is a gate -> [T, outputs / 2]
    """
    from quire.ops.kernels import adapters

    return adapters.add(out, x, rows, table, own, activation)


def linear_tiled(
    x: Tensor, weight: Tensor, bias: Tensor | None, rows: AdapterTiles, table: AdapterTable, activation: str = ""
) -> Tensor:
    """Return the outputs of a linear layer with each token's adapter applied; arguments as in `add_tiled`."""
    if len(x) == 1 and streams(x, weight):
        from quire.ops.kernels import adapters

        return adapters.one_row(x, weight, bias, rows, table, activation)
    return add_tiled(linear(x, weight, bias), x, rows, table, bias, activation)


def find_largest(raw: Tensor, moves: Moves) -> Tensor:
    """Return [S] float32: the absolute maximum of raw [n] in each span; infinity for NaN."""
    if raw.is_cuda:
        from quire.ops.kernels import adapters

        return adapters.find_largest(raw, moves)
    found = [raw[first : first + count].float().abs().max() for first, count in moves.spans.tolist()]
    return torch.stack(found).nan_to_num(nan=math.inf, posinf=math.inf)


def pack(raw: Tensor, flat: Tensor, moves: Moves, scales: Tensor) -> None:
    """Copy raw [n] into flat [m], multiplied by scales [C] float32 of each copy."""
    if raw.is_cuda:
        from quire.ops.kernels import adapters

        adapters.pack(raw, flat, moves, scales)
        return
    for (to, rows, columns, first, down, across), scale in zip(moves.copies.tolist(), scales.tolist(), strict=True):
        source = torch.as_strided(raw, (rows, columns), (down, across), first)
        torch.mul(source.float(), scale, out=flat[to : to + rows * columns].view(rows, columns))
