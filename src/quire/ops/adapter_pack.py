"""An adapter's numbers as its file has them, made into what layers read, on the device: matrices turned, multiplied and placed,
and the largest number of each found. On a GPU a launch does it for all of them; elsewhere, and as what that is compared with,
torch goes from matrix to matrix.

    file    [ A, rank x inputs | B, outputs x rank | A ... ]  ──►  flat    [ A | B', rank x outputs, multiplied | ... ]
"""

import math

import torch
from torch import Tensor

from quire.ops.adapter_moves import Moves


def find_largest(raw: Tensor, moves: Moves) -> Tensor:
    """[S] float32, of raw [n]: how far from 0 numbers of each span get; infinitely if one of them is no number."""
    if raw.is_cuda:
        from quire.ops.kernels import adapter_pack

        return adapter_pack.find_largest(raw, moves)
    found = [raw[first : first + count].float().abs().max() for first, count in moves.spans.tolist()]
    return torch.stack(found).nan_to_num(nan=math.inf, posinf=math.inf)


def pack(raw: Tensor, flat: Tensor, moves: Moves, scales: Tensor) -> None:
    """Of raw [n] into flat [m]; scales [C] float32: what each copy is multiplied by."""
    if raw.is_cuda:
        from quire.ops.kernels import adapter_pack

        adapter_pack.pack(raw, flat, moves, scales)
        return
    for (to, rows, columns, first, down, across), scale in zip(moves.copies.tolist(), scales.tolist(), strict=True):
        source = torch.as_strided(raw, (rows, columns), (down, across), first)
        torch.mul(source.float(), scale, out=flat[to : to + rows * columns].view(rows, columns))
