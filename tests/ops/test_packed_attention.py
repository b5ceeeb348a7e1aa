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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("window", "biased"), [(None, False), (20, False), (None, True)])
def test_the_kernel_gives_a_sequence_the_same_bits_in_any_batch(device, dtype, window, biased):
    pytest.importorskip("triton")
    from quire.ops.kernels.packed_attention import attend_packed

    lengths = (1, 5, 70, 64, 130) + ((3, 64, 150, 1) * 20 if device == "cuda" else ())  # more rows than a block has
    parts, bias, rows, starts = make(lengths, (2, 64), dtype, biased)
    parts, options = [x.to(device) for x in parts], {"scale": 0.3, "window": window}
    options["bias"] = None if bias is None else bias.to(device)
    together = attend_packed(*parts, rows, starts.to(device), {}, **options)
    for first, count, _ in rows[:9]:
        some = [x[first : first + count] for x in parts]
        alone = attend_packed(*some, [(0, count, count)], torch.tensor([0, count], device=device).int(), {}, **options)
        assert torch.equal(alone, together[first : first + count])


KEYS = ((40, 40), (12, 7), (200, 130), (1, 1), (65, 2))  # tokens of each sequence, and how many of them are keys


@pytest.mark.parametrize("window", [None, 3, 64])
@pytest.mark.parametrize("biased", [False, True])
def test_the_last_tokens_of_a_sequence_may_be_no_keys(window, biased):
    _fewer_keys(window, biased, lambda *parts, starts, **options: reference_attend_packed(*parts, **options))


@pytest.mark.parametrize("window", [None, 3, 64])
@pytest.mark.parametrize("biased", [False, True])
def test_the_kernel_with_fewer_keys(device, window, biased):
    pytest.importorskip("triton")
    from quire.ops.kernels.packed_attention import attend_packed

    def attend(query, key, value, rows, plans, *, starts, bias, **options):
        bias = None if bias is None else bias.to(device)
        query, key, value = (x.to(device) for x in (query, key, value))
        return attend_packed(query, key, value, rows, starts.to(device), plans, bias=bias, **options).cpu()

    _fewer_keys(window, biased, attend)


def _fewer_keys(window, biased, attend):
    (query, key, value), _, rows, starts = make([count for count, _ in KEYS], SHAPES[0], torch.float32, False)
    bias = torch.randn(2, 2 * 256 + 1) if biased else None
    rows = [(first, count, keys) for (first, count, _), (_, keys) in zip(rows, KEYS, strict=True)]
    found = attend(query, key, value, rows, {}, starts=starts, scale=0.3, window=window, bias=bias)
    for first, count, keys in rows:
        distance = torch.arange(keys) - torch.arange(count)[:, None]
        for head in range(2):
            logits = query[first : first + count, head].double() @ key[first : first + keys, head].double().T * 0.3
            logits = logits if bias is None else logits + bias[head].double()[distance + 256]
            if window is not None:
                logits = logits.masked_fill(distance.abs() > window, float("-inf"))
            right = torch.softmax(logits, -1).nan_to_num(0.0) @ value[first : first + keys, head].double()
            torch.testing.assert_close(found[first : first + count, head].double(), right, rtol=1e-5, atol=1e-5)
