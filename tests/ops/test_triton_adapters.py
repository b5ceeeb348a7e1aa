"""Rows sorted by their adapters, and what those add, in Triton: against the layers' own way in torch."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from kernel_support import DTYPES, numbers

from quire.attn.batch import LoRATokens
from quire.layers.lora import LinearBank, LinearLoRA, LowRank
from quire.ops.adapters import ENTRY, make_table, tile

pytest.importorskip("triton")
from quire.ops.kernels import adapters as kernels

PLACES = 4


@pytest.mark.parametrize(
    ("places", "tokens"), [([0], 1), ([2], 1), ([3, 3, 0, 1, 3, 1], 6), ([4, 0, 2], 600), ([0, 1] * 40, 80), ([1, 2, 3, 4], 40)]
)
def test_sorting(places, tokens, device):
    of_tokens = np.repeat(places, tokens // len(places))
    found = tile(of_tokens, torch.device(device))
    order = found.order.tolist()
    assert order == np.argsort(of_tokens, kind="stable").tolist()
    block, covered = kernels.program_for(tokens).tokens, []
    for place, first, count in found.tiles.tolist():
        assert count <= block
        assert {of_tokens[token] for token in order[first : first + count]} <= {place}
        covered += range(first, first + count)
    assert covered == list(range(tokens))


def make_bank(parts, inputs, dtype, device, gain, bias):
    """Adapters of other ranks than each other's, some without anything for some part, and a table of them."""
    bank, total = LinearBank(), sum(width for _, width in parts)
    rows = torch.zeros(PLACES + 1, 2 * ENTRY * len(parts), dtype=torch.int64)
    bank.table = None
    for place, rank in ((1, 1), (2, 16), (3, 37)):
        low = tuple(
            LowRank(
                start,
                numbers(rank, inputs, dtype=dtype, device=device, seed=place).t() * 0.2,
                numbers(rank, width, dtype=dtype, device=device, seed=place + 9) * 0.2,
            )
            for start, width in parts[place % 2 :]
        )
        some = [
            numbers(total, dtype=dtype, device=device, seed=place + n) if wanted else None
            for n, wanted in ((1, gain), (2, bias))
        ]
        bank.slots[place] = LinearLoRA(low, *some)
        for number, (start, _) in enumerate(parts):
            entry = rows[place, number * ENTRY :]
            for part in (part for part in low if part.start == start):
                entry[:3] = torch.tensor([part.down.data_ptr(), part.up.data_ptr(), len(part.up)])
            for column, values in enumerate(some, 3):
                entry[column] = 0 if values is None else values[start:].data_ptr()
    rows = rows.to(device)
    return bank, make_table(rows.view(-1), rows.shape[1], 40, parts), rows


CASES = [  # parts, inputs, places of rows, tokens of each
    ([(0, 48)], 80, [2], 1),
    ([(0, 160), (160, 32), (192, 32)], 72, [3, 0, 1, 2, 3, 0], 3),
    ([(0, 10), (10, 5)], 37, [0, 1, 3, 3], 20),
    ([(0, 32), (32, 32)], 300, [2, 0, 4, 3], 140),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("parts", "inputs", "places", "each"), CASES)
@pytest.mark.parametrize("more", [False, True], ids=["low rank", "gain and bias"])
def test_addition(parts, inputs, places, each, more, dtype, device):
    outputs = sum(width for _, width in parts)
    bank, table, _ = make_bank(parts, inputs, dtype, device, more, more)
    of_tokens = np.repeat(places, each)
    x, out = (numbers(len(of_tokens), size, dtype=dtype, device=device, seed=size) for size in (inputs, outputs))
    own = numbers(outputs, dtype=dtype, device=device, seed=3) if more else None
    rows = LoRATokens(of_tokens, torch.device(device))
    expected = bank.add(out.clone(), x, rows, own)
    got = kernels.add(out.clone(), x, tile(of_tokens, torch.device(device)), table, own)
    torch.testing.assert_close(
        got, expected, atol=5 * {torch.float32: 1e-5}.get(dtype, 2e-2), rtol=3e-2 if dtype != torch.float32 else 1e-4
    )
    assert torch.equal(got[of_tokens % 4 == 0], out[of_tokens % 4 == 0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("parts", [[(0, 40), (40, 40)], [(0, 80)]], ids=["merged", "fused"])
def test_gated_addition(parts, dtype, device):
    bank, table, _ = make_bank(parts, 64, dtype, device, True, True)
    of_tokens = np.repeat([0, 2, 3, 1, 0], 4)
    x, out = (numbers(len(of_tokens), size, dtype=dtype, device=device, seed=size) for size in (64, 80))
    rows = LoRATokens(of_tokens, torch.device(device))
    expected = bank.gated(out.clone(), x, rows, None, "silu")
    got = kernels.add(out.clone(), x, tile(of_tokens, torch.device(device)), table, None, "silu")
    torch.testing.assert_close(
        got, expected, atol=5e-5 if dtype == torch.float32 else 5e-2, rtol=1e-4 if dtype == torch.float32 else 5e-2
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["", "silu"])
@pytest.mark.parametrize("place", [0, 1, 3])
def test_one_token(activation, place, dtype, device):
    """The layer's own product comes with it."""
    bank, table, _ = make_bank([(0, 40), (40, 40)], 272, dtype, device, True, True)
    x, weight, bias = (numbers(*shape, dtype=dtype, device=device, seed=7) * 0.3 for shape in ((1, 272), (80, 272), (80,)))
    rows = LoRATokens(np.array([place]), torch.device(device))
    out = F.linear(x, weight, bias)
    expected = bank.gated(out, x, rows, bias, activation) if activation else bank.add(out, x, rows, bias)
    got = kernels.one_row(x, weight, bias, tile(rows.slots, torch.device(device)), table, activation)
    loose = 1e-4 if dtype == torch.float32 else 5e-2
    torch.testing.assert_close(got, expected, atol=loose, rtol=loose)
