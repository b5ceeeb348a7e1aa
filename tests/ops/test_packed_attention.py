"""Bidirectional attention over packed sequences: torch by sequence length and the Triton kernel, against a plain formula."""

import pytest
import torch
from kernel_support import DTYPES

from quire.ops import packed_attention
from quire.ops.packed_attention import reference_attend_packed

LENGTHS = {"mixed": (1, 5, 5, 70, 2), "equal": (9, 9, 9), "one": (130,), "with an empty row": (3, 0, 4)}
SHAPES = [(2, 16), (3, 40)]
REACH = 150


def formula(query, key, value, lengths, *, scale, window, bias):
    """One sequence and head at a time, in float64."""
    out, at = torch.zeros_like(query, dtype=torch.float64), 0
    for count in lengths:
        part = slice(at, at + count)
        distance = torch.arange(count) - torch.arange(count)[:, None]
        for head in range(query.shape[1]):
            logits = query[part, head].double() @ key[part, head].double().T * scale
            if bias is not None:
                logits = logits + bias[head].double()[distance + REACH]
            if window is not None:
                logits = logits.masked_fill(distance.abs() > window, float("-inf"))
            out[part, head] = torch.softmax(logits, -1) @ value[part, head].double()
        at += count
    return out


def make(lengths, shape, dtype, biased):
    """Views of one projection, as layers have them."""
    generator, (heads, size), total = torch.Generator().manual_seed(3), shape, sum(lengths)
    qkv = torch.randn(total, 3, heads, size, generator=generator).to(dtype)
    bias = torch.randn(heads, 2 * REACH + 1, generator=generator) if biased else None
    ends = torch.tensor([0, *lengths]).cumsum(0)
    rows = [(int(first), count, count) for first, count in zip(ends, lengths, strict=False)]
    return qkv.unbind(1), bias, rows, ends.int()


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("window", [None, 0, 3, 64])
@pytest.mark.parametrize("biased", [False, True])
def test_torch_by_length(lengths, window, biased, monkeypatch):
    monkeypatch.setattr(packed_attention, "QUERIES_PER_PIECE", 32)
    (query, key, value), bias, rows, _ = make(lengths, SHAPES[1], torch.float32, biased)
    options = {"scale": 0.3, "window": window, "bias": bias}
    plans = {}
    expected = formula(query, key, value, lengths, **options)
    for _ in range(2):  # the second time with the plans of the first
        found = reference_attend_packed(query, key, value, rows, plans, **options)
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


def test_a_sequence_has_the_same_bits_in_any_batch():
    (query, key, value), bias, rows, _ = make((70, 33, 70, 5), SHAPES[0], torch.float32, True)
    options = {"scale": 0.3, "window": 20, "bias": bias}
    together = reference_attend_packed(query, key, value, rows, {}, **options)
    for first, count, _ in rows:
        part = slice(first, first + count)
        alone = reference_attend_packed(query[part], key[part], value[part], [(0, count, count)], {}, **options)
        assert torch.equal(alone, together[part])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize(("window", "biased"), [(None, False), (3, False), (64, True), (None, True)])
def test_the_kernel(device, dtype, lengths, window, biased):
    pytest.importorskip("triton")
    from quire.ops.kernels.packed_attention import attend_packed

    shape = SHAPES[window is None]
    (query, key, value), bias, rows, starts = make(lengths, shape, dtype, biased)
    expected = formula(query, key, value, lengths, scale=0.3, window=window, bias=bias)
    moved = [x.to(device) for x in (query, key, value)]
    found = attend_packed(
        *moved, rows, starts.to(device), {}, scale=0.3, window=window, bias=None if bias is None else bias.to(device)
    )
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found.cpu().double(), expected, rtol=tolerance, atol=tolerance)
