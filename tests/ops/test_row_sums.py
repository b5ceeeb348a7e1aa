"""Sums over the tokens of rows: torch and the Triton kernel agree with a loop in float64, to the last bit."""

import numpy as np
import pytest
import torch
from kernel_support import DTYPES, numbers

from quire.ops import row_sums

FIRST, COUNT, SLOT, BEGINS = (np.array(values) for values in ([0, 5, 6, 13], [5, 1, 7, 0], [3, 0, 6, 2], [1, 0, 0, 1]))
SIZE = 150


def by_loop(hidden, sums):
    for first, count, slot, begins in zip(FIRST, COUNT, SLOT, BEGINS, strict=True):
        total = torch.zeros(SIZE, dtype=torch.float64) if begins else sums[slot].clone()
        for state in hidden[first : first + count].double():
            total += state
        sums[slot] = total


@pytest.mark.parametrize("way", ["torch", "triton"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_summed_token_by_token(device, dtype, way, monkeypatch):
    monkeypatch.setattr(row_sums, "CHUNK", 3)
    hidden, sums = numbers(13, SIZE, dtype=dtype, device="cpu"), numbers(8, SIZE, dtype=torch.float64, device="cpu", seed=1)
    found = sums.clone()
    by_loop(hidden, sums)
    if way == "torch":
        row_sums.add_rows(hidden, FIRST, COUNT, SLOT, BEGINS, found)
    else:
        pytest.importorskip("triton")
        from quire.ops.kernels.row_sums import add_rows

        found = found.to(device)
        add_rows(hidden.to(device), FIRST, COUNT, SLOT, BEGINS, found)
    assert torch.equal(found.cpu(), sums)
