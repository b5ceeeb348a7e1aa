"""An adapter's numbers moved by kernels: as torch moves them, bit by bit."""

import numpy as np
import pytest
import torch
from kernel_support import DTYPES, numbers

from quire.ops.adapters import find_largest, pack
from quire.ops.arguments import Moves

pytest.importorskip("triton")
from quire.ops.kernels import adapters as kernels

SPANS = np.array([[0, 16 * 600], [9600, 300 * 16], [14400, 1], [14402, 9000]])  # between the last two nothing is looked at
COPIES = np.array(
    [
        [0, 16, 600, 0, 600, 1],  # as it is
        [9664, 16, 300, 9600, 1, 16],  # turned
        [14528, 16, 37, 250, 600, 1],  # columns of it
        [15168, 1, 1, 14400, 1, 1],
        [15232, 3, 3000, 14402, 1, 3],
    ]
)


@pytest.mark.parametrize("to", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels_move_as_torch_does(dtype, to, device):
    raw = numbers(23500, dtype=dtype, device=device)
    raw[14401] = torch.nan  # nobody's
    moves, scales = Moves(SPANS, COPIES, torch.device(device)), torch.tensor([1.0, 0.37, 2.0, -1.5, 1.01], device=device)
    flats = torch.full((2, 24400), 7.0, dtype=to, device=device)
    kernels.pack(raw, flats[0], moves, scales)
    here = Moves(SPANS, COPIES, torch.device("cpu"))
    expected = flats[1].cpu()
    pack(raw.cpu(), expected, here, scales.cpu())
    assert torch.equal(flats[0].cpu(), expected)
    assert torch.equal(kernels.find_largest(raw, moves).cpu(), find_largest(raw.cpu(), here))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_no_number_is_found(bad, device):
    raw = numbers(23500, dtype=torch.float32, device=device)
    raw[14402 + 8999], raw[5] = bad, -77.0
    here = Moves(SPANS, COPIES, torch.device(device))
    for found in (kernels.find_largest(raw, here), find_largest(raw, here)):
        assert found[0] == 77.0 and found[3] == torch.inf and found[1] < 10
