"""Sums over the tokens of rows, token by token in float64: neither the other rows nor chunks change a bit."""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Longs = npt.NDArray[np.int64]
CHUNK = 1024  # tokens that are converted to float64 at a time


def add_rows(hidden: Tensor, first: Longs, count: Longs, slot: Longs, begins: Longs, sums: Tensor) -> None:
    """Add tokens first[r] ... first[r] + count[r] of hidden [T, H] to sums[slot[r]], which starts at zero if begins[r].

    sums: [S, H] float64. first, count, slot, begins: [R], on the host.
    """
    if hidden.is_cuda:
        from quire.ops.kernels import row_sums

        row_sums.add_rows(hidden, first, count, slot, begins, sums)
        return
    for at, tokens, place, new in zip(first.tolist(), count.tolist(), slot.tolist(), begins.tolist(), strict=True):
        total = sums[place : place + 1]
        if new:
            total.zero_()
        for part in torch.split(hidden[at : at + tokens], CHUNK):
            total.index_add_(0, torch.zeros(len(part), dtype=torch.int64, device=hidden.device), part.double())
